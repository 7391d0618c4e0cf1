"""ZeRO-3 with a second shard of the weights on each host (hpZ) or without one: which is faster, and how it is named."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from advice.test_replicas import ETHERNET, HUGE, IMAGES, advised
from advice.test_shared_models import MEMORY
from evidence_factory import make_evidence, make_point, make_trial
from prediction.test_shared_models import model_of, nothing_uncertain, worlds
from vitscale.advice import sentences
from vitscale.advice.pipeline import Advice
from vitscale.advice.printing import _option_fields
from vitscale.advice.study_text import study_text
from vitscale.engines.variants import EngineVariant
from vitscale.prediction.configurations import Candidate
from vitscale.prediction.evidence import MeasuredPoint
from vitscale.prediction.fitting import fit
from vitscale.prediction.step.messages import messages
from vitscale.prediction.workloads import evaluate_all
from vitscale.study.sections import Study
from vitscale.trial.parallel import NO_SPLIT

MICRO_STEP_SECONDS = 0.5
ACCUMULATION = 4


def zero_3(hpz: int) -> dict[str, Any]:
    return {
        "engine": "deepspeed", "zero_stage": 3, "hpz": hpz, "model": HUGE, "micro_batch": 32,
        "grad_accum": ACCUMULATION,
    }  # fmt: skip


def step_seconds(gpus: int, hpz: int) -> float:
    """A step as the model has it, of hosts of eight."""
    sent = messages(make_trial(gpus, **zero_3(hpz)))
    model = model_of(
        NO_SPLIT, messages=sent, shards_optimizer=True, network=ETHERNET, second_shard_ranks=hpz,
        reference_micro_batch=32,
    )  # fmt: skip
    draws = nothing_uncertain() | {"compute": np.log(np.full((1, 1), MICRO_STEP_SECONDS))}
    times = model.times(draws, worlds(gpus, min(8, gpus), micro_batch=32, grad_accum=ACCUMULATION))
    return float(times.total[0, 0])


def measured(gpus: int, hpz: int) -> MeasuredPoint:
    step = step_seconds(gpus, hpz)
    return make_point(gpus, (step, 1.01 * step, 0.99 * step), images=IMAGES, **zero_3(hpz))


@pytest.fixture(scope="module")
def from_without() -> Advice:
    """From ZeRO-3 without second shards, on one host and on two."""
    return advised([measured(gpus, 1) for gpus in (8, 16)])


@pytest.mark.parametrize("measured_hpz", [1, 8])
def test_a_second_shard_on_each_host_is_as_fast_as_in_truth(measured_hpz: int) -> None:
    """From the one and from the other. Of four gathers of a weight in a step three stay in a host."""
    fitted = fit(make_evidence([measured(gpus, measured_hpz) for gpus in (8, 16)], ETHERNET))
    without = Candidate(32, 8, EngineVariant("deepspeed", (("zero_stage", 3),)), 32, ACCUMULATION)
    candidates = [without, replace(without, second_shard_ranks=8)]
    found = evaluate_all(fitted, "ddp", candidates, memory_capacity_bytes=MEMORY)
    truth = [step_seconds(32, 1), step_seconds(32, 8)]
    assert found.step.value == pytest.approx(truth, rel=0.1)
    assert truth[1] < 0.85 * truth[0]
    assert found.memory_bytes[1] >= found.memory_bytes[0]


def test_a_second_shard_on_each_host_is_looked_at_beside_none(from_without: Advice) -> None:
    by_name = {sentences.engine(option): option for option in from_without.by_count}
    for hpz, name in ((1, "deepspeed ZeRO-3"), (8, "deepspeed ZeRO-3, hpZ 8")):
        assert by_name[name].candidate.second_shard_ranks == hpz
        assert by_name[name].measured_engine is (hpz == 1)


def test_second_shards_are_the_answer_once_they_were_measured() -> None:
    by_name = {sentences.engine(option): option for option in advised([measured(gpus, 8) for gpus in (8, 16)]).by_count}
    assert by_name["deepspeed ZeRO-3, hpZ 8"].measured_engine
    assert not by_name["deepspeed ZeRO-3"].measured_engine


def test_groups_as_large_as_the_measured_ones_stay_to_choose_from() -> None:
    advice = advised([measured(gpus, 4) for gpus in (8, 16)])
    counts = {
        option.candidate.second_shard_ranks for option in advice.by_count if option.candidate.changes["zero_stage"] == 3
    }
    assert counts == {1, 4, 8}


def test_no_other_engine_and_no_lone_host_has_second_shards(from_without: Advice) -> None:
    others = [option for option in from_without.by_count if option.candidate.changes["zero_stage"] != 3]
    assert others
    assert {option.candidate.second_shard_ranks for option in others} == {1}
    alone = advised([measured(gpus, 1) for gpus in (8, 16)], gpus=(4, 8))
    assert {option.candidate.second_shard_ranks for option in alone.by_count} == {1}


def test_advised_second_shards_can_be_run(from_without: Advice) -> None:
    option = next(option for option in from_without.by_count if option.candidate.second_shard_ranks == 8)
    text = tomllib.loads(study_text("hpz", option, from_without.trials[option.series], from_without.work))
    assert text["train"]["hpz"] == Study.model_validate(text).train.hpz == 8
    assert _option_fields(option)["hpz"] == 8
