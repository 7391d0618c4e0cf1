"""`vitscale advise` on records whose truth is known: what it answers, writes and refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from advice_factory import ASKED, evidence
from evidence_factory import UNKNOWN
from prediction_factory import resolved_study
from results_factory import write_results
from study_factory import EIGHT_CORES, summary
from vitscale import analysis, cli, runner, store
from vitscale.advice.comparable_series import noise_of
from vitscale.advice.pipeline import advised_from
from vitscale.pages.charts import advice as advice_charts
from vitscale.prediction.evidence import evidence_of
from vitscale.prediction.fitting import fit
from vitscale.prediction.network.links import Network
from vitscale.present.estimate import Estimate

pytestmark = pytest.mark.computing

Answer = tuple[int, str, str]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three epochs of 1,024 images at micro-batch 8; 6 s of start-up.

    100 ms on 1 rank, 104 ms on 2, 108 ms on 4: 128, 64 and 32 steps take 12.8, 6.66 and 3.46 s an epoch.
    """
    folder = tmp_path_factory.mktemp("study") / "results"
    write_results(resolved_study({1: [0.1, 0.1], 2: [0.104, 0.104], 4: [0.108, 0.108]}), folder)
    return folder


@pytest.fixture
def advise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Answer]:
    """Calls `vitscale advise`, or another verb, in this process: exit code, standard output, standard error."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))

    def call(folder: Path, *arguments: str, verb: str = "advise") -> Answer:
        monkeypatch.setattr(sys, "argv", ["vitscale", verb, str(folder), *arguments])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_known_times_come_out(advise: Callable[..., Answer], results: Path) -> None:
    code, out, err = advise(results, "--gpus", "1,2,4", "--large-batch", "--json")

    assert (code, err) == (0, "")
    found = json.loads(out)
    by_ranks = {one["gpus"]: one for one in found["pareto_front"]}
    assert by_ranks[1]["seconds"] == pytest.approx(6 + 3 * 12.8, rel=0.05)
    assert by_ranks[2]["seconds"] == pytest.approx(6 + 3 * 6.66, rel=0.05)
    assert by_ranks[4]["seconds"] == pytest.approx(6 + 3 * 3.46, rel=0.05)
    assert {one["question"]: one["gpus"] for one in found["answers"]} == {"fastest": 4, "cheapest": 1, "knee": 4}


def test_a_deadline_a_budget_and_what_they_cost(advise: Callable[..., Answer], results: Path) -> None:
    code, out, _ = advise(
        results,
        "--gpus",
        "1,2,4",
        "--large-batch",
        "--deadline",
        "36s",
        "--budget",
        "0.044",
        "--price",
        "2.5",
        "--json",
    )

    found = json.loads(out)
    first = found["answers"][0]
    # Of 1 rank 44 s; of 2 ranks 26 s for 0.036, of 4 ranks 16 s for 0.045. Start-up of 6 s may take 11.
    assert (code, first["gpus"], first["verdict"]) == (0, 2, "meets")
    assert first["cost"] == pytest.approx(2.5 * 2 * 26.0 / 3600, rel=0.05)


def test_what_advise_says_of_a_configuration_is_what_predict_says_of_it(
    advise: Callable[..., Answer], results: Path
) -> None:
    """Hosts that fail every twenty hours, and checkpoints of two seconds, are in both."""
    job = ("--epochs", "1000", "--node-mtbf", "20", "--checkpoint-seconds", "2", "--nodes-of", "2", "--json")
    _, out, _ = advise(results, "--gpus", "8,16,32", "--large-batch", *job)
    advised = {one["gpus"]: one for one in json.loads(out)["pareto_front"]}
    _, out, _ = advise(results, "--gpus", "8,16,32", *job, verb="predict")
    predicted = {one["gpus"]: one for one in json.loads(out)["predictions"]}

    assert advised
    for gpus, one in advised.items():
        other = predicted[gpus]
        assert (one["micro_batch"], one["label"]) == (8, other["label"])
        assert other["finish_seconds"] > 1.05 * 1000 * other["epoch_seconds"]
        for end in ("", "_low", "_high"):
            assert one[f"seconds{end}"] == pytest.approx(other[f"finish_seconds{end}"], rel=0.01)
        assert one["memory_bytes"] == other["memory_bytes"]


def test_nothing_meets_the_limits_and_the_exit_code_says_so(advise: Callable[..., Answer], results: Path) -> None:
    code, out, err = advise(results, "--gpus", "1,2,4", "--large-batch", "--deadline", "10s")

    assert (code, err) == (1, "")
    assert "No configuration meets the limits. What comes nearest:" in out
    assert "nearest ddp 4 32 = 4 x 8" in " ".join(out.split())


def test_what_is_written_is_a_study_that_plan_takes(
    advise: Callable[..., Answer], results: Path, tmp_path: Path
) -> None:
    study = tmp_path / "advised.toml"
    code, out, _ = advise(results, "--gpus", "2", "-o", str(study), "--verbose")

    assert code == 0
    assert f"vitscale run {study}" in out
    assert "torch.distributed.run --standalone --nproc-per-node=2" in out
    plan = runner.plan(study, machine=EIGHT_CORES, check_data=lambda _: summary(1024))
    [trial] = plan.record.trials.values()
    assert (trial.world.size, trial.train.micro_batch, trial.train.epochs) == (2, 8, 3)
    again, _, err = advise(results, "--gpus", "2", "-o", str(study))
    assert again == 2
    assert "is there already" in err


def test_a_chart_is_drawn_where_it_was_asked_for(
    advise: Callable[..., Answer], results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[int, Path]] = []
    monkeypatch.setattr(
        advice_charts, "write_advice_chart", lambda advice, path: drawn.append((len(advice.by_count), path))
    )

    code, _, _ = advise(results, "--gpus", "1,2", "--chart", str(tmp_path / "chart.svg"))

    assert code == 0
    [(options, path)] = drawn
    assert options >= 2
    assert path == tmp_path / "chart.svg"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--deadline", "2x"], "--deadline: '2x' is no duration"),
        (["--budget", "-5"], "--budget: -5 cannot be"),
        (["--budget", "nan"], "--budget"),
        (["--price", "0"], "--price: 0 cannot be"),
        (["--min-efficiency", "80"], "numbers above 0 and at most 1"),
        (["--max-gpus", "0"], "--max-gpus: 0 cannot be"),
        (["--gpus", "0"], "--gpus"),
        (["--gpus", "two"], "--gpus"),
        (["--gpu-memory", "80"], "--gpu-memory"),
        (["--series", "nobody"], "unknown series 'nobody'"),
        (["--network", "a string and two tins"], "a string and two tins"),
        (["--chart", "chart.gif"], "unknown chart format 'gif'"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    advise: Callable[..., Answer], results: Path, arguments: list[str], said: str
) -> None:
    code, out, err = advise(results, *arguments)

    assert (code, out) == (2, "")
    assert said in " ".join(err.split())
    assert "Traceback" not in err


def test_a_folder_without_results(advise: Callable[..., Answer], tmp_path: Path) -> None:
    code, _, err = advise(tmp_path / "nothing")

    assert code == 2
    assert "Traceback" not in err


def test_a_real_fit_across_hosts_names_the_check_where_nobody_measured_the_network(results: Path) -> None:
    records = store.load(results)
    # A check so unsure of the host that the steps' growth can be its doing.
    inside_known = replace(
        evidence(), network=Network(replace(UNKNOWN.inside, bandwidth_spread=3.0, source="check"), UNKNOWN.across)
    )
    advice = advised_from(fit(inside_known), analysis.analyse(records), replace(ASKED, gpus=(40,), ranks_per_node=20))

    assert advice.chosen is not None
    assert advice.chosen.label == "prior-driven"
    assert any(one.part == "network between hosts" for one in advice.assumptions)
    assert any("vitscale check --hostfile" in one.what for one in advice.measurements)


def test_the_noise_scale_is_the_median_over_the_series_trials(results: Path) -> None:
    found = analysis.analyse(store.load(results))
    known = evidence_of(results, found)
    assert noise_of(found, known, None).images is None
    trials = {}
    for place, (trial_id, result) in enumerate(found.trials.items()):
        assert result.convergence is not None
        scale = Estimate((300.0, 500.0, 100.0)[place], None, None)
        trials[trial_id] = replace(result, convergence=replace(result.convergence, noise_scale_images=scale))

    noise = noise_of(replace(found, trials=trials), known, None)

    assert (noise.images, noise.low, noise.high) == (300.0, 100.0, 500.0)


def test_instances_of_a_price_table_are_chosen_among_by_what_they_cost(
    advise: Callable[..., Answer], tmp_path: Path
) -> None:
    measured = tmp_path / "v100.csv"
    rows = [f"{gpus},{0.9 + 0.1 * gpus},64,fp16,V100,{run}" for gpus in (1, 2, 4, 8) for run in (1, 2)]
    measured.write_text("\n".join(["gpus,step_seconds,micro_batch,precision,gpu,run", *rows]), encoding="utf-8")
    folder = tmp_path / "imported"
    advise(measured, "-o", str(folder), verb="import")
    prices = tmp_path / "prices.csv"
    prices.write_text(
        "instance,gpu,count,price\none,V100,1,2\neight,V100,8,8\ngreat,A100,8,400\nold,K80,8,1\n", encoding="utf-8"
    )

    code, out, _ = advise(
        folder, "--devices", str(prices), "--epochs", "1", "--images", "6400000", "--max-gpus", "16", "--json"
    )

    assert code == 0
    found = {one["question"]: one for one in json.loads(out)["answers"]}
    # 100,000 steps on one V100 cost 55.6 at 2 an hour; 12,500 of 1.7 s on 8 cost 47.2 at 1 for each GPU's hour.
    assert found["cheapest"]["instance"] == "eight"
    assert found["cheapest"]["cost"] == pytest.approx(8 * 12_500 * 1.7 / 3600, rel=0.05)
    assert found["fastest"]["instance"] == "great"
    assert (found["fastest"]["gpus"] % 8, found["fastest"]["label"]) == (0, "prior-driven")

    code, out, _ = advise(
        folder, "--devices", str(prices), "--epochs", "1", "--images", "6400000", "--max-gpus", "16",
        "--budget", "60", "--verbose",
    )  # fmt: skip
    assert "eight (Tesla V100-SXM2-16GB), micro-batch 64 (global batch " in " ".join(out.split())
    assert "Tesla K80 left out: Tesla K80 does not train in fp16" in " ".join(out.split())
    header = next(line for line in out.splitlines() if line.lstrip().startswith("instance"))
    assert header.split() == ["instance", "ranks", "hosts", "batch", "time", "cost", "eff.", "met", "known"]


@pytest.mark.parametrize("options", [("--nodes-of", "4"), ("--split",), ("--gpu-memory", "1GB")])
def test_what_says_nothing_of_instances_is_refused(
    advise: Callable[..., Answer], results: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    prices = tmp_path / "prices.csv"
    prices.write_text("instance,gpu,count,price\none,V100,1,2\n", encoding="utf-8")
    code, _, err = advise(results, "--devices", str(prices), *options)
    assert code == 2
    assert f"{options[0]} says nothing of the instances of --devices. Add --price" in " ".join(err.split())


def test_instances_need_a_gpu_that_was_measured(advise: Callable[..., Answer], results: Path, tmp_path: Path) -> None:
    prices = tmp_path / "prices.csv"
    prices.write_text("instance,gpu,count,price\none,V100,1,2\n", encoding="utf-8")
    code, _, err = advise(results, "--devices", str(prices))

    assert code == 2
    assert "another GPU cannot be told from these results: 'Example CPU' is no GPU known here" in " ".join(err.split())


def test_parameters_of_an_imported_model_open_other_engines(advise: Callable[..., Answer], tmp_path: Path) -> None:
    table, folder = tmp_path / "steps.csv", tmp_path / "imported"
    rows = [f"{gpus},1,{step},0.1,16,ddp" for gpus in (1, 2, 4) for step in range(12)]
    table.write_text("\n".join(["gpus,nodes,step,step_seconds,micro_batch,engine", *rows]) + "\n")
    assert advise(table, "-o", str(folder), "--train-samples", "1024", verb="import")[0] == 0

    def refused(*told: str) -> set[str]:
        code, out, _ = advise(folder, "--gpus", "8", "--epochs", "3", "--json", *told)
        assert code == 0
        return set(json.loads(out)["refused"])

    assert "fsdp2" in refused()
    assert "fsdp2" not in refused("--parameters", "110M")


def test_parameters_of_a_known_model_are_refused(advise: Callable[..., Answer], results: Path) -> None:
    code, _, err = advise(results, "--parameters", "110M")
    assert code == 2
    assert "the model is known" in err


def test_of_imported_results_no_study_is_promised(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text(
        "engine,gpus,epoch,epoch_seconds\n"
        + "".join(f"ddp,{n},{e},{10 / n + e / 50}\n" for n in (1, 2) for e in range(4))
    )
    results = str(tmp_path / "results")
    run = CliRunner().invoke
    assert (
        run(cli.app, ["import", str(log), "-o", results, "--train-samples", "1000", "--micro-batch", "16"]).exit_code
        == 0
    )
    answer = run(cli.app, ["advise", results, "--epochs", "5"]).stdout
    assert "unavailable: these results were imported" in answer
    assert "-o STUDY.toml" not in answer
