"""FSDP2 over replicas (HSDP): what it sends where and when, and what a rank holds, by hand and by a known truth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from evidence_factory import MEASURED, make_evidence, make_point, make_trial
from prediction.test_shared_models import model_of, nothing_uncertain, worlds
from vitscale.engines.fsdp2.states import states
from vitscale.engines.messages import Message
from vitscale.engines.variants import EngineVariant
from vitscale.errors import RequestError
from vitscale.prediction.configurations import Candidate
from vitscale.prediction.evidence import MeasuredPoint
from vitscale.prediction.fitting import fit
from vitscale.prediction.memory.forecast import forecast
from vitscale.prediction.predicting import Question, predict
from vitscale.prediction.step.messages import exposed_seconds, messages
from vitscale.prediction.variants import variant
from vitscale.prediction.workloads import evaluate_all
from vitscale.trial.model_cost import parameter_shapes, parameters
from vitscale.trial.parallel import NO_SPLIT, ParallelSpec

PSI = parameters(make_trial(8).model) or 0
"""Parameters of the model that is trained here: ViT-B/16."""


def sent(replicas: int, gpus: int = 32, **fields: Any) -> tuple[Message, ...]:
    trial = make_trial(gpus, engine="fsdp2", parallel=ParallelSpec(replicate=replicas), **fields)
    found = messages(trial)
    assert found is not None
    return found


def amount(found: tuple[Message, ...], operation: str) -> float:
    return sum(one.tensor_bytes * one.calls for one in found if one.operation == operation)


def test_what_is_sent_in_which_group() -> None:
    """Four replicas of eight: what is gathered and scattered goes within a replica, and an eighth of what is scattered
    between replicas. One replica has neither group, and sends as ever."""
    found = sent(4)
    assert {one.operation: one.group for one in found} == {
        "all_gather": "sharding", "reduce_scatter": "sharding", "all_reduce": "replication",
    }  # fmt: skip
    assert amount(found, "all_reduce") == pytest.approx(amount(found, "reduce_scatter") / 8)
    assert {one.group for one in sent(1)} == {"replicas"}
    ddp = messages(make_trial(32, engine="ddp"))
    assert amount(sent(32), "all_reduce") == amount(ddp or (), "all_reduce")  # as much as DDP, of whole gradients


def test_a_blocks_shards_travel_when_they_have_been_scattered() -> None:
    """On GPUs on a stream of their own, so that later blocks do not wait; on a CPU all that is sent stops computing."""
    for device in ("cuda", "cpu"):
        found = sent(4, device=device)
        scattered = [place for place, one in enumerate(found) if one.operation == "reduce_scatter"]
        assert len(scattered) == 12 + 1
        for place in scattered:
            scatter, among = found[place], found[place + 1]
            assert (among.operation, among.phase, among.ready) == ("all_reduce", "backward", scatter.ready)
            assert (scatter.beside_later, among.beside_later) == (False, True)
            assert (scatter.ready is None) is (device == "cpu")


def test_a_shard_is_that_of_the_ranks_that_share_a_replica() -> None:
    """Messages for 32 ranks, asked for 64 in as many replicas: shards are half as large, but for what pads them: a
    class token and positions are one row of 198 x 768."""
    few, many = sent(4, 32), sent(4, 64)
    for one, other in zip(few, many, strict=True):
        of_sixteen, any_batch = np.array([16.0]), np.array([1.0])
        assert one.tensor_bytes_at(of_sixteen, any_batch) == pytest.approx(other.tensor_bytes)
    padding = 4 * 198 * 768 / 2
    assert amount(many, "all_reduce") == pytest.approx(amount(few, "all_reduce") / 2 + padding, rel=1e-3)


def test_shards_travel_over_the_links_that_their_groups_have() -> None:
    """By hand, of 1 GB in four replicas of eight on four hosts, on gloo's rings: scattered in a host as an all-reduce,
    2 x 7/8 GB at 100 GB/s; then each rank's eighth among hosts, 2 x 3/4 x 1/8 GB, with the eight of a host sharing its
    12.5 GB/s; and 14 hops of 10 us in a host, 6 of 20 us between."""
    gigabyte = 1e9
    scatter = Message("reduce_scatter", gigabyte, 1, "after", None, "last", group="sharding")
    among = Message("all_reduce", gigabyte / 8, 1, "after", None, "last", group="replication")
    parallel = ParallelSpec(replicate=4)
    times = [
        float(model_of(parallel, messages=(one,), backend="gloo").times(nothing_uncertain(), worlds(32, 8)).wire[0, 0])
        for one in (scatter, among)
    ]
    inside = MEASURED.inside.latency_seconds
    across = MEASURED.across.latency_seconds
    of_host, of_link = MEASURED.inside.bandwidth_bytes_per_second, MEASURED.across.bandwidth_bytes_per_second
    assert times[0] == pytest.approx(2 * 7 / 8 * gigabyte / of_host + 14 * inside)
    assert times[1] == pytest.approx(2 * 3 / 4 * gigabyte / 8 / (of_link / 8) + 6 * across)


@pytest.mark.parametrize(("group_ranks", "host_ranks"), [(8, 8), (64, 8), (4, 2)])
def test_a_second_shard_is_gathered_among_neighbours(group_ranks: int, host_ranks: int) -> None:
    """By hand, of 1 GB in groups of 8 of 32 ranks on hosts of eight: 7/8 GB in a host. Groups of 64 are all 32 ranks,
    and those of 4 lie on two hosts of two."""
    gather = Message("all_gather", 1e9, 1, "after", None, "last", group="second shard")
    model = model_of(NO_SPLIT, messages=(gather,), backend="gloo", second_shard_ranks=group_ranks)
    whole = model_of(NO_SPLIT, messages=(replace(gather, group="replicas"),), backend="gloo")
    size = min(group_ranks, 32)
    wire, of_all = (
        float(each.times(nothing_uncertain(), worlds(ranks, host_ranks)).wire[0, 0])
        for each, ranks in ((model, 32), (whole, size))
    )
    assert wire == pytest.approx(of_all)
    if group_ranks == 8:
        inside = MEASURED.inside
        assert wire == pytest.approx(7 / 8 * 1e9 / inside.bandwidth_bytes_per_second + 7 * inside.latency_seconds)


def exposed(*sent: Message) -> float:
    """Seconds of a step of 1 s of backward; a message takes as many seconds as it has bytes."""
    seconds = exposed_seconds(
        sent, lambda one: np.array([[one.tensor_bytes]]), np.zeros((1, 1)), np.ones((1, 1)), grad_accum=1
    )
    return float(seconds[0, 0])


def test_replicas_exchange_beside_what_is_scattered_next() -> None:
    """By hand, of two blocks whose gradients are there after 0.4 and 1 s, scattered in 0.1 and all-reduced in 0.5 s.
    The first shards are over at 0.4 + 0.1 + 0.5 = 1.0; the second block is scattered from 1.0 to 1.1, and its shards
    are over at 1.6. In one queue it would be the same. With shards that take 0.9 s they end at 1.4 and 2.3, and the
    second block is scattered meanwhile, which one queue would put off to 1.4."""

    def step(shard_seconds: float, *, beside: bool) -> float:
        sent = []
        for ready in (0.4, 1.0):
            sent.append(Message("reduce_scatter", 0.1, 1, "backward", ready, "all", group="sharding"))
            sent.append(
                Message(
                    "all_reduce", shard_seconds, 1, "backward", ready, "all", beside_later=beside, group="replication"
                )
            )
        return exposed(*sent)

    assert step(0.5, beside=True) == pytest.approx(0.6)
    assert step(0.5, beside=False) == pytest.approx(0.6)
    assert step(0.9, beside=True) == pytest.approx(1.3)
    assert step(0.9, beside=False) == pytest.approx(1.4)


def test_the_optimizer_updates_a_shard_of_a_replica() -> None:
    """Of a second for all of it: an eighth in four replicas of eight, a 32nd in one."""
    draws = nothing_uncertain() | {"optimizer": np.zeros((1, 1))}
    for replicas, share in ((1, 32), (4, 8), (32, 1)):
        model = model_of(ParallelSpec(replicate=replicas), shards_optimizer=True)
        assert model.times(draws, worlds(32, 8)).optimizer[0, 0] == pytest.approx(1 / share)


def test_a_rank_holds_a_shard_of_its_replica() -> None:
    """Weights, moments and gradients are over the ranks of a replica, and so four times as much as over all."""
    whole, replicated = (forecast(make_trial(32, engine="fsdp2", parallel=ParallelSpec(replicate=n))) for n in (1, 4))
    assert whole is not None
    assert replicated is not None
    for part in ("weights", "optimizer states"):
        assert replicated.parts[part] == pytest.approx(4 * whole.parts[part], rel=0.01)


def test_what_replicas_reduce_stays_until_backward_is_over() -> None:
    """Four replicas of eight: a buffer of all shards, of 4 bytes where gradients are accumulated, of 2 where they are
    sent in 16 bits. Else the buffer is the gradient itself, and one replica has none."""

    def buffer_bytes(replicas: int, **train: Any) -> int:
        trial = make_trial(32, engine="fsdp2", parallel=ParallelSpec(replicate=replicas), precision="fp32", **train)
        shapes = parameter_shapes(trial.model)
        assert shapes is not None
        held = states(trial, shapes)
        per_element = held.gradient_bytes - (0 if "grad_accum" in train else 4 / trial.layout.sharding_ranks)
        assert per_element * PSI == pytest.approx(held.exchange["buckets"], rel=1e-3)
        return held.exchange["buckets"]

    assert buffer_bytes(4) == 0
    assert buffer_bytes(4, grad_accum=2) == 4 * -(-PSI // 8)
    assert buffer_bytes(4, gradient_dtype="bf16") == 2 * -(-PSI // 8)
    assert buffer_bytes(1, grad_accum=2) == buffer_bytes(1, gradient_dtype="bf16") == 0


# --- from measurements ------------------------------------------------------------------------------------------------


def measured(parallel: ParallelSpec, counts: tuple[int, ...], engine: str = "fsdp2") -> list[MeasuredPoint]:
    """Steps as the model itself has them, of a micro-step of 0.4 s on a rank, on hosts of eight."""
    points = []
    for gpus in counts:
        trial = make_trial(gpus, engine=engine, parallel=parallel)
        model = model_of(parallel, messages=messages(trial), shards_optimizer=engine == "fsdp2")
        draws = nothing_uncertain() | {"compute": np.array([[np.log(0.4)]])}
        step = float(model.times(draws, worlds(gpus, min(8, gpus))).total[0, 0])
        points.append(make_point(gpus, (step, step * 1.001, step * 0.999), engine=engine, parallel=parallel))
    return points


def test_larger_worlds_with_the_same_replicas_are_predicted() -> None:
    """Measured on one host and two in two replicas, asked for four hosts and eight, where a replica has several."""
    truth = measured(ParallelSpec(replicate=2), (8, 16, 32, 64))
    fitted = fit(make_evidence(truth[:2], MEASURED))
    for found, point in zip(predict(fitted, Question((32, 64))), truth[2:], strict=True):
        assert found.step_seconds.value == pytest.approx(point.step_seconds[0], rel=0.03)
    with pytest.raises(RequestError, match=r"33 ranks do not divide into 2 replicas.*Valid: 32, 34"):
        predict(fitted, Question((33,)))


def test_replicas_that_nobody_measured_are_predicted_from_one() -> None:
    """From FSDP2 whole on one to sixteen ranks: four replicas of eight take as long as in truth, and it is said that
    nobody ran them. Ranks compute all of a model as before: nothing is assumed of a share."""
    fitted = fit(make_evidence(measured(NO_SPLIT, (1, 2, 8, 16)), MEASURED))
    parallel = ParallelSpec(replicate=4)
    asked = variant(fitted.series["ddp"], {"parallel": parallel})
    assert [one.part for one in asked.assumptions] == ["an engine that was not measured"]
    whole = Candidate(32, 8, EngineVariant("fsdp2"), 64, 1)
    found = evaluate_all(fitted, "ddp", [whole, replace(whole, parallel=parallel)])
    for replicas, step in zip((1, 4), found.step.value, strict=True):
        (truth,) = measured(ParallelSpec(replicate=replicas), (32,))
        assert step == pytest.approx(truth.step_seconds[0], rel=0.03), replicas
    assert found.step.value[1] < found.step.value[0]
    assert found.labels[1] == "prior-driven"
