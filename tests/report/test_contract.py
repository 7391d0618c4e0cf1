from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from results_factory import (
    STARTUP_SECONDS,
    failed_run,
    make_curve,
    make_rank,
    make_results,
    make_run,
    make_trial,
    one_curve,
    rich_study,
    write_results,
)
from vitscale import store
from vitscale.analysis import analyse
from vitscale.record import Results
from vitscale.report import to_csv, to_json

CONTRACT = [
    "trial", "outcome", "reason", "model", "dataset", "engine", "launcher", "mode", "modes", "nodes", "gpus",
    "micro_batch", "grad_accum", "global_batch", "precision", "repeats", "step_seconds", "step_seconds_low",
    "step_seconds_high", "images_per_second", "epoch_seconds", "epoch_seconds_source", "speedup", "speedup_low",
    "speedup_high", "efficiency", "efficiency_low", "efficiency_high", "startup_seconds", "loss", "accuracy",
    "held_out_loss", "held_out_accuracy", "peak_bytes",
]  # fmt: skip


def strict(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def by_gpus(results: Results) -> dict[int, dict[str, Any]]:
    return {trial["gpus"]: trial for trial in strict(to_json(analyse(results)))["trials"]}


def test_the_whole_contract_is_there() -> None:
    content = strict(to_json(analyse(rich_study())))
    assert list(content) == ["version", "study", "trials", "curves", "comparisons", "verdicts", "problems"]
    assert content["version"] == 1
    for trial in content["trials"]:
        assert set(CONTRACT) <= set(trial)
        assert list(trial) == list(content["trials"][0])


def test_the_values_of_a_trial_known_by_hand() -> None:
    # 1,024 images, micro-batch 8: 128 steps on one rank, 64 on two. Epochs of 12.8 and 8.0 s.
    found = by_gpus(one_curve({1: [0.1], 2: [0.125]}))
    expected = {
        "outcome": "completed", "reason": None, "model": "vit-ti16", "dataset": "synthetic", "engine": "ddp",
        "launcher": "torchrun", "mode": "strong-micro", "modes": ["strong-micro"], "nodes": 1, "gpus": 2,
        "micro_batch": 8, "grad_accum": 1, "global_batch": 16, "precision": "fp32", "repeats": 1,
        "step_seconds": 0.125, "step_seconds_low": None, "step_seconds_high": None, "images_per_second": 128.0,
        "epoch_seconds": 8.0, "epoch_seconds_source": "measured", "speedup": pytest.approx(1.6), "speedup_low": None,
        "speedup_high": None, "efficiency": pytest.approx(0.8), "efficiency_low": None, "efficiency_high": None,
        "startup_seconds": STARTUP_SECONDS, "accuracy": pytest.approx(0.7), "held_out_accuracy": pytest.approx(0.65),
        "peak_bytes": 501_000_000, "baseline": found[1]["trial"],
    }  # fmt: skip
    assert {key: found[2][key] for key in expected} == expected
    assert found[2]["held_out_loss"] == pytest.approx(found[2]["loss"] + 0.1)
    assert found[1]["speedup"] == found[1]["efficiency"] == 1.0


def test_intervals_are_in_order_where_there_are_repeats() -> None:
    for trial in by_gpus(one_curve({1: [0.1, 0.11, 0.12], 2: [0.06, 0.065]})).values():
        for figure in ("step_seconds", "images_per_second", "epoch_seconds", "speedup", "efficiency"):
            assert trial[f"{figure}_low"] <= trial[figure] <= trial[f"{figure}_high"]


def test_what_is_unknown_is_null_and_never_zero() -> None:
    trials = [make_trial("ddp", gpus) for gpus in (1, 2)]
    results = make_results(
        [(make_curve(trials, "weak"), trials)], [failed_run(trials[0], "oom", "rank 0 ran out of memory")]
    )
    found = by_gpus(results)
    assert (found[1]["outcome"], found[1]["reason"]) == ("oom", "rank 0 ran out of memory")
    assert (found[2]["outcome"], found[2]["reason"]) == (None, "not run yet")
    for trial in found.values():
        assert trial["repeats"] == 0
        unknown = [
            key for key in CONTRACT if key.startswith(("step", "images", "epoch", "speedup", "efficiency", "startup"))
        ]
        unknown += ["loss", "accuracy", "held_out_loss", "held_out_accuracy", "peak_bytes"]
        assert {key: trial[key] for key in unknown} == dict.fromkeys(unknown)


def test_no_number_that_json_does_not_know() -> None:
    trial = make_trial()
    run = make_run(trial, [make_rank(trial, 0, [0.1] * 5, losses=[math.nan] * 5)])
    results = make_results([(make_curve([trial], train__learning_rate=math.inf), [trial])], [run])
    content = strict(to_json(analyse(results)))
    assert content["trials"][0]["loss"] is None
    assert content["curves"][0]["labels"]["train.learning_rate"] is None


def test_a_trial_shared_by_curves_is_one_object_with_all_its_modes() -> None:
    content = strict(to_json(analyse(rich_study())))
    shared = [trial for trial in content["trials"] if len(trial["modes"]) > 1]
    assert [(t["mode"], t["modes"], t["gpus"]) for t in shared] == [
        ("strong-micro", ["strong-micro", "strong-global"], 1)
    ] * 2
    ids = [trial["trial"] for trial in content["trials"]]
    assert len(ids) == len(set(ids)) == 23
    points = {point["trial"] for curve in content["curves"] for point in curve["points"]}
    assert points == set(ids)


def test_the_json_is_the_same_from_a_folder_as_from_memory(tmp_path: Path) -> None:
    results = one_curve({1: [0.1, 0.11], 2: [0.06]})
    write_results(results, tmp_path / "results")
    assert to_json(analyse(store.load(tmp_path / "results"))) == to_json(analyse(results))


def test_csv_has_a_line_per_trial_and_empty_cells_for_the_unknown() -> None:
    analysis = analyse(rich_study())
    rows = list(csv.DictReader(io.StringIO(to_csv(analysis))))
    trials = strict(to_json(analysis))["trials"]
    assert [row["trial"] for row in rows] == [trial["trial"] for trial in trials]
    for row, trial in zip(rows, trials, strict=True):
        assert row["step_seconds"] == ("" if trial["step_seconds"] is None else str(trial["step_seconds"]))


def test_csv_text_is_no_formula() -> None:
    trial = make_trial()
    run = failed_run(trial, "failed", '=HYPERLINK("http://example.com"), "a"\nb')
    (row,) = csv.DictReader(io.StringIO(to_csv(analyse(make_results([(make_curve([trial]), [trial])], [run])))))
    assert row["reason"] == '\'=HYPERLINK("http://example.com"), "a"\nb'


def test_an_empty_study_is_still_valid() -> None:
    found = analyse(make_results([], []))
    assert strict(to_json(found))["trials"] == []
    assert to_csv(found) == "\n"
