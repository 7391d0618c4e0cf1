"""Which split of 8, 64 and 1,024 GPUs is fastest and fits: steps of ViT-H and of ViT-22B as their FLOPs have them."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

import pytest

from evidence_factory import make_evidence, make_point, make_trial
from vitscale.advice import sentences
from vitscale.advice.pipeline import Advice, advise
from vitscale.advice.printing import advice_fields
from vitscale.advice.request import NoiseScale, Request
from vitscale.advice.study_text import study_text
from vitscale.prediction.configurations import Candidate, Evaluated
from vitscale.prediction.evaluating import ROUGH
from vitscale.prediction.fitting import DRAWS, fit
from vitscale.prediction.network.links import Link, Network
from vitscale.prediction.workloads import evaluate_all
from vitscale.study.sections import Study
from vitscale.trial.model_cost import parameters, training_flops
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.parallel import NO_SPLIT, ParallelSpec

HUGE = ModelSpec(name="vit-h14")
HUGEST = ModelSpec(name="vit-h14", hidden_size=6144, layers=48, heads=48, mlp_size=24_576)
"""Dehghani et al., "Scaling Vision Transformers to 22 Billion Parameters" (arXiv 2302.05442), table 1."""
GPUS = (8, 64, 1024)
NETWORK = Network(Link(300e9, 1e-5, 0.07, 0.3, "check", "a check"), Link(45e9, 2e-5, 0.07, 0.3, "check", "a check"))
REACHED = 400e12
"""FLOPs a second of a GPU with 80 GB."""
MEMORY = 80 * 10**9
IMAGES = 1_281_167


def advised(
    model: ModelSpec, micro_batch: int, *, recomputing: bool, gpus: tuple[int, ...] = GPUS, split: bool = True
) -> Advice:
    """From runs on 8 and 16 ranks under FSDP2, whose transfers hide behind their computing."""
    points = []
    for ran_on in (8, 16):
        how: dict[str, Any] = {
            "model": model,
            "engine": "fsdp2",
            "micro_batch": micro_batch,
            "activation_checkpointing": recomputing,
        }
        trial = make_trial(ran_on, **how)
        step = (training_flops(trial.model) or 0) * micro_batch / REACHED * (4 / 3 if recomputing else 1)
        points.append(make_point(ran_on, (step, 1.01 * step, 0.99 * step), images=IMAGES, **how))
    evidence = make_evidence(points, NETWORK)
    fitted = fit(evidence)

    def forecaster(series: str, candidates: Sequence[Candidate], rough: bool) -> Evaluated:
        draws = ROUGH if rough else DRAWS
        return evaluate_all(fitted, series, candidates, memory_capacity_bytes=MEMORY, with_memory=rough, draws=draws)

    asked = Request(gpus=gpus, ranks_per_node=8, epochs=1, memory_capacity_bytes=MEMORY, split=split, large_batch=True)
    return advise(evidence, asked, NoiseScale.unknown("not measured"), forecaster)


@pytest.fixture(scope="module")
def hugest() -> Advice:
    return advised(HUGEST, 8, recomputing=True)


def test_the_model_is_as_large_as_its_name() -> None:
    assert parameters(make_trial(8, model=HUGEST).model) == pytest.approx(21.8e9, rel=0.02)


def test_without_being_asked_no_ranks_share_a_model() -> None:
    assert {
        one.candidate.parallel for one in advised(HUGE, 32, recomputing=False, gpus=(8,), split=False).by_count
    } == {NO_SPLIT}


def test_a_model_that_fits_is_not_shared() -> None:
    """ViT-H: 632 M parameters, at 32 images of 224 pixels a GPU; on one host, whose links hide all that is sent."""
    advice = advised(HUGE, 32, recomputing=False, gpus=(8,))
    fastest = min(advice.by_count, key=lambda one: one.seconds.value)
    assert fastest.candidate.parallel == NO_SPLIT
    assert any(one.candidate.parallel != NO_SPLIT for one in advice.by_count)


def test_of_splits_what_fits_is_advised_and_matrices_are_shared_inside_hosts(hugest: Advice) -> None:
    """ViT-22B takes 16 bytes a parameter and more: 350 GB, so that DDP by itself is out of the question."""
    assert not any(one.candidate.engine == "ddp" and one.candidate.parallel == NO_SPLIT for one in hugest.by_count)
    for option in hugest.by_count:
        assert option.memory_bytes is not None
        assert option.memory_bytes < MEMORY
        assert option.candidate.parallel.tensor <= 8
        assert option.gpus % option.candidate.parallel.ranks_per_model == 0
        assert option.global_batch == option.gpus * 8 or not option.keeps_batch
    # Nothing is left out for want of a forecast: what stages hold that compute activations again is told, too.
    assert all("fit in memory" in why for why in hugest.dropped)
    assert any(option.candidate.parallel.pipeline > 1 for option in hugest.by_count)
    assert {option.gpus for option in hugest.by_count} == set(GPUS)


def test_what_is_advised_is_named_and_can_be_run(hugest: Advice) -> None:
    option = next(one for one in hugest.by_count if one.candidate.parallel.pipeline > 1)
    split, trial = option.candidate.parallel, hugest.trials[option.series]
    assert f"pipeline {split.pipeline}" in sentences.engine(option)
    copies = option.gpus // split.ranks_per_model
    assert sentences.batch(option).startswith(f"{option.global_batch:,} = {copies:,} x {option.candidate.micro_batch}")
    text = tomllib.loads(study_text("split", option, trial, hugest.work))
    study = Study.model_validate(text)
    assert study.parallel == split
    told = advice_fields(hugest, None)["pareto_front"]
    assert all(ParallelSpec.model_validate(one["parallel"]) for one in told)
