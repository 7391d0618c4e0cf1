"""Which accuracies are held against each other, after equally many images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

from vitscale.analysis import TrialResult
from vitscale.analysis.claims import AccuracyDifference, accuracy_difference
from vitscale.analysis.equal_samples import EqualSamples, equal_samples
from vitscale.report.like_paper.series import Member, Series, apart_in_micro_batch, names

_ASKED = (4, 8)
"""GPU counts whose accuracy the study holds against one GPU's."""


@dataclass(frozen=True)
class AccuracyTest:
    """The accuracy of one GPU count against that of a smaller one."""

    name: str
    gpus: int
    base_gpus: int
    batches: tuple[int, int]
    """Global batch of the base, and of what is held against it."""
    trials: tuple[str, str]
    """Their identities."""
    samples: EqualSamples
    result: AccuracyDifference


def against_fewest(found: Sequence[Series]) -> list[AccuracyTest]:
    """Of each strong series 4 and 8 GPUs, or the most there are, against the fewest."""
    strong = [one for one in found if one.mode == "strong-micro" and len(one.members) > 1]
    tests = []
    for one, name in zip(strong, names(strong), strict=True):
        base, later = one.members[0], one.members[1:]
        for member in [member for member in later if member.gpus in _ASKED] or later[-1:]:
            tests.append(_test(name, base, member))
    return [test for test in tests if test is not None]


def at_equal_batch(found: Sequence[Series]) -> list[AccuracyTest]:
    """Strong series apart in micro-batch alone: more GPUs against fewer wherever their global batch is the same."""
    tests = []
    for name, some in apart_in_micro_batch([one for one in found if one.mode == "strong-micro"]):
        for one, other in combinations(some, 2):
            for pair in product(one.members, other.members):
                fewer, more = sorted(pair, key=lambda member: member.gpus)
                if fewer.trial.trial.global_batch == more.trial.trial.global_batch:
                    tests.append(_test(name, fewer, more))
    return [test for test in tests if test is not None]


def _test(name: str, base: Member, member: Member) -> AccuracyTest | None:
    """None where an accuracy is not known."""
    samples = equal_samples(base.trial.records, member.trial.records)
    if samples is None:
        return None
    counted = _counted(base.trial, samples), _counted(member.trial, samples)
    known = (counted[0], counted[1]) if counted[0] is not None and counted[1] is not None else None
    return AccuracyTest(
        name,
        member.gpus,
        base.gpus,
        (base.trial.trial.global_batch, member.trial.trial.global_batch),
        (base.trial.trial_id, member.trial.trial_id),
        samples,
        accuracy_difference(samples.reference, samples.other, known),
    )


def _counted(trial: TrialResult, samples: EqualSamples) -> int | None:
    """From how many images one run's accuracy was counted; None where that is not recorded.

    Training accuracy in a log of others is taken to be rank 0's own, from its share of the images.
    """
    run = trial.records[0]
    model = next((rank.model for rank in run.ranks if rank.model is not None), None)
    if samples.split == "held-out":
        return model.held_out_samples or None if model else None
    images = next((line.images for rank in run.ranks for line in rank.epochs[:1]), None)
    if images is None or run.header.imported is None:
        return images or None
    return images // run.header.trial.world.size or None
