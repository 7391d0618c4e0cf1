"""What ranks on GPUs offload to the memory of their host: all of them together, by hand, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from evidence_factory import make_evidence, make_point, make_trial
from prediction.memory.test_offload import zero_trial
from vitscale.advice import sentences
from vitscale.advice.pipeline import Advice, advise
from vitscale.advice.request import NoiseScale, Request
from vitscale.prediction.configurations import Candidate, Evaluated
from vitscale.prediction.evaluating import ROUGH
from vitscale.prediction.evidence import MeasuredPoint
from vitscale.prediction.fitting import DRAWS, fit
from vitscale.prediction.memory.forecast import oom_chance
from vitscale.prediction.memory.on_host import host_oom_chance, offloaded_bytes, offloaded_bytes_of_many
from vitscale.prediction.predicting import Question, predict
from vitscale.prediction.results import Prediction
from vitscale.prediction.workloads import evaluate_all
from vitscale.trial.model_cost import parameters

OFFLOADED: dict[str, Any] = {"engine": "fsdp2", "device": "cuda", "offload": "parameters"}


def test_all_ranks_of_a_host_share_its_memory() -> None:
    """Of 407 parameters a rank of two has 204, one of four 102: masters, two moments, and gradients in fp32, with a
    copy of new weights and the largest tensor, of 48 elements."""
    assert offloaded_bytes(zero_trial(2, 2, offload="optimizer")) == 2 * (16 * 204 + 4 * (204 + 48))
    on_two_hosts = zero_trial(2, 4, nodes=2, offload="optimizer")
    assert offloaded_bytes(on_two_hosts) == 2 * (16 * 102 + 4 * (102 + 48))
    assert offloaded_bytes(zero_trial(2, 4, offload="optimizer")) == 4 * (16 * 102 + 4 * (102 + 48))


def test_nothing_is_offloaded_on_a_cpu_or_without_asking() -> None:
    assert offloaded_bytes(zero_trial(2, 2)) == 0
    assert offloaded_bytes(zero_trial(2, 2, device="cpu", offload="optimizer")) == 0


def test_what_is_not_modelled_is_unknown() -> None:
    unmodelled = zero_trial(3, 2, keys={"offload_optimizer": {"device": "nvme"}})
    assert offloaded_bytes(unmodelled) is None
    assert np.isnan(offloaded_bytes_of_many(unmodelled, np.array([2]), np.array([2]), 1)).all()


@pytest.mark.parametrize("grad_accum", [1, 2])
def test_many_configurations_offload_what_each_does_alone(grad_accum: int) -> None:
    gpus, ranks_per_node = np.array([1, 8, 8, 16, 6]), np.array([8, 8, 2, 4, 3])
    template = zero_trial(2, 2, offload="optimizer")
    many = offloaded_bytes_of_many(template, gpus, ranks_per_node, grad_accum)
    nodes = (1, 1, 4, 4, 2)
    alone = [
        offloaded_bytes(zero_trial(2, ranks, nodes=hosts, offload="optimizer", grad_accum=grad_accum))
        for ranks, hosts in zip(gpus.tolist(), nodes, strict=True)
    ]
    assert many.tolist() == alone


def test_each_rank_has_an_equal_share_of_the_host() -> None:
    """Eight ranks with 10 GB each on 64 GB do not fit, though one does."""
    offloaded = np.array([80e9, 10e9, 0.0, np.nan])
    chances = host_oom_chance(offloaded, 64e9, np.array([8, 1, 8, 8]))
    assert chances[0] == pytest.approx(oom_chance(10e9, 8e9, "cpu")) == pytest.approx(1.0)
    assert chances[1] == pytest.approx(0.0, abs=1e-6)
    assert chances[2] == 0.0
    assert np.isnan(chances[3])


# --- predict and advise -----------------------------------------------------------------------------------------------

PSI = parameters(make_trial(8).model) or 0
"""Parameters of ViT-B/16; FSDP2 offloads 16 bytes of each: weights, gradients and two moments."""


def points(**point: Any) -> list[MeasuredPoint]:
    return [make_point(gpus, 0.2, **OFFLOADED, **point) for gpus in (1, 2)]


def predicted(gpus: int, **point: Any) -> Prediction:
    evidence = make_evidence(points(**point), name="fsdp2")
    (answer,) = predict(fit(evidence), Question((gpus,), nodes_of=8))
    return answer


def test_a_prediction_is_held_against_the_memory_of_the_measured_hosts() -> None:
    enough = predicted(8, host_memory_bytes=256 * 10**9)
    assert enough.host_memory_bytes == pytest.approx(16 * PSI, rel=0.02)
    assert enough.host_memory_capacity_bytes == 256 * 10**9
    assert enough.host_oom_chance == pytest.approx(0.0, abs=0.01)
    assert predicted(8, host_memory_bytes=2 * 10**9).host_oom_chance == pytest.approx(1.0, abs=0.01)


def test_a_host_whose_memory_nobody_recorded_is_said_to_be_unknown() -> None:
    unknown = predicted(8)
    assert unknown.host_memory_bytes is not None
    assert unknown.host_oom_chance is None
    assert unknown.reasons["host_oom_chance"] == "the memory of the measured hosts is not recorded: measure once more"


def advised(**point: Any) -> Advice:
    evidence = make_evidence(points(**point), name="fsdp2")
    fitted = fit(evidence)

    def forecaster(series: str, candidates: Sequence[Candidate], rough: bool) -> Evaluated:
        draws = ROUGH if rough else DRAWS
        return evaluate_all(
            fitted, series, candidates, memory_capacity_bytes=80 * 10**9, with_memory=rough, draws=draws
        )

    request = Request(gpus=(8,), ranks_per_node=8, epochs=1, large_batch=True)
    return advise(evidence, request, NoiseScale.unknown("not measured"), forecaster)


def test_advice_leaves_out_what_does_not_fit_into_the_host() -> None:
    small, large = advised(host_memory_bytes=2 * 10**9), advised(host_memory_bytes=256 * 10**9)
    reason = "more than a 5 % chance that it will not fit in memory"
    offloading = [option for option in large.by_count if option.host_memory_bytes]
    assert offloading
    assert all((option.host_oom_chance or 0.0) < 0.01 for option in offloading)
    assert not [option for option in small.by_count if option.host_memory_bytes]
    assert small.dropped[reason] > large.dropped.get(reason, 0)
    assert small.host_memory_known
    assert large.host_memory_known


def test_advice_says_that_the_host_s_memory_is_unknown() -> None:
    unknown = advised()
    assert not unknown.host_memory_known
    assert any(sentence.startswith("The host's memory: unavailable") for sentence in sentences.notes(unknown))
