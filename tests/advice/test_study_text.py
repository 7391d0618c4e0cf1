from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from advice_factory import ASKED, EPOCHS, advised, forecaster
from evidence_factory import make_trial
from study_factory import gpus, summary
from vitscale import runner
from vitscale.advice.pipeline import Advice
from vitscale.advice.study_text import advised_trial, launch_lines, start_line, study_text
from vitscale.errors import RequestError
from vitscale.machine.hardware import Machine
from vitscale.prediction.configurations import Candidate
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.trial import DataSpec, Trial

ONE_HOST = Machine(cores=64, cpu_quota_cores=None, gpus=gpus(20), cpu_has_fast_bf16=False)


def text_of(advice: Advice, trial: Trial | None = None) -> str:
    option = advice.chosen
    assert option is not None
    return study_text("vit-advised", option, trial or advice.trials[option.series], advice.work)


def planned(tmp_path: Path, text: str, **overlay: Any) -> runner.Plan:
    path = tmp_path / "STUDY.toml"
    path.write_text(text, encoding="utf-8")
    return runner.plan(path, machine=ONE_HOST, check_data=lambda _: summary(6400), overlay=overlay or None)


def scripted(trial: Trial, script: Path, *arguments: str) -> Trial:
    """The trial as if a script had trained it, for 50 steps."""
    script.write_text("pass\n")
    train = trial.train.model_copy(
        update={"engine": "script", "script": str(script), "arguments": arguments, "epochs": None}
    )
    data = DataSpec(name="script", samples=6400)
    window = trial.window.model_copy(update={"steps": 50})
    return trial.model_copy(update={"model": ModelSpec(), "data": data, "train": train, "window": window})


def only_trial(plan: runner.Plan) -> Trial:
    [trial] = plan.record.trials.values()
    return trial


def test_plan_takes_what_advise_writes_and_gets_the_very_configuration(tmp_path: Path) -> None:
    advice = advised(replace(ASKED, deadline_seconds=2000.0))
    option = advice.chosen
    assert option is not None

    trial = only_trial(planned(tmp_path, text_of(advice)))

    candidate = option.candidate
    assert (trial.world.size, trial.world.nodes) == (candidate.gpus, option.nodes) == (10, 1)
    assert (trial.train.engine, trial.train.micro_batch, trial.train.grad_accum) == ("ddp", 64, 1)
    assert trial.world.threads_per_rank == advice.trial.world.threads_per_rank
    assert trial.global_batch == option.global_batch
    assert trial.train.epochs == EPOCHS
    assert trial.model == advice.trial.model
    assert trial.data == advice.trial.data
    # All else that is computed is as it was measured.
    same = {"engine", "micro_batch", "grad_accum", "epochs"}
    assert trial.train.model_dump(exclude=same) == advice.trial.train.model_dump(exclude=same)


def test_several_hosts_and_an_engine_with_a_stage(tmp_path: Path) -> None:
    def only_zero_3(one: Candidate) -> float:
        return 0.0 if one.changes["zero_stage"] == 3 and one.activation_checkpointing else 100.0

    asked = replace(ASKED, gpus=(8,), ranks_per_node=4)
    advice = advised(asked, forecaster(memory=only_zero_3, capacity=10.0))
    hostfile = tmp_path / "hosts"
    hostfile.write_text("HOST1 slots=4\nHOST2 slots=4\n", encoding="utf-8")

    trial = only_trial(planned(tmp_path, text_of(advice), launch={"hostfile": str(hostfile)}))

    assert (trial.world.nodes, trial.world.ranks_per_node) == (2, 4)
    assert (trial.train.engine, trial.train.zero_stage, trial.train.activation_checkpointing) == ("deepspeed", 3, True)


def test_a_launcher_of_one_host_gives_way_where_the_advice_has_several(tmp_path: Path) -> None:
    """The study starts there, as the job files start it: with a hostfile."""
    advice = advised(replace(ASKED, gpus=(8,), ranks_per_node=4))
    option = advice.chosen
    assert option is not None
    local = advice.trials[option.series].model_copy(update={"launcher": "local"})
    hostfile = tmp_path / "hosts"
    hostfile.write_text("HOST1 slots=4\nHOST2 slots=4\n", encoding="utf-8")

    text = text_of(advice, local)
    plan = planned(tmp_path, text, launch={"hostfile": str(hostfile)})

    assert only_trial(plan).launcher == "torchrun"
    assert '# Measured under launcher = "local", which starts ranks on one host alone: "torchrun"' in text
    assert len(launch_lines(advised_trial(option, local, advice.work))) == 2
    one_host = advised(replace(ASKED, gpus=(8,)))
    kept = text_of(one_host, one_host.trial.model_copy(update={"launcher": "local"}))
    assert tomllib.loads(kept)["launch"]["launcher"] == "local"
    assert "Measured under" not in kept


def test_every_option_of_the_measured_training_is_written(tmp_path: Path) -> None:
    advice = advised()
    option = advice.chosen
    assert option is not None
    kept: dict[str, Any] = {
        "learning_rate": 0.00031, "learning_rate_scaling": "sqrt", "learning_rate_warmup_steps": 7, "optimizer": "sgd",
        "momentum": 0.85, "weight_decay": 0.0, "gradient_clipping": 1.5, "bucket_mib": 10, "static_graph": True,
        "drop_last": True, "seed": 3,
    }  # fmt: skip
    trial = advice.trial.model_copy(update={"train": advice.trial.train.model_copy(update=kept)})

    found = only_trial(planned(tmp_path, text_of(advice, trial)))

    assert {name: getattr(found.train, name) for name in kept} == kept


def test_text_that_toml_must_escape(tmp_path: Path) -> None:
    advice = advised()
    odd = 'a "folder"\\with\x7f \N{SNOWMAN}\N{GRINNING FACE}\n'
    trial = advice.trial.model_copy(update={"data": advice.trial.data.model_copy(update={"root": odd})})

    content = tomllib.loads(text_of(advice, trial))

    assert content["data"]["root"] == odd


def test_a_name_that_no_study_may_have_is_mended(tmp_path: Path) -> None:
    advice = advised()
    option = advice.chosen
    assert option is not None

    text = study_text('my "study"\n[model]', option, advice.trial, advice.work)

    assert planned(tmp_path, text).record.name == "my--study---model-"


@pytest.mark.parametrize("told", [(), ("--epochs", "{epochs}")])
def test_a_script_is_told_what_it_takes_and_plan_gets_the_same(tmp_path: Path, told: tuple[str, ...]) -> None:
    """Epochs only where an argument hands them on; else as many steps as were measured."""
    advice = advised()
    own = scripted(advice.trial, tmp_path / "own.py", "--batch-size", "{micro_batch}", *told)

    text = text_of(advice, own)
    trial = only_trial(planned(tmp_path, text))

    assert "[model]" not in text
    assert (trial.train.engine, trial.train.script) == ("script", own.train.script)
    assert trial.train.arguments == own.train.arguments
    assert (trial.train.epochs, trial.window.steps) == ((EPOCHS, None) if told else (None, 50))


def test_what_only_its_author_can_repeat_is_refused() -> None:
    advice = advised()
    imported = advice.trial.model_copy(update={"origin": "a log"})
    with pytest.raises(RequestError, match="imported"):
        text_of(advice, imported)


def test_the_comment_says_when_the_global_batch_is_another() -> None:
    assert "NOT the one" not in text_of(advised())
    advice = advised(replace(ASKED, gpus=(10,), any_batch=True))
    assert advice.chosen is not None
    assert not advice.chosen.keeps_batch
    assert "NOT the one" in text_of(advice)


def test_the_launch_line_names_hosts_and_ranks() -> None:
    asked = replace(ASKED, gpus=(8,), ranks_per_node=4)
    advice = advised(asked)
    assert advice.chosen is not None

    lines = launch_lines(advised_trial(advice.chosen, advice.trial, advice.work))

    assert len(lines) == 2
    assert lines[1] == (
        "python -P -m torch.distributed.run --nnodes=2 --node-rank=1 --rdzv-backend=static --rdzv-conf=timeout=300 "
        "--master-addr=HOST1 --master-port=29500 --nproc-per-node=4 --max-restarts=0 -m vitscale.worker "
        "RESULTS/runs/TRIAL"
    )


def test_the_command_that_starts_a_written_file_names_its_hosts_and_is_one_for_a_shell() -> None:
    chosen = advised(replace(ASKED, gpus=(8,), ranks_per_node=4)).chosen
    assert chosen is not None
    alone = replace(chosen, candidate=replace(chosen.candidate, gpus=4))
    trial, file = make_trial(8), Path("my study.toml")
    assert start_line(file, chosen, trial, None) == "vitscale run 'my study.toml' --hostfile HOSTS"
    of_slurm = trial.model_copy(update={"launcher": "srun"})
    assert start_line(Path("a.toml"), chosen, of_slurm, None) == "vitscale run a.toml --scheduler slurm"
    assert start_line(Path("a.toml"), alone, trial, None) == "vitscale run a.toml"
    assert start_line(file, chosen, trial, "sky launch") == "sky launch 'my study.toml'"


def test_a_launcher_that_is_not_here_is_said_to_be_unavailable() -> None:
    advice = advised()
    assert launch_lines(advice.trial.model_copy(update={"launcher": "no-such"}))[0].startswith("unavailable: ")
