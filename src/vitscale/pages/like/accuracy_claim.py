"""Accuracies after equally many images, compared between GPU counts, tested, and put into words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, Literal

from vitscale.analysis import TrialResult
from vitscale.analysis.claims import AccuracyDifference, accuracy_difference
from vitscale.analysis.learning.convergence import linear_between, seed_of
from vitscale.analysis.statistics import NOT_AMONG_ALL, corrected
from vitscale.pages.like.curves import gpus_text
from vitscale.pages.like.series import FigureSeries, Member, apart_in_micro_batch, names
from vitscale.pages.like.study import ClaimOutcome, Material
from vitscale.present.data import attributes
from vitscale.store.results import Run

_ASKED = (4, 8)
"""GPU counts whose accuracy the study compares with one GPU's."""


@dataclass(frozen=True)
class AccuracyTest:
    """The accuracy of one GPU count against that of a smaller one."""

    name: str
    gpus: int
    base_gpus: int
    batches: tuple[int, int]
    """Global batches of the base, and of the trial compared with it."""
    trials: tuple[str, str]
    """Identities of the two trials."""
    samples: EqualSamples
    result: AccuracyDifference


def accuracy_claim(material: Material) -> ClaimOutcome:
    """N GPUs against the fewest at a fixed micro-batch, and more against fewer at one global batch."""
    fewest, equal = accuracy_tests(material.series)
    entries = {"accuracy": [_entry(test) for test in fewest], "accuracy_at_equal_batch": [_entry(t) for t in equal]}
    return ClaimOutcome(tuple(_sentences(fewest, equal)), entries)


def accuracy_tests(series: Sequence[FigureSeries]) -> tuple[list[AccuracyTest], list[AccuracyTest]]:
    """Tests of strong scaling against the fewest GPUs, and at one global batch; Holm's correction is for all tests."""
    fewest, equal = _once(_against_fewest(series)), _once(_at_equal_batch(series))
    tests = [*fewest, *equal]
    results = corrected([test.result for test in tests], [test.trials for test in tests])
    tests = [replace(test, result=result) for test, result in zip(tests, results, strict=True)]
    return tests[: len(fewest)], tests[len(fewest) :]


def _once(tests: Sequence[AccuracyTest | None]) -> list[AccuracyTest]:
    """The tests that could be made, each pair of trials once: a curve that goes on over several hosts is two series,
    which share what was measured in one."""
    of_pair: dict[tuple[str, str], AccuracyTest] = {}
    for test in tests:
        if test is not None:
            of_pair.setdefault(test.trials, test)
    return list(of_pair.values())


def _against_fewest(series: Sequence[FigureSeries]) -> list[AccuracyTest | None]:
    """For each strong series 4 and 8 GPUs, or the most there are, against the fewest."""
    strong = [curve for curve in series if curve.mode == "strong-micro" and len(curve.members) > 1]
    tests = []
    for curve, name in zip(strong, names(strong), strict=True):
        base, later = curve.members[0], curve.members[1:]
        for member in [member for member in later if member.gpus in _ASKED] or later[-1:]:
            tests.append(_test(name, base, member))
    return tests


def _at_equal_batch(series: Sequence[FigureSeries]) -> list[AccuracyTest | None]:
    """Strong series that differ only in micro-batch: more GPUs against fewer wherever the global batch is the same."""
    tests = []
    for name, some in apart_in_micro_batch([curve for curve in series if curve.mode == "strong-micro"]):
        for curve, other in combinations(some, 2):
            for pair in product(curve.members, other.members):
                fewer, more = sorted(pair, key=lambda member: member.gpus)
                if fewer.trial.trial.global_batch == more.trial.trial.global_batch:
                    tests.append(_test(name, fewer, more))
    return tests


def _test(name: str, base: Member, member: Member) -> AccuracyTest | None:
    """The test of one pair; None where an accuracy is not known."""
    samples = equal_samples(base.trial.recorded_runs, member.trial.recorded_runs)
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
    """Number of images from which one run's accuracy was counted; None where that is not recorded.

    Training accuracy in a log of others is taken to be rank 0's own, from its share of the images.
    """
    run = trial.recorded_runs[0]
    model = next((rank.model for rank in run.ranks if rank.model is not None), None)
    if samples.split == "held-out":
        return model.held_out_samples or None if model else None
    images = next((line.images for rank in run.ranks for line in rank.epochs[:1]), None)
    if images is None or run.header.imported is None:
        return images or None
    return images // run.header.trial.world.size or None


def _sentences(tests: Sequence[AccuracyTest], equal: Sequence[AccuracyTest]) -> list[str]:
    """A sentence on all tests, one for each series, and one for each at one global batch; none without a test."""
    if not tests:
        return []
    by_name: dict[str, list[AccuracyTest]] = {}
    for test in tests:
        by_name.setdefault(test.name, []).append(test)
    lines = [_overall(tests, len({test.trials for test in (*tests, *equal) if test.result.p is not None}))]
    for name, some in by_name.items():
        first = some[0]
        kind = "held-out" if first.samples.split == "held-out" else "training"
        single = any(test.result.difference.low is None for test in some)
        lines.append(
            f"{name}: {kind} accuracy against {gpus_text(first.base_gpus)} (global batch {first.batches[0]:,}) after "
            f"{first.samples.images:,} images each: {'; '.join(accuracy_words(test) for test in some)}"
            + (". With one seed on a side, how far another would move it is not known." if single else ".")
        )
    for test in equal:
        lines.append(
            f"{test.name}, one global batch of {test.batches[0]:,}: {accuracy_words(test)}, against "
            f"{gpus_text(test.base_gpus)} after {test.samples.images:,} images each."
        )
    return lines


def accuracy_words(test: AccuracyTest) -> str:
    """One difference of accuracy: its size, its interval or why there is none, and what to make of it."""
    result = test.result
    head = f"{_points(result.difference.value)} points at {gpus_text(test.gpus)} (global batch {test.batches[1]:,}"
    if result.difference.low is not None and result.difference.high is not None:
        bounds = f"95 % interval {_points(result.difference.low)} to {_points(result.difference.high)})"
        if result.verdict.startswith("too few runs"):
            return f"{head}; {bounds}, too few seeds to tell"
        if result.verdict == NOT_AMONG_ALL:
            return f"{head}; {bounds}, no difference shown among all comparisons (p = {result.p_adjusted:.2g} for all)"
        if result.verdict == "no difference shown":
            largest = 100 * max(*map(abs, result.difference.ends))
            return f"{head}; {bounds}, no difference shown: one of {largest:.1f} points cannot be excluded"
        return f"{head}; {bounds}, {result.verdict}"
    if result.counting_error is None:
        return f"{head}; counted from an unknown number of images), too few seeds to tell"
    beyond = "more" if result.verdict == "too few runs: beyond counting error" else "no more"
    counting = f"{beyond} than counting errors explain (+/- {100 * result.counting_error:.1f})"
    return f"{head}), {counting}; too few seeds to tell"


def _overall(tests: Sequence[AccuracyTest], corrected_for: int) -> str:
    """All tests in one sentence. `corrected_for`: number of pairs of trials that were tested."""
    told = [test.result.verdict for test in tests]
    lower, higher = told.count("lower"), told.count("higher")
    few = sum(verdict.startswith("too few runs") for verdict in told)
    compared = f"{len(tests)} comparison{'s' if len(tests) != 1 else ''} with fewer GPUs after equal images"
    counts = [f"lower in {lower}, higher in {higher}, no difference shown in {len(tests) - lower - higher - few}"]
    counts += [f"too few seeds to tell in {few}"] if few else []
    beyond = told.count("too few runs: beyond counting error")
    counts[-1] += f" (of which {beyond} differ by more than counting errors explain)" if beyond else ""
    if lower + higher:
        meaning = "equal accuracy is not what these runs show"
    elif few == len(tests):
        meaning = "whether accuracy is equal takes runs of 3 seeds or more on each side"
    else:
        meaning = "no difference is shown, which is not that there is none"
    among = f" (after Holm's correction for {corrected_for} pairs)" if corrected_for > 1 else ""
    return f"Accuracy in {compared}: {', '.join(counts)}{among}; {meaning}."


def _entry(test: AccuracyTest) -> dict[str, Any]:
    return {
        "workload": test.name,
        **attributes(test, "gpus", "base_gpus"),
        "global_batch": test.batches[1],
        "base_global_batch": test.batches[0],
        **attributes(test.samples, "split", "images"),
        "difference": test.result.difference.value,
        **attributes(test.result.difference, "low", "high"),
        **attributes(test.result, "counting_error", "p", "p_adjusted", "verdict"),
        "text": accuracy_words(test),
    }


def _points(value: float) -> str:
    return f"{100 * value:+z.1f}"


ClaimSplit = Literal["held-out", "train"]


@dataclass(frozen=True)
class EqualSamples:
    """Accuracies of two trials after the same number of images, one for each seed."""

    split: ClaimSplit
    images: int
    """Images that either had seen when the accuracy was taken: the most that every run reached."""
    reference: tuple[float, ...]
    other: tuple[float, ...]


def equal_samples(reference: Sequence[Run], other: Sequence[Run]) -> EqualSamples | None:
    """Held-out accuracy where all these runs have it, else training accuracy; None where neither is known.

    Between two epochs, accuracy is linear in the images seen.
    """
    splits: tuple[ClaimSplit, ...] = ("held-out", "train")
    for split in splits:
        courses = [[_course(run, split) for run in runs] for runs in (reference, other)]
        ends = [course[-1][0] for side in courses for course in side if course]
        if not all(courses) or len(ends) < len(reference) + len(other):
            continue
        images = min(ends)
        values = [[linear_between(course, images) for course in side] for side in courses]
        known = [tuple(value for value in side if value is not None) for side in values]
        if all(len(some) == len(side) for some, side in zip(known, values, strict=True)):
            return EqualSamples(split, images, _of_seeds(reference, known[0]), _of_seeds(other, known[1]))
    return None


def _of_seeds(runs: Sequence[Run], accuracies: Sequence[float]) -> tuple[float, ...]:
    """Mean accuracy of each seed. An import does not tell its seeds: each of its runs is taken to have its own."""
    of_seed: dict[int | str, list[float]] = {}
    for index, (run, accuracy) in enumerate(zip(runs, accuracies, strict=True)):
        seed = seed_of(run) if run.header.imported is None else f"run {index}"
        of_seed.setdefault(seed, []).append(accuracy)
    return tuple(math.fsum(same) / len(same) for same in of_seed.values())


def _course(run: Run, split: ClaimSplit) -> list[tuple[int, float]]:
    """(Images seen so far, accuracy) after each epoch, up to the first epoch without one."""
    lines = {line.epoch: line for rank in sorted(run.ranks, key=lambda r: r.rank, reverse=True) for line in rank.epochs}
    accuracies: list[tuple[int, float]] = []
    images = 0
    while (line := lines.get(len(accuracies))) is not None:
        value = line.held_out_accuracy if split == "held-out" else line.train_accuracy
        if value is None or not math.isfinite(value) or not 0 <= value <= 1 or not line.images:
            break
        images += line.images
        accuracies.append((images, value))
    return accuracies
