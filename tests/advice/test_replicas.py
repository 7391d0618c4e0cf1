"""FSDP2 over all ranks of four hosts, a replica on each host (HSDP), or DDP: which is fastest, and how it is named."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from advice.test_shared_models import MEMORY
from evidence_factory import make_evidence, make_point, make_trial
from prediction.test_shared_models import model_of, nothing_uncertain, worlds
from vitscale.advice import sentences
from vitscale.advice.pipeline import Advice, advise
from vitscale.advice.request import NoiseScale, Request
from vitscale.advice.study_text import study_text
from vitscale.prediction.configurations import Candidate, Evaluated
from vitscale.prediction.evaluating import ROUGH
from vitscale.prediction.evidence import MeasuredPoint
from vitscale.prediction.fitting import DRAWS, fit
from vitscale.prediction.network.links import Link, Network
from vitscale.prediction.step.messages import messages
from vitscale.prediction.workloads import evaluate_all
from vitscale.study.sections import Study
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.parallel import NO_SPLIT, ParallelSpec

HUGE = ModelSpec(name="vit-h14")
ETHERNET = Network(Link(300e9, 1e-5, 0.07, 0.3, "check", "a check"), Link(2.5e9, 2e-5, 0.07, 0.3, "check", "a check"))
"""25 Gbit/s between hosts, and GPUs that are joined in a host."""
MICRO_STEP_SECONDS = 0.5
IMAGES = 1_281_167
STEPS_OF_AN_EPOCH = IMAGES / (32 * 32)
OF_HOSTS = ParallelSpec(replicate=4)


def step_seconds(gpus: int, engine: str, parallel: ParallelSpec) -> float:
    """A step as the model has it, of hosts of eight."""
    trial = make_trial(gpus, engine=engine, parallel=parallel, model=HUGE, micro_batch=32)
    model = model_of(parallel, messages=messages(trial), shards_optimizer=engine == "fsdp2", network=ETHERNET)
    draws = nothing_uncertain() | {"compute": np.log(np.full((1, 1), MICRO_STEP_SECONDS))}
    return float(model.times(draws, worlds(gpus, min(8, gpus))).total[0, 0])


def measured(gpus: int, engine: str, parallel: ParallelSpec) -> MeasuredPoint:
    step = step_seconds(gpus, engine, parallel)
    how: dict[str, Any] = {"engine": engine, "parallel": parallel, "model": HUGE, "micro_batch": 32}
    return make_point(gpus, (step, 1.01 * step, 0.99 * step), images=IMAGES, **how)


def advised(points: Sequence[MeasuredPoint], gpus: tuple[int, ...] = (32,)) -> Advice:
    evidence = make_evidence(points, ETHERNET)
    fitted = fit(evidence)

    def forecaster(series: str, candidates: Sequence[Candidate], rough: bool) -> Evaluated:
        draws = ROUGH if rough else DRAWS
        return evaluate_all(fitted, series, candidates, memory_capacity_bytes=MEMORY, with_memory=rough, draws=draws)

    asked = Request(gpus=gpus, ranks_per_node=8, epochs=1, memory_capacity_bytes=MEMORY, large_batch=True)
    return advise(evidence, asked, NoiseScale.unknown("not measured"), forecaster)


@pytest.fixture(scope="module")
def from_whole() -> Advice:
    """From FSDP2 over all ranks of one host and of two."""
    return advised([measured(gpus, "fsdp2", NO_SPLIT) for gpus in (8, 16)])


def test_a_replica_on_each_host_is_predicted_beside_one_over_all_and_ddp(from_whole: Advice) -> None:
    """FSDP2 over all ranks sends weights twice and gradients once between hosts, a replica on each host half as much: a
    shard of the gradient, there and back. Each is as fast as in truth, with what nobody measured after the rest."""
    by_name = {sentences.engine(option): option for option in from_whole.by_count}
    for name, engine, parallel in (
        ("fsdp2", "fsdp2", NO_SPLIT), ("fsdp2, 4 replicas of 8", "fsdp2", OF_HOSTS), ("ddp", "ddp", NO_SPLIT),
    ):  # fmt: skip
        option = by_name[name]
        assert option.candidate.parallel == parallel
        assert option.measured_engine is (name == "fsdp2")
        assert (option.candidate.micro_batch, option.candidate.grad_accum) == (32, 1)
        step = option.training.value / STEPS_OF_AN_EPOCH
        assert step == pytest.approx(step_seconds(32, engine, parallel), rel=0.1), name
    assert by_name["fsdp2, 4 replicas of 8"].seconds.value < 0.75 * by_name["fsdp2"].seconds.value
    assert next(iter(by_name)) == "fsdp2"


def test_replicas_are_the_answer_once_they_were_measured() -> None:
    """On two hosts they were two; on four they are four, of as many ranks."""
    advice = advised(
        [measured(8, "fsdp2", ParallelSpec(replicate=2)), measured(16, "fsdp2", ParallelSpec(replicate=2))]
    )
    by_name = {sentences.engine(option): option for option in advice.by_count}
    assert by_name["fsdp2, 4 replicas of 8"].measured_engine
    assert not by_name["fsdp2"].measured_engine


def test_a_host_alone_or_of_one_rank_has_no_replicas() -> None:
    advice = advised([measured(gpus, "fsdp2", NO_SPLIT) for gpus in (8, 16)], gpus=(4, 8))
    assert {option.candidate.parallel for option in advice.by_count} == {NO_SPLIT}


def test_advised_replicas_can_be_run(from_whole: Advice) -> None:
    option = next(one for one in from_whole.by_count if one.candidate.parallel == OF_HOSTS)
    text = tomllib.loads(study_text("replicas", option, from_whole.trials[option.series], from_whole.work))
    assert Study.model_validate(text).parallel == OF_HOSTS
    assert sentences.batch(option).startswith(f"{option.global_batch:,} = 32 x")
