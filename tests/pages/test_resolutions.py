"""Memory and time by image size: what was measured, beside what arithmetic says, in every form of the report."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from report_forms import markdown, page
from results_factory import failed_run, make_curve, make_results, make_trial, steady_run
from vitscale.analysis import Analysis, analyse
from vitscale.pages.charts.resources import resolution_chart, resolution_rows
from vitscale.pages.contract import to_json
from vitscale.pages.resolutions import by_resolution, resolution_table
from vitscale.prediction.memory.forecast import forecast_bytes
from vitscale.present.units import UNKNOWN
from vitscale.trial.model_cost import training_flops
from vitscale.trial.model_spec import ModelSpec, resolve
from vitscale.trial.trial import Trial

SIZES = (32, 64, 128)


def trial(size: int, *, checkpointing: bool, model: ModelSpec | None = None) -> Trial:
    own = resolve(model or ModelSpec(name="vit-ti16", image_size=size), 10)
    return make_trial(activation_checkpointing=checkpointing).model_copy(update={"model": own})


@functools.cache
def study() -> Analysis:
    """Kept: 0.1 s at 32 pixels, 0.25 s at 64, out of memory at 128. Computed again: 0.2 s at 32 and 64 not run."""
    curves, runs = [], []
    for checkpointing in (False, True):
        for size in SIZES if not checkpointing else SIZES[:2]:
            one = trial(size, checkpointing=checkpointing)
            labels: dict[str, Any] = {"model__image_size": size, "train__activation_checkpointing": checkpointing}
            curves.append((make_curve([one], **labels), [one]))
            seconds = {(32, False): 0.1, (64, False): 0.25, (32, True): 0.2}.get((size, checkpointing))
            if seconds is not None:
                runs += [steady_run(one, seconds, repeat) for repeat in range(3)]
            elif size == 128:
                runs += [failed_run(one, "oom", "rank 0 ran out of memory")]
    return analyse(make_results(curves, runs))


def flops(size: int) -> int:
    return training_flops(trial(size, checkpointing=False).model) or 0


def test_series_differ_in_size_alone_and_each_point_stands_beside_its_forecasts() -> None:
    kept, again = by_resolution(study())
    assert (kept.name, again.name) == ("ddp, no activation checkpointing", "ddp, activation checkpointing")
    assert [point.image_size for point in kept.points] == list(SIZES)
    tensors = [forecast_bytes(trial(size, checkpointing=False)) or 0 for size in SIZES]
    assert [point.tensor_bytes for point in kept.points] == tensors
    # On a CPU a rank has in the middle 3 % and 0.5 GB beside its tensors; on a GPU tensors alone are measured.
    assert [point.forecast_bytes for point in kept.points] == [round(1.03 * size + 0.5e9) for size in tensors]
    # From the next smaller size that was measured: 32 for 64, and 64 for the one that did not fit.
    assert [point.by_flops_seconds for point in kept.points] == [
        None, pytest.approx(0.1 * flops(64) / flops(32)), pytest.approx(0.25 * flops(128) / flops(64)),
    ]  # fmt: skip
    assert again.points[1].by_flops_seconds == pytest.approx(0.2 * flops(64) / flops(32))
    assert again.points[1].result.step_seconds is None


def test_the_table_tells_sizes_that_failed_and_what_they_would_take() -> None:
    table = resolution_table(study())
    assert table is not None
    rows = {(group.label, row[0].text): row for group in table.groups for row in group.rows}
    largest = rows["ddp, no activation checkpointing", "128"]
    assert [largest[place].text for place in (1, 3, 6, 7)] == [UNKNOWN, UNKNOWN, UNKNOWN, "oom"]
    assert UNKNOWN not in (largest[2].text, largest[4].text)
    assert any("resident" in note for note in table.notes), "measured on a CPU"


def test_every_form_of_the_report_has_it() -> None:
    content = json.loads(to_json(study()))["resolutions"]
    assert [[point["image_size"] for point in one["points"]] for one in content] == [[32, 64, 128], [32, 64]]
    first, second, third = content[0]["points"]
    assert first["step_seconds_by_flops"] is None
    assert second["step_seconds"] == pytest.approx(0.25)
    assert (third["outcome"], third["step_seconds"], third["peak_bytes"]) == ("oom", None, None)
    assert third["forecast_tensor_bytes"] == forecast_bytes(trial(128, checkpointing=False))
    text = markdown(study())
    assert "### Memory and time by image size" in text
    assert "| 128 |" in text
    text = page(study())
    assert 'data-figure="resolution"' in text
    assert "by FLOPs" in text


def test_the_chart_draws_what_is_known_of_each() -> None:
    rows = {(row["series"], row["size"], row["panel"], row["kind"]): row["value"] for row in resolution_rows(study())}
    kept = "ddp, no activation checkpointing"
    assert rows[kept, 64, "step", "measured"] == pytest.approx(0.25)
    assert (kept, 128, "step", "measured") not in rows
    assert rows[kept, 128, "memory", "forecast"] == pytest.approx(0.5e9, rel=0.5)
    figure = resolution_chart(study())
    assert figure is not None
    assert [view.choices["measure"].label for view in figure.views] == ["step time", "peak memory"]


def test_a_study_of_one_size_has_none_of_it() -> None:
    one = trial(32, checkpointing=False)
    alone = analyse(make_results([(make_curve([one], model__image_size=32), [one])], [steady_run(one, 0.1)]))
    assert by_resolution(alone) == ()
    assert resolution_table(alone) is None
    assert resolution_chart(alone) is None


def test_a_model_that_only_building_it_could_count_has_no_forecasts_and_says_so() -> None:
    ones = [trial(size, checkpointing=False, model=ModelSpec(factory="m:build", image_size=size)) for size in (32, 64)]
    curves = [(make_curve([one], model__image_size=one.model.image_size), [one]) for one in ones]
    found = analyse(make_results(curves, [steady_run(one, 0.1) for one in ones]))
    (series,) = by_resolution(found)
    assert [(point.forecast_bytes, point.by_flops_seconds) for point in series.points] == [(None, None)] * 2
    table = resolution_table(found)
    assert table is not None
    assert "Memory forecast: unavailable in 2 of 2 trials: no formula and no card counts this model." in table.notes


def test_on_a_gpu_tensors_alone_are_forecast_for_they_alone_are_measured() -> None:
    ones = [trial(size, checkpointing=False) for size in (32, 64)]
    ones = [one.model_copy(update={"train": one.train.model_copy(update={"device": "cuda"})}) for one in ones]
    curves = [(make_curve([one], model__image_size=one.model.image_size), [one]) for one in ones]
    (series,) = by_resolution(analyse(make_results(curves, [steady_run(one, 0.1) for one in ones])))
    assert [point.forecast_bytes for point in series.points] == [forecast_bytes(one) for one in ones]
