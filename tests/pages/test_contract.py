from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import polars
import pytest

from explained_factory import NO_ENERGY, NOISE_SCALE, SLOWDOWN, batch_study
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
    steady_run,
    write_results,
)
from vitscale import store
from vitscale.analysis import Analysis, analyse
from vitscale.pages.contract import _NESTED, _TYPE_BY_COLUMN, run_columns, run_rows, to_json, to_table, trial_rows
from vitscale.pages.tables import batch_text, mode_tables, trial_label
from vitscale.store.results import Results, Run

EXPLAINED = [
    "exposed_share", "data_wait_share", "explaining_overhead", "mfu", "share_of_matmul", "joules_per_image",
    "peak_rss_bytes", "cuda_allocated_bytes", "cuda_reserved_bytes", "cuda_device_bytes", "noise_scale_images",
    "noise_scale_images_low", "noise_scale_images_high", "seconds_to_target", "seconds_to_target_low",
    "seconds_to_target_high",
]  # fmt: skip
"""Since version 2: values of their own, in CSV too."""
CONTRACT = [
    "trial", "outcome", "reason", "model", "dataset", "engine", "launcher", "mode", "modes", "nodes", "gpus",
    "micro_batch", "grad_accum", "global_batch", "precision", "repeats", "step_seconds", "step_seconds_low",
    "step_seconds_high", "images_per_second", "epoch_seconds", "epoch_seconds_source", "speedup", "speedup_low",
    "speedup_high", "efficiency", "efficiency_low", "efficiency_high", "startup_seconds", "loss", "accuracy",
    "held_out_loss", "held_out_accuracy", "peak_bytes", *EXPLAINED, "breakdown", "resources", "convergence",
]  # fmt: skip


def csv_of(analysis: Analysis) -> str:
    return to_table(trial_rows(analysis), "csv").decode()


def strict(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def by_gpus(results: Results) -> dict[int, dict[str, Any]]:
    return {trial["gpus"]: trial for trial in strict(to_json(analyse(results)))["trials"]}


def test_segmentation_tells_its_scores_by_trial_and_by_epoch() -> None:
    """The mean over runs, and null where images are classified."""
    results = rich_study()
    classified = by_gpus(results)[2]
    assert (classified["mean_iou"], classified["pixel_accuracy"]) == (None, None)
    runs = tuple(_segmenting(run) for run in results.runs)
    trials = {run.header.trial_id: run.header.trial for run in runs}
    segmented = results.model_copy(update={"runs": runs, "study": results.study.model_copy(update={"trials": trials})})
    found = by_gpus(segmented)
    assert found[2]["pixel_accuracy"] == found[2]["held_out_accuracy"] == pytest.approx(0.65)
    assert found[2]["mean_iou"] == pytest.approx(0.3)
    assert [epoch["mean_iou"] for epoch in found[2]["epochs"]] == pytest.approx([0.1, 0.2, 0.3])
    assert [epoch["pixel_accuracy"] for epoch in found[2]["epochs"]] == pytest.approx([0.35, 0.5, 0.65])
    table, without = (mode_tables(analyse(of))["strong-micro"] for of in (segmented, results))
    assert [column.name for column in table.columns][-2:] == ["held-out accuracy", "mean IoU"]
    assert [cell.text for cell in table.groups[0].rows[-1][-2:]] == ["65.0%", "30.0%"]
    assert "mean IoU" not in [column.name for column in without.columns]


def _segmenting(run: Run) -> Run:
    trial = run.header.trial
    trial = trial.model_copy(update={"model": trial.model.model_copy(update={"task": "segmentation"})})
    ranks = tuple(
        rank.model_copy(
            update={
                "epochs": tuple(line.model_copy(update={"mean_iou": 0.1 * (line.epoch + 1)}) for line in rank.epochs)
            }
        )
        for rank in run.ranks
    )
    return run.model_copy(update={"ranks": ranks, "header": run.header.model_copy(update={"trial": trial})})


def test_the_whole_contract_is_there() -> None:
    content = strict(to_json(analyse(rich_study())))
    assert list(content) == [
        "vitscale", "version", "program", "unread", "study", "trials", "curves", "waterfalls", "resolutions",
        "comparisons", "verdicts", "problems", "predictions", "prediction_scores",
    ]  # fmt: skip
    assert content["version"] == 8
    for trial in content["trials"]:
        assert set(CONTRACT) <= set(trial)
        assert list(trial) == list(content["trials"][0])


def test_the_page_names_every_field_of_a_trial_and_of_a_run_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs/report.md").read_text(encoding="utf-8")
    table = page[page.index("A trial has these fields") : page.index("Objects explain them:")]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", table, re.MULTILINE)
    named = {name for field, _ in rows for name in re.findall(r"`([\w.]+)`", field)}
    analysis = analyse(rich_study())
    fields = {*trial_rows(analysis)[0]} - {"breakdown", "resources", "convergence", "traffic"}
    fields = {re.sub(r"_(low|high)$", "", re.sub(r"^swept\..*", "swept.FIELD", field)) for field in fields}
    assert named == fields
    assert {*run_rows(analysis)[0]} - {"swept.train.engine", "repeat", "attempt", "log"} <= named


def test_the_values_of_a_trial_known_by_hand() -> None:
    # 1,024 images, micro-batch 8: 128 steps on one rank, 64 on two. Epochs of 12.8 and 8.0 s.
    found = by_gpus(one_curve({1: [0.1], 2: [0.125]}))
    expected = {
        "outcome": "completed", "reason": None, "model": "vit-ti16", "dataset": "synthetic", "engine": "ddp",
        "launcher": "torchrun", "mode": "strong-micro", "modes": ["strong-micro"], "nodes": 1, "gpus": 2,
        "micro_batch": 8, "grad_accum": 1, "global_batch": 16, "precision": "fp32", "repeats": 1,
        "step_seconds": 0.125, "step_seconds_low": None, "step_seconds_high": None, "images_per_second": 128.0,
        "epoch_seconds": 8.0, "epoch_seconds_source": "steps", "epoch_images": 1024, "effective_steps": 64.0,
        "last_step_source": None, "elapsed_epoch_seconds": 8.0, "elapsed_epochs": 2, "timed_steps": 189,
        "tail_steps": 189, "slow_steps": 0, "slow_steps_share": 0.0, "slow_steps_kept": 0,
        "speedup": pytest.approx(1.6), "speedup_low": None,
        "speedup_high": None, "efficiency": pytest.approx(0.8), "efficiency_low": None, "efficiency_high": None,
        "startup_seconds": STARTUP_SECONDS, "accuracy": pytest.approx(0.7), "held_out_accuracy": pytest.approx(0.65),
        "peak_bytes": 501_000_000, "baseline": found[1]["trial"],
    }  # fmt: skip
    assert {key: found[2][key] for key in expected} == expected
    assert found[2]["held_out_loss"] == pytest.approx(found[2]["loss"] + 0.1)
    assert found[1]["speedup"] == found[1]["efficiency"] == 1.0


def test_unequal_shares_are_told() -> None:
    trials = [make_trial("ddp", 1), make_trial("ddp", 3, micro_batches=(11, 10, 3), grad_accum=2)]
    runs = [make_run(t, [make_rank(t, rank, [0.1] * 9, warmup=3) for rank in range(t.world.size)]) for t in trials]
    results = make_results([(make_curve(trials), trials)], runs, repeats=1)
    found = by_gpus(results)
    keys = ("micro_batch", "largest_micro_batch", "micro_batches", "global_batch", "curve")
    assert [found[1][key] for key in keys] == [8, 8, None, 8, "ddp, unequal shares"]
    assert [found[3][key] for key in keys] == [8, 11, [11, 10, 3], 48, "ddp, unequal shares"]
    (one, three) = csv.DictReader(io.StringIO(csv_of(analyse(results))))
    assert (one["largest_micro_batch"], three["largest_micro_batch"]) == ("8", "11")
    analysis = analyse(results)
    assert [batch_text(trial) for trial in analysis.trials.values()] == ["8 = 1 x 8", "48 = (11 + 10 + 3) x 2"]
    assert trial_label(analysis, analysis.trials[trials[1].identity()]) == (
        "ddp, unequal shares, 3 ranks, micro-batches (11 + 10 + 3) x 2"
    )


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
        unknown += [*EXPLAINED, "breakdown", "resources", "convergence"]
        assert {key: trial[key] for key in unknown} == dict.fromkeys(unknown)


def test_the_images_of_a_model_that_nobody_names_have_no_size() -> None:
    trial = make_trial()
    unnamed = trial.model_copy(update={"model": trial.model.model_copy(update={"name": None})})
    sizes = [by_gpus(make_results([(make_curve([one]), [one])], [steady_run(one, 0.1)]))[1] for one in (trial, unnamed)]
    assert [told["image_size"] for told in sizes] == [32, None]


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
    rows = list(csv.DictReader(io.StringIO(csv_of(analysis))))
    trials = strict(to_json(analysis))["trials"]
    assert [row["trial"] for row in rows] == [trial["trial"] for trial in trials]
    for row, trial in zip(rows, trials, strict=True):
        assert row["step_seconds"] == ("" if trial["step_seconds"] is None else str(trial["step_seconds"]))


def explained(**train: Any) -> dict[int, dict[str, Any]]:
    """One and two ranks at micro-batch 16: explained steps of 55 and 77 ms."""
    return by_gpus(batch_study([16], [1, 2], **train))


def test_the_breakdown_of_a_trial_known_by_hand() -> None:
    found = explained()[2]
    waiting, late = found["breakdown"]["ranks"]
    assert waiting["parts"] == {
        "data_wait": pytest.approx(0.002), "h2d": None, "forward": pytest.approx(0.016),
        "backward": pytest.approx(0.032), "wait": pytest.approx(0.012), "wire": pytest.approx(0.010),
        "norm": 0.0, "bubble": 0.0, "optimizer": pytest.approx(0.004), "launch_gaps": None,
        "other": pytest.approx(0.001),
    }  # fmt: skip
    assert (waiting["rank"], waiting["seconds"], waiting["exposed_seconds"]) == (
        0, pytest.approx(0.077), pytest.approx(0.022),
    )  # fmt: skip
    assert late["parts"]["wait"] == pytest.approx(0)
    told = {key: value for key, value in found["breakdown"].items() if key != "ranks"}
    assert told == {
        "steps": 8,
        "steps_left_out": 0,
        "typical_rank": 0,
        "wait_known": True,
        "reasons": {"h2d": "the device is the host", "launch_gaps": "a host launches no kernels"},
        "overhead": pytest.approx(SLOWDOWN),
        "attached_overhead": None,
        "straggler": {
            "rank": 1,
            "share_of_steps": 1.0,
            "share_of_steps_low": None,
            "share_of_steps_high": None,
            "slower_by": pytest.approx(67 / 55 - 1),
        },
    }
    assert (found["exposed_share"], found["data_wait_share"]) == (pytest.approx(22 / 77), pytest.approx(2 / 77))


def test_resources_and_convergence_of_a_trial_known_by_hand() -> None:
    found = explained(device="cuda")[2]
    gibibyte = 2**30
    assert [found[f"cuda_{name}_bytes"] for name in ("allocated", "reserved", "device")] == [
        2 * gibibyte, 4 * gibibyte, 10 * gibibyte,
    ]  # fmt: skip
    assert found["joules_per_image"] == pytest.approx(0.5)
    assert found["resources"]["energy_source"] == "NVML"
    assert (found["resources"]["energy_reason"], found["resources"]["gpu_reason"]) == (None, None)
    assert found["resources"]["by_rank"][1]["peak_bytes"] == 2 * gibibyte
    assert found["resources"]["throttle_reasons"] == ["SW power cap"]
    assert found["noise_scale_images"] == found["convergence"]["noise_scale_images"] == pytest.approx(NOISE_SCALE)
    assert [point["images"] for point in found["convergence"]["points"]] == [1024, 2048, 3072]
    assert (found["convergence"]["target_accuracy"], found["convergence"]["target_runs"]) == (None, [])


def test_what_is_unavailable_has_its_reason() -> None:
    found = explained()
    assert found[2]["resources"]["energy_reason"] == NO_ENERGY
    assert found[2]["mfu"] is None
    assert found[2]["resources"]["mfu_reason"]
    assert found[1]["noise_scale_images"] is None
    assert found[1]["convergence"]["noise_reason"].startswith("one rank and one micro-step")


def test_waterfalls_carry_their_factors_and_their_sentence() -> None:
    content = strict(to_json(analyse(batch_study([16], [1, 2]))))
    (one,) = content["waterfalls"]
    trials = {trial["gpus"]: trial for trial in content["trials"]}
    assert (one["trial"], one["baseline"], one["gpus"]) == (trials[2]["trial"], trials[1]["trial"], 2)
    assert one["efficiency"] == pytest.approx(trials[2]["efficiency"])
    product = math.prod(factor["factor"] for factor in one["factors"])
    assert product == pytest.approx(one["efficiency"])
    assert one["reason"] is None
    assert one["sentence"].startswith("2 ranks measured at ")


def test_csv_has_the_most_useful_of_it_and_no_objects() -> None:
    analysis = analyse(batch_study([16], [1, 2], device="cuda"))
    rows = list(csv.DictReader(io.StringIO(csv_of(analysis))))
    assert set(EXPLAINED) <= set(rows[0])
    assert not {"breakdown", "resources", "convergence"} & set(rows[0])
    assert float(rows[1]["exposed_share"]) == pytest.approx(22 / 77)
    assert (rows[0]["noise_scale_images"], rows[0]["mfu"]) == ("", "")


def test_every_column_has_the_type_that_is_declared_for_it() -> None:
    analysis = analyse(rich_study())
    assert [*run_columns(analysis)] == [*run_rows(analysis)[0]]
    own = {str: "text", int: "whole", bool: "flag", float: "real", list: "list"}
    for row in (*trial_rows(analysis), *run_rows(analysis)):
        for column, value in row.items():
            if column not in _NESTED and not column.startswith("swept.") and column != "modes" and value is not None:
                declared = _TYPE_BY_COLUMN.get(column, "real")
                assert own[type(value)] == declared or (declared == "real" and type(value) is int), column
    trial = make_trial()
    nothing = analyse(make_results([(make_curve([trial]), [trial])], [failed_run(trial, "failed", "no room")]))
    head = to_table(run_rows(nothing), "csv", run_columns(nothing)).decode()
    assert head == ",".join(run_columns(nothing)) + "\n"


def test_csv_text_is_no_formula() -> None:
    trial = make_trial()
    run = failed_run(trial, "failed", '=HYPERLINK("http://example.com"), "a"\nb')
    (row,) = csv.DictReader(io.StringIO(csv_of(analyse(make_results([(make_curve([trial]), [trial])], [run])))))
    assert row["reason"] == '\'=HYPERLINK("http://example.com"), "a"\nb'


def test_an_empty_study_is_still_valid() -> None:
    found = analyse(make_results([], []))
    assert strict(to_json(found))["trials"] == []
    assert csv_of(found) == "\n"


def test_images_per_second_times_the_seconds_of_an_epoch_are_its_images() -> None:
    """Over runs too: 2 of them, 3 or 6, whose times scatter."""
    trials = [trial for trial in strict(to_json(analyse(rich_study())))["trials"] if trial["images_per_second"]]
    assert len(trials) > 5
    for trial in trials:
        images = trial["images_per_second"] * trial["epoch_seconds"]
        assert images == pytest.approx(1024 * trial["fraction"], rel=1e-6)


def test_a_row_per_trial_and_per_run_has_every_swept_field_and_policy() -> None:
    trials = [make_trial(gpus=gpus, learning_rate=0.5) for gpus in (1, 2)]
    curves = [(make_curve(trials, mode, train__learning_rate=0.5), trials) for mode in ("strong-micro", "weak")]
    runs = [steady_run(trial, 0.1 + 0.01 * repeat, repeat) for trial in trials for repeat in range(2)]
    analysis = analyse(make_results(curves, runs))
    rows = run_rows(analysis)
    assert [(row["gpus"], row["repeat"]) for row in rows] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert [row["step_seconds"] for row in rows] == pytest.approx([0.1, 0.11, 0.1, 0.11])
    assert {row["swept.train.learning_rate"] for row in rows} == {0.5}
    assert rows[0]["log"] == f"runs/{trials[0].identity()}-r0-a0/log.txt"
    own = json.loads(to_json(analysis))["trials"][0]["runs"]
    assert [run["step_seconds"] for run in own] == pytest.approx([0.1, 0.11])
    for table in (trial_rows(analysis), rows):
        read = list(csv.DictReader(io.StringIO(to_table(table, "csv").decode())))
        assert {row["modes"] for row in read} == {"strong-micro weak"}
        assert {row["swept.train.learning_rate"] for row in read} == {"0.5"}
        parquet = polars.read_parquet(io.BytesIO(to_table(table, "parquet")))
        assert parquet["modes"].to_list() == [["strong-micro", "weak"]] * len(read)
        assert parquet["gpus"].to_list() == [int(row["gpus"]) for row in read]


def test_a_field_swept_over_numbers_and_words_is_one_column() -> None:
    trials = [make_trial(learning_rate=0.1 + place) for place in range(2)]
    curves = [(make_curve([one], train__bucket=value), [one]) for one, value in zip(trials, (16, "all"), strict=True)]
    analysis = analyse(make_results(curves, [steady_run(trial, 0.1) for trial in trials]))
    table = polars.read_parquet(io.BytesIO(to_table(trial_rows(analysis), "parquet")))
    assert table["swept.train.bucket"].to_list() == ["16", "all"]
