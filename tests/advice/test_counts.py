"""Which rank counts advice looks at, how their ranks lie on hosts, and which batches a script can train there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from advice_factory import ASKED, NO_NOISE, forecaster
from evidence_factory import make_evidence, make_point
from vitscale.advice.candidates import candidates, candidates_on_instances, rank_counts, rank_counts_on_instances
from vitscale.advice.comparable_series import comparable_series
from vitscale.advice.pipeline import advise
from vitscale.errors import RequestError
from vitscale.prediction.configurations import Candidate
from vitscale.prediction.evidence import MeasuredPoint, Series
from vitscale.prediction.gpu_types import gpu_type
from vitscale.prediction.instances import Instance
from vitscale.prediction.layouts import ranks_per_node

ONE_HOST = [make_point(1, 1.0), make_point(2, 1.0)]
HOSTS_OF_TWO = [make_point(n, 1.0, per_node=2) for n in (1, 2, 6)]


def looked_at(
    points: Sequence[MeasuredPoint],
    gpus: tuple[int, ...] | None = None,
    max_gpus: int | None = None,
    nodes_of: int | None = None,
) -> tuple[tuple[int, int], ...]:
    series = Series("ddp", "strong-micro", {}, tuple(points))
    return rank_counts([series], gpus=gpus, max_gpus=max_gpus, ranks_per_node=nodes_of)


def test_powers_of_two_whole_hosts_and_what_was_measured_up_to_eight_times_as_many() -> None:
    found = looked_at(HOSTS_OF_TWO)

    assert [count for count, _ in found] == [1, *range(2, 33, 2), 40, 48]
    assert {each for count, each in found if count > 1} == {2}


def test_no_more_than_asked() -> None:
    assert looked_at(HOSTS_OF_TWO, max_gpus=6) == ((1, 1), (2, 2), (4, 2), (6, 2))


def test_hosts_are_as_large_as_predict_takes_them() -> None:
    series = Series("ddp", "strong-micro", {}, tuple(ONE_HOST))

    for count, each in looked_at(ONE_HOST, max_gpus=64):
        assert each == ranks_per_node(series, count, None)[0]
    assert looked_at(ONE_HOST, gpus=(8, 12, 16)) == ((8, 8), (12, 6), (16, 8))


def test_hosts_of_a_size_that_was_said() -> None:
    assert looked_at(ONE_HOST, gpus=(2, 4, 12), nodes_of=4) == ((2, 2), (4, 4), (12, 4))
    with pytest.raises(RequestError, match="12 ranks do not fill hosts of 8"):
        looked_at(ONE_HOST, gpus=(12,), nodes_of=8)


EIGHT, SINGLE = Instance("eight", gpu_type("A100"), 8, 32.0), Instance("single", gpu_type("A100"), 1, 4.0)


def test_instances_come_to_the_counts_that_were_asked_for_and_to_no_more() -> None:
    series = [Series("ddp", "strong-micro", {}, tuple(ONE_HOST))]
    assert rank_counts_on_instances(EIGHT, series, None, None) == (8, 16)
    assert rank_counts_on_instances(EIGHT, series, (4, 8, 12, 24), None) == (8, 24)
    assert rank_counts_on_instances(SINGLE, series, (3, 8), 4) == (3,)
    assert rank_counts_on_instances(EIGHT, series, None, 4) == ()


def test_an_instance_that_is_too_large_is_named_and_where_none_is_left_that_is_said() -> None:
    own = comparable_series(make_evidence(ONE_HOST), None)
    looked = candidates_on_instances(own, [EIGHT, SINGLE], (3,), None)
    assert {candidate.instance for candidate in looked.combinations} == {SINGLE}
    assert {candidate.gpus for candidate in looked.combinations} == {3}
    assert looked.refused == {"eight": "no whole number of them has a rank count that was asked for"}
    with pytest.raises(RequestError, match="no whole number of them"):
        candidates_on_instances(own, [EIGHT], None, 4)


def test_an_instance_that_is_named_like_its_gpu_and_too_large_leaves_others_with_that_gpu() -> None:
    own = comparable_series(make_evidence(ONE_HOST), None)
    named_like_its_gpu = replace(EIGHT, name=SINGLE.gpu.name)
    looked = candidates_on_instances(own, [named_like_its_gpu, SINGLE], (3,), None)
    assert {candidate.instance for candidate in looked.combinations} == {SINGLE}
    assert set(looked.refused) == {SINGLE.gpu.name}


def test_the_knee_of_unlike_instances_is_told_by_what_their_hours_cost() -> None:
    """H100 take 0.9 of the time at ten times the price: by ranks x time^2 they would be the knee."""
    dear = Instance("dear", gpu_type("H100"), 1, 40.0)

    def step(candidate: Candidate) -> float:
        return 0.9 if candidate.instance == dear else 1.0

    asked = replace(ASKED, gpus=(1, 2), ranks_per_node=None, instances=(SINGLE, dear))
    advice = advise(make_evidence(ONE_HOST), asked, NO_NOISE, forecaster(step))
    (knee,) = (answer.option for answer in advice.answers if answer.kind == "knee")
    assert (knee.candidate.instance, knee.gpus) == (SINGLE, 2)


def test_no_count_left() -> None:
    with pytest.raises(RequestError, match="no rank count is left"):
        looked_at(ONE_HOST, gpus=(8,), max_gpus=4)


# --- the batches of a script of the user's own -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "micro_batches", "accums", "recomputed"),
    [
        ((), {16, 32}, {1, 2}, {False}),
        (("{micro_batch}",), {1, 2, 4, 8, 16, 32, 64, 128, 256}, {1, 2}, {False}),
        (("{micro_batch}", "{grad_accum}"), {1, 2, 4, 8, 16, 32, 64, 128, 256}, {1, 2, 4, 8, 16, 32}, {False}),
        (("{activation_checkpointing}",), {16, 32}, {1, 2}, {False, True}),
    ],
)
def test_a_script_trains_what_it_trained_or_is_told_to(
    told: tuple[str, ...], micro_batches: set[int], accums: set[int], recomputed: set[bool]
) -> None:
    """Measured: 16 and 32 images a rank, in one and in two micro-steps."""
    points = [
        make_point(
            ranks, 1.0, engine="script", script="train.py", arguments=told, micro_batch=size, grad_accum=32 // size
        )
        for ranks, size in ((1, 32), (2, 32), (1, 16), (2, 16))
    ]
    evidence = make_evidence(points, name="script")
    every = candidates(comparable_series(evidence, None), ((1, 1), (2, 2)))

    assert every.refused == {}, "nobody asked for another engine"
    assert {candidate.engine for candidate in every.combinations} == {"script"}
    assert {candidate.micro_batch for candidate in every.combinations} == micro_batches
    assert {candidate.grad_accum for candidate in every.combinations} == accums
    assert {candidate.activation_checkpointing for candidate in every.combinations} == recomputed

    advice = advise(evidence, replace(ASKED, gpus=(1, 2)), NO_NOISE, forecaster())
    assert advice.looked_at == len(every.combinations)
    chosen = advice.chosen
    assert chosen is not None
    assert (chosen.candidate.gpus, chosen.candidate.activation_checkpointing) == (2, False)


def test_the_only_configuration_that_a_script_can_train_is_advised() -> None:
    point = make_point(2, 1.0, engine="script", script="train.py")
    advice = advise(make_evidence([point], name="script"), replace(ASKED, gpus=(2,)), NO_NOISE, forecaster())
    assert advice.looked_at == 1
    assert advice.chosen is not None
