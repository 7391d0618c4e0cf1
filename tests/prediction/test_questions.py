from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from prediction_factory import asked_questions, make_network, series_of, stated_facts, study
from vitscale.errors import RequestError
from vitscale.prediction.answering import Changes
from vitscale.prediction.evidence import Evidence, MeasuredPoint
from vitscale.prediction.variants import differing
from vitscale.trial.model_spec import ModelSpec, resolve


def evidence(*names: str) -> Evidence:
    one = series_of(study())
    return Evidence(tuple(dataclasses.replace(one, name=name) for name in names), make_network())


def test_a_question_for_each_series_or_for_the_one_named() -> None:
    both = evidence("ddp", "fsdp2")
    assert [asked.series for asked in asked_questions(both, (8, 16), Changes())] == ["ddp", "fsdp2"]
    (asked,) = asked_questions(
        both, (8,), Changes(), series="fsdp2", nodes_of=4, price_per_gpu_hour=2.5, memory_capacity_bytes=10**9
    )
    assert (asked.series, asked.gpus, asked.nodes_of) == ("fsdp2", (8,), 4)
    assert (asked.price_per_gpu_hour, asked.memory_capacity_bytes, asked.changes) == (2.5, 10**9, {})


def test_of_several_series_the_one_measured_with_the_changes_is_asked() -> None:
    ddp, other = evidence("ddp", "other").series
    points = tuple(
        dataclasses.replace(
            point,
            trial=point.trial.model_copy(
                update={"train": point.trial.train.model_copy(update={"micro_batch": 32, "engine": "fsdp2"})}
            ),
        )
        for point in other.points
    )
    both = Evidence((ddp, dataclasses.replace(other, points=points)), make_network())
    assert [one.series for one in asked_questions(both, (8,), Changes(micro_batch=32))] == ["other"]
    assert [one.series for one in asked_questions(both, (8,), Changes(micro_batch=64))] == ["ddp", "other"]
    assert [one.series for one in asked_questions(both, (8,), Changes(micro_batch=32), series="ddp")] == ["ddp"]


def test_a_series_without_an_engine_stays_on_one_rank() -> None:
    ddp, plain = evidence("ddp", "plain").series
    points = tuple(
        dataclasses.replace(
            point,
            trial=point.trial.model_copy(update={"train": point.trial.train.model_copy(update={"engine": "none"})}),
        )
        for point in plain.points[:1]
    )
    both = Evidence((ddp, dataclasses.replace(plain, points=points)), make_network())
    assert [one.series for one in asked_questions(both, (8,), Changes())] == ["ddp"]
    assert [one.series for one in asked_questions(both, (1,), Changes())] == ["ddp", "plain"]
    assert [one.series for one in asked_questions(both, (8,), Changes(engine="ddp"), series="plain")] == ["plain"]
    with pytest.raises(RequestError, match=r"'plain': measured without an engine.*Add --engine ddp"):
        asked_questions(both, (8,), Changes(), series="plain")


def test_what_is_given_is_changed_and_nothing_else() -> None:
    (asked,) = asked_questions(evidence("ddp"), (8,), Changes(engine="deepspeed", zero_stage=2, micro_batch=32))
    assert asked.changes == {"engine": "deepspeed", "zero_stage": 2, "micro_batch": 32}


def test_another_model_and_image_size_keep_what_is_not_named() -> None:
    measured = series_of(study()).points[-1].trial.model  # vit-ti16 at 32 pixels, 10 classes
    (bigger,) = asked_questions(evidence("ddp"), (8,), Changes(model="vit-b16"))
    assert bigger.changes == {"model": resolve(ModelSpec(name="vit-b16", image_size=32), 10)}
    (finer,) = asked_questions(evidence("ddp"), (8,), Changes(image_size=64))
    assert finer.changes == {"model": resolve(measured.model_copy(update={"image_size": 64}), 10)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"engine": "horovod"}, "unknown engine 'horovod'"),
        ({"model": "vit-b61"}, "Did you mean 'vit-b16'?"),
        ({"model": "no\0thing"}, "unknown model"),
        ({"precision": "fp8"}, "unknown precision 'fp8'"),
        ({"zero_stage": 4}, "--zero-stage is 4. Valid: 0 to 3"),
        ({"micro_batch": 0}, "--micro-batch is 0"),
        ({"grad_accum": -1}, "--grad-accum is -1"),
        ({"image_size": 33}, "not divisible by patch_size"),
        ({"image_size": 0}, "--image-size is 0"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as refused:
        asked_questions(evidence("ddp"), (8,), Changes(**changes))
    assert said in str(refused.value)


def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"config\.json"):
        asked_questions(evidence("ddp"), (8,), Changes(model=str(tmp_path)))


def test_a_series_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"unknown series 'dpp'\. Did you mean 'ddp'\? Valid: 'ddp', 'fsdp2'"):
        asked_questions(evidence("ddp", "fsdp2"), (8,), Changes(), series="dpp")


def test_nothing_to_predict_from_is_refused() -> None:
    with pytest.raises(RequestError, match="no completed run to predict from"):
        asked_questions(evidence(), (8,), Changes())


@pytest.mark.parametrize("nodes_of", [0, -8])
def test_hosts_have_ranks(nodes_of: int) -> None:
    with pytest.raises(RequestError, match=f"--nodes-of is {nodes_of}"):
        asked_questions(evidence("ddp"), (8,), Changes(), nodes_of=nodes_of)


def untold(*names: str) -> Evidence:
    def point(one: MeasuredPoint) -> MeasuredPoint:
        train = one.trial.train.model_copy(update={"engine": "unknown"})
        trial = one.trial.model_copy(update={"train": train, "model": ModelSpec(), "origin": "V100"})
        return dataclasses.replace(one, trial=trial)

    both = evidence(*names)
    series = tuple(dataclasses.replace(one, points=tuple(map(point, one.points))) for one in both.series)
    return dataclasses.replace(both, series=series)


def test_what_an_import_left_out_is_told_and_not_changed() -> None:
    known, rest = stated_facts(
        untold("a"), Changes(engine="deepspeed", zero_stage=1, parameters="110M", micro_batch=32)
    )
    trials = [point.trial for one in known.series for point in one.points]
    assert {(one.train.engine, one.train.zero_stage, one.model.parameter_count) for one in trials} == {
        ("deepspeed", 1, 110_000_000)
    }
    (asked,) = asked_questions(known, (8,), rest)
    assert differing(known.series[0].points, asked.changes) == {"micro_batch": 32}
    (named,) = stated_facts(untold("a"), Changes(model="vit-l16"))[0].series
    assert {point.trial.model.name for point in named.points} == {"vit-l16"}


def test_what_is_known_is_not_told_again() -> None:
    both = evidence("ddp")
    assert stated_facts(both, Changes(engine="fsdp2", model="vit-l16"))[0] == both
    with pytest.raises(RequestError, match=r"--parameters '110M': the model is known \(vit-"):
        stated_facts(both, Changes(parameters="110M"))
    with pytest.raises(RequestError, match="'many' is no number of parameters"):
        stated_facts(both, Changes(parameters="many"))
