"""The findings on the DeepSpeed file of a study, as `plan` and `run` print them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from driving import vitscale
from study_factory import EIGHT_CORES, summary, toml, write_study
from vitscale.deepspeed_lint.rules import findings_of
from vitscale.present.terminal import show
from vitscale.runner.planning import Plan, plan
from vitscale.runner.preview import finding_lines, plan_document, plan_fields

APPENDIX_B = json.loads((Path(__file__).parent / "appendix_b.json").read_text())
OF_THE_FILE = {"micro_batch_per_gpu", "pin_memory", "wall_clock_breakdown", "fp16.enabled", "pipeline"}


def study(
    config: dict[str, Any], train: dict[str, Any] | None = None, ranks: list[int] | None = None
) -> dict[str, Any]:
    """The changes that make a study of `config`; write `ds.json` beside it."""
    return {
        "train": {"engine": "deepspeed", "deepspeed_config": "ds.json", "micro_batch": 16} | (train or {}),
        "scaling": {"mode": "strong-global", "gpus": ranks or [2]},
        "model": {"name": "vit-b16", "image_size": 32, "patch_size": 8},
    }


def planned(folder: Path, config: dict[str, Any], **changes: Any) -> Plan:
    (folder / "ds.json").write_text(json.dumps(config))
    return plan(write_study(folder, study(config, **changes)), EIGHT_CORES, lambda _: summary())


def rules(of: Plan) -> set[tuple[str, str]]:
    return {(finding.kind, finding.about.key) for finding in findings_of(of.record.trials)}


def test_what_the_study_writes_itself_is_not_held_against_the_file(tmp_path: Path) -> None:
    found = rules(planned(tmp_path, APPENDIX_B))
    assert {key for _, key in found} - {"zero_optimization.stage"} == OF_THE_FILE
    assert ("no-overlap", "zero_optimization.stage") in found
    assert "clipping-omitted" not in {rule for rule, _ in found}
    assert "batch-arithmetic" not in {rule for rule, _ in found}


def test_the_study_s_precision_stage_and_options_count(tmp_path: Path) -> None:
    config: dict[str, Any] = {"activation_checkpointing": {"profile": False}}
    found = rules(planned(tmp_path, config, train={"precision": "fp32", "zero_stage": 2}))
    assert {"no-reduced-precision", "no-overlap", "bucket-memory"} <= {
        rule for rule, _ in found
    }  # DeepSpeed's defaults
    found = rules(planned(tmp_path, config, train={"precision": "bf16", "zero_stage": 2}))
    assert "no-reduced-precision" not in {rule for rule, _ in found}
    options = {"precision": "bf16", "zero_stage": 2, "overlap_comm": True, "bucket_mib": 4}
    found = rules(planned(tmp_path, config, train=options))
    assert {rule for rule, _ in found} == {"needs-the-program", "stage-saves-little"}


def test_what_the_study_takes_from_the_file_is_held_against_the_file(tmp_path: Path) -> None:
    config = {"bf16": {"enabled": True}, "communication_data_type": "fp32", "zero_optimization": {"stage": 2}}
    found = planned(tmp_path, config)
    assert {trial.train.gradient_dtype for trial in found.record.trials.values()} == {"fp32"}
    assert ("communication-type", "communication_data_type") in rules(found)


def test_what_the_file_says_of_gradients_is_said_to_have_no_effect_under_autocast(tmp_path: Path) -> None:
    """At stage 0 it has one."""
    file = {"communication_data_type": "fp32"}
    found = planned(tmp_path, file, train={"precision": "bf16", "zero_stage": 2})
    assert {trial.train.gradient_dtype for trial in found.record.trials.values()} == {None}
    (said,) = [f for f in findings_of(found.record.trials) if f.kind == "communication-type"]
    assert said.severity == "warning"
    assert said.message.startswith("Without effect: under torch_autocast stage 2 sends each gradient in the type")
    whole = planned(tmp_path, file, train={"precision": "bf16", "zero_stage": 0})
    assert {trial.train.gradient_dtype for trial in whole.record.trials.values()} == {"fp32"}


def test_trials_without_a_file_have_no_findings(tmp_path: Path) -> None:
    found = plan(write_study(tmp_path), EIGHT_CORES, lambda _: summary())
    assert findings_of(found.record.trials) == ()


def test_a_finding_of_several_trials_is_told_once(tmp_path: Path) -> None:
    config = {"micro_batch_per_gpu": 16, "zero_optimization": {"stage": 0}}
    found = planned(tmp_path, config, ranks=[1, 2])
    file_findings = findings_of(found.record.trials)
    lines = finding_lines(found, file_findings)
    (unknown,) = [line for line in lines if "micro_batch_per_gpu" in line]
    assert unknown.startswith("error: micro_batch_per_gpu: DeepSpeed ")
    (overlap,) = [line for line in lines if "all-reduced after backward" in line]
    assert overlap.endswith("(1 of 2 trials)")  # one rank sends nothing
    told = {(f["kind"], f["key"]): f for f in plan_fields(found, findings=file_findings)["findings"]}
    assert set(told["unknown-key", "micro_batch_per_gpu"]) == {
        "kind", "severity", "key", "line", "message", "advice", "source", "trials", "ranks", "hosts",
    }  # fmt: skip
    assert told["unknown-key", "micro_batch_per_gpu"]["trials"] == list(found.record.trials)
    assert len(told["no-overlap", "zero_optimization.stage"]["trials"]) == 1


def test_a_plan_tells_them_before_its_commands_and_takes_no_markup(tmp_path: Path) -> None:
    found = planned(tmp_path, {"[red]x[/red]": 1, "\x1b[2J": 1})
    console = Console(width=80, force_terminal=True)
    with console.capture() as captured:
        show(console, plan_document(found, findings=findings_of(found.record.trials)), verbose=True)
    printed = captured.get()
    assert printed.index("[red]x[/red]") < printed.index("Commands")
    assert "\\x1b[2J" in printed
    assert "\x1b[2J" not in printed


def test_run_prints_them_before_it_starts(tmp_path: Path) -> None:
    """A full results folder of another study stops the run right after."""
    (tmp_path / "ds.json").write_text(json.dumps({"micro_batch_per_gpu": 16}))
    changes = study({}, {"micro_batch": 16, "epochs": 1}, [1]) | {"data": {"name": "synthetic", "samples": 64}}
    (tmp_path / "study.toml").write_text(toml(changes))
    (tmp_path / "results").mkdir()
    (tmp_path / "results/foreign").touch()
    answer = vitscale("run", tmp_path / "study.toml", "-o", tmp_path / "results")
    assert answer.returncode == 2
    assert "error: micro_batch_per_gpu: DeepSpeed" in answer.stdout
    answer = vitscale("run", tmp_path / "study.toml", "-o", tmp_path / "results", "--json")
    assert answer.stdout == ""
    assert "error: micro_batch_per_gpu: DeepSpeed" in answer.stderr
    answer = vitscale("plan", tmp_path / "study.toml")
    assert "error  unknown-key  micro_batch_per_gpu" in answer.stdout
    assert answer.returncode == 0
