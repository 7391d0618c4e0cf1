"""What is said of ranks of unlike speed: the shares that would suit them, and whether those they have do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from results_factory import explained_run, make_environment, make_trial, steady_run
from verdict_finder import THREE, kinds, of_one_trial, three_repeats, verdict
from vitscale.analysis import analyse
from vitscale.analysis.quality.shares import time_saved
from vitscale.analysis.trials import TrialResult
from vitscale.store.records import DeviceRecord, Environment
from vitscale.store.results import Results
from vitscale.trial.rank_batches import micro_batches

SECONDS_PER_IMAGE = (0.01, 0.01, 0.04)
"""Of each rank, in forward and backward."""
CARDS = ("RTX 3090", "RTX 3090", "GTX 1070")
BY_NAME = "mixed hardware inside 1 trial: GTX 1070 and RTX 3090; all ranks take equally many images"


def on_cards() -> list[Environment]:
    return [make_environment(r, device=DeviceRecord(type="cpu", name=name)) for r, name in enumerate(CARDS)]


def under_quotas(*quotas: float | None) -> list[Environment]:
    return [make_environment(r, host=f"node{r}", cpu_quota_cores=quota) for r, quota in enumerate(quotas)]


def explained(
    environments: Sequence[Environment] | None,
    per_image: Sequence[float] = SECONDS_PER_IMAGE,
    shares: tuple[int, ...] | None = None,
) -> Results:
    """Three ranks that take so long for an image, and wait for the slowest of them."""
    trial = make_trial("ddp", 3, micro_batches=shares)
    taken = micro_batches(trial.train, 3)
    computing = [images * seconds for images, seconds in zip(taken, per_image, strict=True)]
    parts: list[dict[str, Any]] = [
        {"forward": one / 3, "backward": 2 * one / 3, "wait": max(computing) - one, "wire": 0.02, "optimizer": 0.005}
        for one in computing
    ]
    runs = [explained_run(trial, parts, repeat=repeat, environments=environments) for repeat in range(3)]
    return of_one_trial(trial, *runs)


def result_of(results: Results) -> TrialResult:
    (found,) = analyse(results).trials.values()
    return found


def test_speeds_are_those_of_forward_and_backward_per_image_whatever_the_shares() -> None:
    assert result_of(explained(None)).rank_speeds == (1.0, 1.0, 0.25)
    assert result_of(explained(None, shares=(11, 10, 3))).rank_speeds == (1.0, 1.0, 0.25)
    assert result_of(explained(None, (0.04, 0.01, 0.03))).rank_speeds == (0.25, 1.0, 0.33)


def test_without_explained_steps_speeds_are_unknown() -> None:
    assert result_of(three_repeats()).rank_speeds is None


def test_the_gain_is_in_the_time_of_the_slowest_rank() -> None:
    """8 images at 0.25 take 32; the best shares of 24 images, 11, 11 and 2, take 11."""
    assert time_saved(result_of(explained(None)).trial, (1.0, 1.0, 0.25)) == pytest.approx(1 - 11 / 32)
    assert time_saved(result_of(explained(None, shares=(11, 11, 2))).trial, (1.0, 1.0, 0.25)) == 0.0


def test_mixed_hardware_is_told_with_the_shares_to_use() -> None:
    found = verdict(explained(on_cards()), "mixed-hardware")
    assert found.severity == "warning"
    assert found.message.startswith(BY_NAME)
    assert "rank 2 computes at 0.25 of the fastest, and 3 ranks do the work of 2.25 like that one" in found.message
    assert found.advice.startswith(
        "Set rank_speeds = [1.0, 1.0, 0.25] under [train]: forward and backward of a step then take 66 % less time"
    )
    assert len(found.about.trials) == 1


def test_unlike_quotas_are_told_too() -> None:
    found = verdict(explained(under_quotas(1.0, 1.0, 0.25)), "mixed-hardware")
    assert "CPU quotas of 0.25 and 1 cores" in found.message
    assert "rank_speeds = [1.0, 1.0, 0.25]" in found.advice
    assert (
        "CPU quotas of 2 and none cores" in verdict(explained(under_quotas(2.0, None, None)), "mixed-hardware").message
    )


def test_without_a_measurement_it_is_said_where_speeds_come_from() -> None:
    trial = make_trial("ddp", 3)
    runs = [steady_run(trial, seconds, r, environments=on_cards()) for r, seconds in enumerate(THREE)]
    found = verdict(of_one_trial(trial, *runs), "mixed-hardware")
    assert found.message.startswith(BY_NAME)
    assert found.advice.startswith("Set train.rank_speeds: `vitscale check` measures them.")


def test_unlike_types_of_like_speed_need_no_other_shares() -> None:
    found = verdict(explained(on_cards(), (0.01, 0.0101, 0.0099)), "mixed-hardware")
    assert found.advice == "Other shares would save less than 5 % of forward and backward."


def test_like_ranks_are_not_told_of() -> None:
    for environments in (None, under_quotas(1.0, 1.0, 1.0)):
        assert not {"mixed-hardware", "unequal-shares"} & set(kinds(explained(environments)))


def test_unequal_shares_that_suit_are_a_note_and_the_types_are_named() -> None:
    results = explained(on_cards(), shares=(11, 11, 2))
    found = verdict(results, "unequal-shares")
    assert found.severity == "note"
    assert found.message.startswith(
        "unequal shares in 1 trial: ddp on 3 ranks, shares 2 x 11 + 2 (GTX 1070 and RTX 3090)"
    )
    assert "compare as any other" in found.advice
    assert "rank_speeds" not in found.advice
    assert "mixed-hardware" not in kinds(results)


def test_unequal_shares_that_do_not_suit_are_a_warning_with_those_that_would() -> None:
    found = verdict(explained(None, shares=(15, 8, 1)), "unequal-shares")
    assert found.severity == "warning"
    assert "Set rank_speeds = [1.0, 1.0, 0.25]" in found.advice
