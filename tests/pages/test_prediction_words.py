from __future__ import annotations

import dataclasses

import pytest

from prediction_factory import NETWORK, make_forecast, make_network, make_prediction, make_score, series_of, study
from vitscale.pages import prediction_words
from vitscale.prediction.evidence import Evidence
from vitscale.prediction.results import Assumption


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {},
            "ddp: predicting 8 ranks from 1, 2 and 4 was off by 2.1 % in the mean, by 3.4 % at worst; 3 of 4 runs lay "
            "inside the 90 % interval of a run. Constant seconds per step: 2.7 %.",
        ),
        (
            {"runs": 1, "held": 1, "fitted_gpus": (1,), "held_out_gpus": (2,)},
            "ddp: predicting 2 ranks from 1 was off by 2.1 %; the run lay inside the 90 % interval of a run. Constant "
            "seconds per step: 2.7 %.",
        ),
        (
            {"runs": 1, "held": 0, "fitted_gpus": (1, 2), "held_out_gpus": (4, 1024)},
            "ddp: predicting 4 and 1,024 ranks from 1 and 2 was off by 2.1 %; no run lay inside the 90 % interval of a "
            "run. Constant seconds per step: 2.7 %.",
        ),
    ],
)
def test_a_score_is_a_sentence(changes: dict[str, object], said: str) -> None:
    assert prediction_words.score_sentence(make_score(**changes)) == said


def test_three_scores_and_more_are_summed_up_by_their_runs() -> None:
    three = [make_score(), make_score(runs=2, held=1), make_score(runs=2, held=2, mean_absolute_percentage_error=0.061)]
    said = prediction_words.score_sentences(make_forecast(study(), scores=three))
    # (4 x 2.1 % + 2 x 2.1 % + 2 x 6.1 %) / 8
    assert said[0] == (
        "Of 8 runs on more ranks than were fitted, in 3 series, 6 lay inside the 90 % interval of a run; predictions "
        "were off by 3.1 % in the mean."
    )
    assert len(said) == 4
    assert len(prediction_words.score_sentences(make_forecast(study(), scores=three[:2]))) == 2


def test_a_named_engine_stands_in_a_name_unless_another_series_has_it() -> None:
    ddp = series_of(study())
    untold = dataclasses.replace(ddp, name="unknown engine")  # its trials' engine is ddp, as an option named it
    alone, both = Evidence((untold,), make_network()), Evidence((untold, ddp), make_network())
    assert prediction_words.names_with_engine(alone) == {"unknown engine": "ddp"}
    assert prediction_words.names_with_engine(both) == {"unknown engine": "unknown engine", "ddp": "ddp"}


def test_neighbouring_rank_counts_are_a_range() -> None:
    assert "predicting 5 to 8 ranks from 1 to 3 was" in prediction_words.score_sentence(
        make_score(fitted_gpus=(1, 2, 3), held_out_gpus=(5, 6, 7, 8))
    )
    assert "predicting 4, 6 and 7 ranks from 1 and 2 was" in prediction_words.score_sentence(
        make_score(fitted_gpus=(1, 2), held_out_gpus=(4, 6, 7))
    )


def test_constant_seconds_are_no_baseline_of_a_fixed_global_batch() -> None:
    assert prediction_words.score_sentence(make_score(), "strong-global").endswith("inside the 90 % interval of a run.")


def test_what_a_series_was_measured_on() -> None:
    series = series_of(study())
    assert prediction_words.measured_counts(series) == "measured on 1, 2 and 4 ranks, 1 host"
    points = tuple(dataclasses.replace(point, nodes=point.gpus) for point in series.points)
    assert prediction_words.measured_counts(dataclasses.replace(series, points=points)) == (
        "measured on 1, 2 and 4 ranks, 1 to 4 hosts"
    )
    assert (
        prediction_words.measured_counts(dataclasses.replace(series, points=points[:1])) == "measured on 1 rank, 1 host"
    )


def test_a_name_that_holds_the_batch_policy_does_not_get_it_twice() -> None:
    assert prediction_words.series_title("ddp", "weak") == "ddp, weak"
    assert prediction_words.series_title("ddp, weak", "weak") == "ddp, weak"


def test_what_a_prediction_differs_in_is_named() -> None:
    series = series_of(study())
    asked = make_prediction(8)
    assert prediction_words.changed_settings(asked, series) == ""
    train = asked.trial.train.model_copy(update={"engine": "deepspeed", "zero_stage": 2, "micro_batch": 32})
    model = asked.trial.model.model_copy(update={"name": "vit-b16", "image_size": 224})
    other = dataclasses.replace(asked, trial=asked.trial.model_copy(update={"train": train, "model": model}))
    assert prediction_words.changed_settings(other, series) == (
        "with vit-b16, engine deepspeed, zero_stage 2, micro_batch 32, 224 pixels"
    )
    fixed = dataclasses.replace(series, mode="strong-global")  # 32 images on 4 ranks, of which each of 8 has 4
    for micro_batch, told in ((4, ""), (2, ", micro_batch 2")):
        own = train.model_copy(update={"micro_batch": micro_batch, "grad_accum": 4 // micro_batch})
        kept = dataclasses.replace(asked, trial=asked.trial.model_copy(update={"train": own}))
        assert prediction_words.changed_settings(kept, fixed) == f"with engine deepspeed, zero_stage 2{told}"


def test_only_labels_that_occur_are_explained() -> None:
    said = prediction_words.label_sentences(
        [make_prediction(8), make_prediction(2, "interpolated"), make_prediction(16)]
    )
    assert [sentence.partition(":")[0] for sentence in said] == ["interpolated", "extrapolated"]


def test_an_assumption_is_told_once_and_the_first_says_what_to_measure() -> None:
    other = Assumption("job-to-job variation", "about 2 %", "the study with measure.repeats = 3")
    rows = [make_prediction(gpus, "prior-driven", assumptions=(NETWORK, other)) for gpus in (16, 32)]
    assert prediction_words.assumption_sentences(rows) == (
        "Assumed: network between hosts: about 3 GB/s, within a factor of 4 either way.",
        "Assumed: job-to-job variation: about 2 %.",
    )
    assert prediction_words.next_measurement(rows) == "What would narrow it most: vitscale check --hostfile HOSTS."
    assert prediction_words.next_measurement([make_prediction(8)]) == ""


def test_what_is_unavailable_is_told_once_for_each_reason_and_where() -> None:
    rows = [
        make_prediction(8, reasons={"joules_per_epoch": "no run recorded it", "speedup": "it drifts"}),
        make_prediction(16, reasons={"joules_per_epoch": "no run recorded it", "efficiency": "it drifts"}),
        make_prediction(1024, reasons={"joules_per_epoch": "no run recorded it", "efficiency": "it drifts"}),
    ]
    assert prediction_words.unavailable_sentences(rows) == (
        "Speedup at 8 ranks: unavailable: it drifts.",
        "Efficiency at 16 and 1,024 ranks: unavailable: it drifts.",
        "Energy: unavailable: no run recorded it.",
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.0, "0 %"), (0.001, "<1 %"), (0.5, "50 %"), (0.999, ">99 %"), (1.0, "100 %"), (None, "\u2013")],
)
def test_a_chance_is_never_shown_as_certain_where_it_is_not(value: float | None, said: str) -> None:
    assert prediction_words.chance_text(value) == said


@pytest.mark.parametrize(("joules", "sign"), [(0.5, "J"), (4200.0, "kJ"), (3.6e6, "MJ"), (1e12, "GJ")])
def test_the_unit_of_energy(joules: float, sign: str) -> None:
    assert prediction_words.energy_unit(joules)[1] == sign


def test_the_network_says_where_it_is_from() -> None:
    assert prediction_words.network_sentence(make_forecast(study()).evidence) == (
        "Network: inside a host check of 2026-11-20, all_reduce over 4 ranks; nothing measured between hosts."
    )
