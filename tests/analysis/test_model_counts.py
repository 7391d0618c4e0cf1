"""What a run counted of its model comes before what is known of it without one."""

from __future__ import annotations

from typing import Any

import pytest

from results_factory import make_rank, make_run, make_trial, one_curve
from vitscale.analysis import analyse
from vitscale.analysis.model_counts import parameters_of, recorded_parameters
from vitscale.analysis.runs.compute import ImageFlops, compute
from vitscale.analysis.runs.figures import run_figures
from vitscale.store.results import Results
from vitscale.trial.model_spec import ModelSpec, resolve
from vitscale.trial.trial import Trial

NAMED = resolve(ModelSpec(name="vit-ti16", image_size=32), 10)


def results_of(trial: dict[str, Any], train: dict[str, Any], line: dict[str, Any]) -> Results:
    """One run, whose ranks record a model with these fields."""
    results = one_curve({1: [0.1]})
    (run,) = results.runs
    changed = run.header.trial.model_copy(update=trial)
    changed = changed.model_copy(update={"train": changed.train.model_copy(update=train)})
    ranks = []
    for rank in run.ranks:
        model = None if rank.model is None else rank.model.model_copy(update=line)
        ranks.append(rank.model_copy(update={"model": model}))
    header = run.header.model_copy(update={"trial": changed})
    study = results.study.model_copy(update={"trials": {run.header.trial_id: changed}})
    return results.model_copy(
        update={"study": study, "runs": (run.model_copy(update={"header": header, "ranks": tuple(ranks)}),)}
    )


@pytest.mark.parametrize(
    ("trial", "train", "line", "count"),
    [
        ({"model": NAMED}, {}, {"parameters": 777}, (777, "measured")),
        ({"model": NAMED}, {}, {"parameters": None}, (5_489_482, "by formula")),
        ({"model": ModelSpec(parameter_count=9), "origin": "V100"}, {}, {"parameters": 9}, (9, "told")),
        ({"model": NAMED, "origin": "V100"}, {}, {"parameters": 777}, (5_489_482, "by formula")),
        (
            {"model": ModelSpec()},
            {"script": "t.py"},
            {"parameters": 7, "parameters_source": "measured"},
            (7, "measured"),
        ),
        ({"model": ModelSpec()}, {"script": "t.py"}, {"parameters": 7, "parameters_source": "told"}, (7, "told")),
        ({"model": ModelSpec()}, {"script": "t.py"}, {"parameters": 7}, (7, "unknown")),  # a record of before
        ({"model": ModelSpec(name="vit-ti16")}, {}, {"parameters": None}, None),
    ],
)
def test_a_count_and_its_source(
    trial: dict[str, Any], train: dict[str, Any], line: dict[str, Any], count: tuple[int, str] | None
) -> None:
    (result,) = analyse(results_of(trial, train, line)).trials.values()
    assert parameters_of(result) == count
    is_recorded = count is not None and count[0] == line["parameters"] and "origin" not in trial
    assert recorded_parameters(result) == (count if is_recorded else None)


def flops_of(trial: Trial, **line: Any) -> ImageFlops | None:
    rank = make_rank(trial, 0, [0.25] * 8, warmup=2, images=8)
    assert rank.model is not None
    run = make_run(trial, [rank.model_copy(update={"model": rank.model.model_copy(update=line)})])
    return compute(run, run_figures(run)).image_flops


def test_flops_say_how_they_are_known() -> None:
    named = make_trial(gpus=1).model_copy(update={"model": NAMED})
    by_formula = flops_of(named)
    assert by_formula is not None
    assert by_formula.source == "by formula"
    script = make_trial("script", 1, script="train.py")
    assert flops_of(script, flops_per_image=720, flops_source="traced") == (720, "traced")
    assert flops_of(script, flops_per_image=720, flops_source="told") == (720, "told")
    assert flops_of(script, flops_per_image=720) == (720, "unknown")  # records of before do not say
    assert flops_of(script) is None
