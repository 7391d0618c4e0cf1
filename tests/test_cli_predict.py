"""`vitscale predict`: what it answers, and what it refuses with one message and exit code 2."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prediction_factory import resolved_study
from results_factory import failed_run, make_curve, make_results, make_trial, write_results
from vitscale import cli
from vitscale.errors import RequestError
from vitscale.prediction.answering import matching

pytestmark = pytest.mark.computing

Answer = tuple[int, str, str]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One, two and four ranks under DDP."""
    folder = tmp_path_factory.mktemp("study") / "results"
    write_results(resolved_study({1: [0.1, 0.101], 2: [0.104, 0.105], 4: [0.108, 0.109]}), folder)
    return folder


@pytest.fixture
def vitscale(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Answer]:
    """Calls the command line in this process: exit code, standard output, standard error."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))

    def call(*arguments: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["vitscale", *arguments])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def predict(vitscale: Callable[..., Answer]) -> Callable[..., Answer]:
    """Calls `vitscale predict FOLDER ARGUMENTS`."""
    return lambda folder, *arguments: vitscale("predict", str(folder), *arguments)


def test_rates_of_an_untold_batch_are_predicted_as_rates(vitscale: Callable[..., Answer], tmp_path: Path) -> None:
    """200 images/s a GPU at each count, whatever a step is: no step, and images/s and efficiency of 1."""
    table = tmp_path / "rates.csv"
    table.write_text("gpus,images_per_second\n1,200\n2,400\n4,800\n8,1600\n")
    assert vitscale("import", str(table), "-o", str(tmp_path / "r"))[0] == 0
    _, out, _ = vitscale("predict", str(tmp_path / "r"), "--gpus", "4", "--json")
    (fields,) = told(out)
    assert {name: fields[name] for name in ("step_seconds", "compute_seconds", "wire_seconds_low")} == {
        "step_seconds": None, "compute_seconds": None, "wire_seconds_low": None,
    }  # fmt: skip
    assert fields["images_per_second"] == pytest.approx(800, rel=0.03)
    assert "--micro-batch" in fields["reasons"]["step_seconds"]
    _, out, _ = vitscale("predict", str(tmp_path / "r"), "--gpus", "16")
    heading = out.splitlines()[2]
    assert "images/s" in heading
    assert "step" not in heading
    assert vitscale("report", str(tmp_path / "r"), "--format", "md", "-o", str(tmp_path / "r.md"))[0] == 0
    page = (tmp_path / "r.md").read_text()
    assert "Step time, compute" in page, "its predictions are there"
    assert re.search(r"ms a step|Predicted time", page) is None


def told(out: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(out)["predictions"]
    return found


def test_json_has_an_interval_of_a_run_for_each_rank_count(predict: Callable[..., Answer], results: Path) -> None:
    code, out, err = predict(results, "--gpus", "8,2,1024", "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["vitscale"], told["version"]) == ("predict", 1)
    found = told["predictions"]
    assert [one["gpus"] for one in found] == [2, 8, 1024]
    for one in found:
        assert one["epoch_seconds_low"] < one["epoch_seconds"] < one["epoch_seconds_high"]
        assert one["epoch_seconds_low"] <= one["epoch_seconds_mean_low"]
    assert [one["label"] for one in found] == ["interpolated", "extrapolated", "prior-driven"]
    assert found[0]["epoch_seconds"] == pytest.approx(64 * 0.1045, rel=0.05)
    assert found[2]["assumptions"][0]["part"] == "network between hosts"


def test_the_table_fits_80_columns_and_says_what_it_rests_on(predict: Callable[..., Answer], results: Path) -> None:
    job = ("--epochs", "90", "--node-mtbf", "1000", "--checkpoint-seconds", "12", "--verbose")
    code, out, err = predict(
        results, "--gpus", "4,16,1024", "--price", "2.5", "--gpu-memory", "80GB", *job, "--verbose"
    )
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    for part in (
        "measured on 1, 2 and 4 ranks, 1 host", "interpolated", "prior-driven", "Assumed: network between hosts",
        "What would narrow it most", "Energy: unavailable", "Time to finish 90 epochs (prior-driven)",
        "predicting 4 ranks from 1 and 2", "nothing measured between hosts",
    ):  # fmt: skip
        assert part in " ".join(out.split()), part


def test_one_table_and_what_would_narrow_it_in_25_lines(predict: Callable[..., Answer], results: Path) -> None:
    code, out, _ = predict(results, "--gpus", "1-64", "--price", "2.5", "--epochs", "90")
    assert code == 0
    assert len(out.splitlines()) <= 25
    assert "What would narrow it most: " in " ".join(out.splitlines()[-2:])
    assert "More with --verbose: " in out


def test_a_declared_network_is_no_prior_and_narrows_the_answer(predict: Callable[..., Answer], results: Path) -> None:
    (assumed,) = told(predict(results, "--gpus", "64", "--nodes-of", "4", "--json")[1])
    (declared,) = json.loads(predict(results, "--gpus", "64", "--nodes-of", "4", "--network", "100GbE", "--json")[1])[
        "predictions"
    ]
    assert (assumed["label"], declared["label"]) == ("prior-driven", "extrapolated")
    assert declared["nodes"] == 16
    ratio = {
        name: one["epoch_seconds_high"] / one["epoch_seconds_low"]
        for name, one in (("assumed", assumed), ("declared", declared))
    }
    assert ratio["declared"] < ratio["assumed"]


def test_another_configuration_is_told_and_another_answer(predict: Callable[..., Answer], results: Path) -> None:
    (own,) = told(predict(results, "--gpus", "8", "--json")[1])
    (other,) = json.loads(predict(results, "--gpus", "8", "--json", "--model", "vit-b16", "--micro-batch", "16")[1])[
        "predictions"
    ]
    assert other["micro_batch"] == 16
    assert other["step_seconds"] > 2 * own["step_seconds"]
    out = predict(results, "--gpus", "8", "--model", "vit-b16", "--micro-batch", "16")[1]
    assert "with vit-b16, micro_batch 16" in " ".join(out.split())


def test_the_time_to_finish_is_in_the_json(predict: Callable[..., Answer], results: Path) -> None:
    (one,) = told(predict(results, "--gpus", "8", "--epochs", "1000", "--json")[1])
    assert one["finish_seconds"] > one["work_seconds"] == pytest.approx(1000 * one["epoch_seconds"])
    assert one["finish_seconds_low"] < one["finish_seconds"] < one["finish_seconds_high"]
    assert one["finish_label"] == "prior-driven"
    assert one["finish_assumptions"]


@pytest.mark.parametrize("verb", ["report", "predict", "advise"])
def test_every_verb_words_the_count_alike(vitscale: Callable[..., Answer], results: Path, verb: str) -> None:
    """Below the answer, within the first screen."""
    lines = vitscale(verb, str(results))[1].splitlines()[:25]
    assert "vit-ti16: 5,500,000 parameters (measured)" in [line.strip(" -") for line in lines]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "0"], "0 ranks cannot be"),
        (["--gpus", "sixteen"], "'sixteen' is no rank count"),
        (["--gpus", "200000"], "200000 ranks cannot be"),
        (["--gpus", "8", "--series", "nothing"], "unknown series 'nothing'. Valid: 'ddp'"),
        (["--gpus", "8", "--engine", "horovod"], "unknown engine 'horovod'"),
        (["--gpus", "8", "--model", "vit-b61"], "Did you mean 'vit-b16'?"),
        (["--gpus", "8", "--network", "carrier pigeon"], "carrier pigeon"),
        (["--gpus", "8", "--check", "/nowhere/check.json"], "/nowhere/check.json cannot be read"),
        (["--gpus", "8", "--nodes-of", "0"], "--nodes-of is 0"),
        (["--gpus", "8", "--zero-stage", "2"], "zero_stage"),
        (["--gpus", "8", "--zero-stage", "7"], "--zero-stage is 7"),
        (["--gpus", "8", "--precision", "fp8"], "unknown precision 'fp8'"),
        (["--gpus", "8", "--micro-batch", "0"], "--micro-batch is 0"),
        (["--gpus", "8", "--price", "-1"], "--price is -1"),
        (["--gpus", "8", "--price", "nan"], "--price is nan"),
        (["--gpus", "8", "--gpu-memory", "lots"], "--gpu-memory: 'lots' is no size"),
        (["--gpus", "8", "--epochs", "0"], "--epochs is 0"),
        (["--gpus", "8", "--node-mtbf", "100"], "says nothing without --epochs"),
    ],
)
def test_bad_input_is_one_message(
    predict: Callable[..., Answer], results: Path, arguments: list[str], said: str
) -> None:
    code, out, err = predict(results, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("vitscale: ")
    assert said in err
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 2


def test_results_without_a_completed_run_are_refused(predict: Callable[..., Answer], tmp_path: Path) -> None:
    trial = make_trial()
    failed = failed_run(trial, "oom", "rank 0 ran out of memory")
    write_results(make_results([(make_curve([trial]), [trial])], [failed]), tmp_path / "results")
    code, out, err = predict(tmp_path / "results", "--gpus", "8")
    assert (code, out) == (2, "")
    assert "no completed run to predict from" in err


def test_what_is_no_results_folder_is_refused(predict: Callable[..., Answer], tmp_path: Path) -> None:
    code, out, err = predict(tmp_path / "nothing", "--gpus", "8")
    assert (code, out) == (2, "")
    assert err.startswith("vitscale: ")


def test_a_series_is_named_by_what_it_begins_with() -> None:
    names = ["ddp, micro_batch 8, weak", "ddp, strong-micro", "ddp ZeRO-1, weak", "plain"]
    assert matching(names, "ddp") == names[:2]
    assert matching(names, "ddp, micro_batch 8") == names[:1]
    assert matching(names, "plain") == ["plain"]
    with pytest.raises(RequestError, match=r"'plan'\. Did you mean 'plain'\? Valid: 'ddp ZeRO-1, weak', 'ddp, mic"):
        matching(names, "plan")


def test_unless_it_is_said_two_four_and_eight_times_what_was_measured(
    predict: Callable[..., Answer], results: Path
) -> None:
    code, out, err = predict(results, "--json")
    assert (code, err) == (0, "")
    assert [one["gpus"] for one in told(out)] == [8, 16, 32]


def test_the_report_looks_ahead_by_itself(vitscale: Callable[..., Answer], results: Path) -> None:
    code, out, _ = vitscale("report", str(results), "--json")
    content = json.loads(out)
    assert code == 0
    assert max(one["gpus"] for one in content["predictions"]) == 32
    assert [one["held_out_gpus"] for one in content["prediction_scores"]] == [[4]]
    assert vitscale("report", str(results), "--json")[1] == out


def test_a_report_without_a_completed_run_has_no_predictions(vitscale: Callable[..., Answer], tmp_path: Path) -> None:
    trial = make_trial()
    failed = failed_run(trial, "oom", "rank 0 ran out of memory")
    write_results(make_results([(make_curve([trial]), [trial])], [failed]), tmp_path / "results")
    code, out, err = vitscale("report", str(tmp_path / "results"), "--format", "md")
    assert (code, err) == (0, "")
    assert "nobody has measured" not in out


@pytest.mark.parametrize(
    ("name", "begins"),
    [("page.html", "<!doctype html>"), ("page", "<!doctype html>"), ("page.md", "# "), ("page.json", "{")],
)
def test_a_report_s_file_has_the_format_of_its_name(
    vitscale: Callable[..., Answer], results: Path, tmp_path: Path, name: str, begins: str
) -> None:
    assert vitscale("report", str(results), "-o", str(tmp_path / name))[0] == 0
    assert (tmp_path / name).read_text(encoding="utf-8").startswith(begins)


def test_a_report_s_file_of_no_format_is_refused(
    vitscale: Callable[..., Answer], results: Path, tmp_path: Path
) -> None:
    code, _, err = vitscale("report", str(results), "-o", str(tmp_path / "page.docx"))
    assert code == 2
    assert "-o ends in '.docx'. Valid: .html, .htm, .md, .tex, .json" in " ".join(err.split())
    assert not (tmp_path / "page.docx").exists()


def test_json_is_not_written_into_a_page(vitscale: Callable[..., Answer], results: Path, tmp_path: Path) -> None:
    code, _, err = vitscale("report", str(results), "--json", "-o", str(tmp_path / "z.html"))
    assert code == 2
    assert "are of two formats. Write --format html,json -o FOLDER, or -o FILE.json" in " ".join(err.split())
    assert not (tmp_path / "z.html").exists()
    assert vitscale("report", str(results), "--json", "-o", str(tmp_path / "z.json"))[0] == 0
    assert json.loads((tmp_path / "z.json").read_text())["vitscale"] == "report"
