"""Accuracies after equally many images, compared between GPU counts, tested, and put into words."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, Literal, NamedTuple

from vitscale.analysis import TrialResult
from vitscale.analysis.claims import AccuracyDifference, AccuracyVerdict, accuracy_difference
from vitscale.analysis.learning.convergence import linear_between, seed_of
from vitscale.analysis.statistics import NOT_AMONG_ALL, corrected
from vitscale.pages.like.curves import gpus_text
from vitscale.pages.like.series import FigureSeries, Member, apart_in_micro_batch, names
from vitscale.pages.like.study import ClaimOutcome, Material
from vitscale.present.data import attributes
from vitscale.store.records import EpochLine
from vitscale.store.results import Run

_COMPARED_COUNTS = (4, 8)
"""GPU counts whose accuracy the study compares with one GPU's."""
_BEYOND_COUNTING: AccuracyVerdict = "too few runs: beyond counting error"


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


class AccuracyTests(NamedTuple):
    """All tests of accuracy."""

    against_fewest: list[AccuracyTest]
    """Strong scaling against the fewest GPUs."""
    at_equal_batch: list[AccuracyTest]
    """More GPUs against fewer at one global batch."""


def accuracy_claim(material: Material) -> ClaimOutcome:
    """Test N GPUs against the fewest at a fixed micro-batch, and more against fewer at one global batch."""
    tests = accuracy_tests(material.series)
    entries = {
        "accuracy": [_entry(test) for test in tests.against_fewest],
        "accuracy_at_equal_batch": [_entry(test) for test in tests.at_equal_batch],
    }
    return ClaimOutcome(tuple(_sentences(tests)), entries)


def accuracy_tests(series: Sequence[FigureSeries]) -> AccuracyTests:
    """Test strong scaling against the fewest GPUs, and at one global batch; Holm's correction is for all tests."""
    against_fewest = _once(_against_fewest(series))
    at_equal_batch = _once(_at_equal_batch(series))
    tests = [*against_fewest, *at_equal_batch]
    results = corrected([test.result for test in tests], [test.trials for test in tests])
    tests = [replace(test, result=result) for test, result in zip(tests, results, strict=True)]
    return AccuracyTests(tests[: len(against_fewest)], tests[len(against_fewest) :])


def _once(tests: Sequence[AccuracyTest | None]) -> list[AccuracyTest]:
    """The tests that could be made, each pair of trials once: a curve that goes on over several hosts is two series,
    which share what was measured in one."""
    test_by_pair: dict[tuple[str, str], AccuracyTest] = {}
    for test in tests:
        if test is not None:
            test_by_pair.setdefault(test.trials, test)
    return list(test_by_pair.values())


def _against_fewest(series: Sequence[FigureSeries]) -> list[AccuracyTest | None]:
    """Test for each strong series 4 and 8 GPUs, or the most there are, against the fewest."""
    strong = [curve for curve in series if curve.mode == "strong-micro" and len(curve.members) > 1]
    tests = []
    for curve, name in zip(strong, names(strong), strict=True):
        base, *larger = curve.members
        compared = [member for member in larger if member.gpus in _COMPARED_COUNTS] or larger[-1:]
        tests += [_test(name, base, member) for member in compared]
    return tests


def _at_equal_batch(series: Sequence[FigureSeries]) -> list[AccuracyTest | None]:
    """Test strong series that differ only in micro-batch: more GPUs against fewer, where the global batch is equal."""
    strong = [curve for curve in series if curve.mode == "strong-micro"]
    tests = []
    for name, curves in apart_in_micro_batch(strong):
        for curve, other in combinations(curves, 2):
            for pair in product(curve.members, other.members):
                fewer, more = sorted(pair, key=lambda member: member.gpus)
                if fewer.trial.trial.global_batch == more.trial.trial.global_batch:
                    tests.append(_test(name, fewer, more))
    return tests


def _test(name: str, base: Member, member: Member) -> AccuracyTest | None:
    """Test one pair; None where an accuracy is not known."""
    samples = equal_samples(base.trial.recorded_runs, member.trial.recorded_runs)
    if samples is None:
        return None
    base_images = _counted_images(base.trial, samples)
    images = _counted_images(member.trial, samples)
    counted = (base_images, images) if base_images is not None and images is not None else None
    return AccuracyTest(
        name=name,
        gpus=member.gpus,
        base_gpus=base.gpus,
        batches=(base.trial.trial.global_batch, member.trial.trial.global_batch),
        trials=(base.trial.trial_id, member.trial.trial_id),
        samples=samples,
        result=accuracy_difference(samples.reference, samples.other, counted),
    )


def _counted_images(trial: TrialResult, samples: EqualSamples) -> int | None:
    """Number of images from which one run's accuracy was counted; None where that is not recorded.

    Training accuracy in a log of others is taken to be rank 0's own, from its share of the images.
    """
    run = trial.recorded_runs[0]
    if samples.split == "held-out":
        model = next((rank.model for rank in run.ranks if rank.model is not None), None)
        return None if model is None else model.held_out_samples or None
    first_epochs = [rank.epochs[0] for rank in run.ranks if rank.epochs]
    if not first_epochs or not first_epochs[0].images:
        return None
    images = first_epochs[0].images
    if run.header.imported is None:
        return images
    return images // run.header.trial.world.size or None


def _sentences(tests: AccuracyTests) -> list[str]:
    """A sentence on all tests, one for each series, and one for each at one global batch; none without a test."""
    if not tests.against_fewest:
        return []
    tests_by_name: dict[str, list[AccuracyTest]] = {}
    for test in tests.against_fewest:
        tests_by_name.setdefault(test.name, []).append(test)
    all_tests = [*tests.against_fewest, *tests.at_equal_batch]
    tested_pairs = {test.trials for test in all_tests if test.result.p is not None}
    return [
        _overall(tests.against_fewest, corrected_for=len(tested_pairs)),
        *(_series_sentence(name, of_name) for name, of_name in tests_by_name.items()),
        *(_equal_batch_sentence(test) for test in tests.at_equal_batch),
    ]


def _series_sentence(name: str, tests: Sequence[AccuracyTest]) -> str:
    """The tests of one series, all against the same base."""
    first = tests[0]
    kind = "held-out" if first.samples.split == "held-out" else "training"
    base = f"{gpus_text(first.base_gpus)} (global batch {first.batches[0]:,})"
    differences = "; ".join(accuracy_words(test) for test in tests)
    sentence = f"{name}: {kind} accuracy against {base} after {first.samples.images:,} images each: {differences}."
    if any(test.result.difference.low is None for test in tests):
        sentence += " With one seed on a side, how far another would move it is not known."
    return sentence


def _equal_batch_sentence(test: AccuracyTest) -> str:
    return (
        f"{test.name}, one global batch of {test.batches[0]:,}: {accuracy_words(test)}, against "
        f"{gpus_text(test.base_gpus)} after {test.samples.images:,} images each."
    )


def accuracy_words(test: AccuracyTest) -> str:
    """Put a difference of accuracy into words: its size, its interval or why there is none, what to make of it."""
    result = test.result
    difference = result.difference
    head = f"{_points(difference.value)} points at {gpus_text(test.gpus)} (global batch {test.batches[1]:,}"
    if difference.low is not None and difference.high is not None:
        bounds = f"95 % interval {_points(difference.low)} to {_points(difference.high)})"
        return f"{head}; {bounds}, {_verdict_in_words(result)}"
    if result.counting_error is None:
        return f"{head}; counted from an unknown number of images), too few seeds to tell"
    beyond = "more" if result.verdict == _BEYOND_COUNTING else "no more"
    counting = f"{beyond} than counting errors explain (+/- {100 * result.counting_error:.1f})"
    return f"{head}), {counting}; too few seeds to tell"


def _verdict_in_words(result: AccuracyDifference) -> str:
    """What to make of a difference that has an interval."""
    if result.verdict.startswith("too few runs"):
        return "too few seeds to tell"
    if result.verdict == NOT_AMONG_ALL:
        return f"no difference shown among all comparisons (p = {result.p_adjusted:.2g} for all)"
    if result.verdict == "no difference shown":
        low, high = result.difference.ends
        largest = 100 * max(abs(low), abs(high))
        return f"no difference shown: one of {largest:.1f} points cannot be excluded"
    return result.verdict


def _overall(tests: Sequence[AccuracyTest], corrected_for: int) -> str:
    """All tests in one sentence. `corrected_for`: number of pairs of trials that were tested."""
    verdicts = [test.result.verdict for test in tests]
    lower = verdicts.count("lower")
    higher = verdicts.count("higher")
    too_few = sum(verdict.startswith("too few runs") for verdict in verdicts)
    beyond_counting = verdicts.count(_BEYOND_COUNTING)
    not_shown = len(tests) - lower - higher - too_few
    counts = f"lower in {lower}, higher in {higher}, no difference shown in {not_shown}"
    if too_few:
        counts += f", too few seeds to tell in {too_few}"
    if beyond_counting:
        counts += f" (of which {beyond_counting} differ by more than counting errors explain)"
    if corrected_for > 1:
        counts += f" (after Holm's correction for {corrected_for} pairs)"
    if lower or higher:
        meaning = "equal accuracy is not what these runs show"
    elif too_few == len(tests):
        meaning = "whether accuracy is equal takes runs of 3 seeds or more on each side"
    else:
        meaning = "no difference is shown, which is not that there is none"
    plural = "s" if len(tests) != 1 else ""
    return f"Accuracy in {len(tests)} comparison{plural} with fewer GPUs after equal images: {counts}; {meaning}."


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


class _CoursePoint(NamedTuple):
    """The accuracy of a run after some of its epochs."""

    images: int
    """Images seen so far."""
    accuracy: float


def equal_samples(reference: Sequence[Run], other: Sequence[Run]) -> EqualSamples | None:
    """Held-out accuracy where all these runs have it, else training accuracy; None where neither is known.

    Between two epochs, accuracy is linear in the images seen.
    """
    splits: tuple[ClaimSplit, ...] = ("held-out", "train")
    for split in splits:
        samples = _samples_of_split(reference, other, split)
        if samples is not None:
            return samples
    return None


def _samples_of_split(reference: Sequence[Run], other: Sequence[Run], split: ClaimSplit) -> EqualSamples | None:
    """Accuracies after the most images that every run reached; None where a side has no run, or a run no accuracy."""
    reference_courses = [_course(run, split) for run in reference]
    other_courses = [_course(run, split) for run in other]
    if not reference_courses or not other_courses or not all([*reference_courses, *other_courses]):
        return None
    images = min(course[-1].images for course in (*reference_courses, *other_courses))
    reference_accuracies = _accuracies_at(images, reference_courses)
    other_accuracies = _accuracies_at(images, other_courses)
    if reference_accuracies is None or other_accuracies is None:
        return None
    return EqualSamples(
        split, images, _seed_means(reference, reference_accuracies), _seed_means(other, other_accuracies)
    )


def _accuracies_at(images: int, courses: Sequence[Sequence[_CoursePoint]]) -> list[float] | None:
    """The accuracy of each run after some images; None where one is unknown."""
    accuracies = []
    for course in courses:
        accuracy = linear_between(course, images)
        if accuracy is None:
            return None
        accuracies.append(accuracy)
    return accuracies


def _seed_means(runs: Sequence[Run], accuracies: Sequence[float]) -> tuple[float, ...]:
    """Mean accuracy of each seed. An import does not tell its seeds: each of its runs is taken to have its own."""
    accuracies_by_seed: dict[int | str, list[float]] = {}
    for index, (run, accuracy) in enumerate(zip(runs, accuracies, strict=True)):
        seed = seed_of(run) if run.header.imported is None else f"run {index}"
        accuracies_by_seed.setdefault(seed, []).append(accuracy)
    return tuple(math.fsum(of_seed) / len(of_seed) for of_seed in accuracies_by_seed.values())


def _course(run: Run, split: ClaimSplit) -> list[_CoursePoint]:
    """The accuracy after each epoch, up to the first epoch without one; an epoch is as the lowest rank recorded it."""
    lines: dict[int, EpochLine] = {}
    for rank in sorted(run.ranks, key=lambda rank: rank.rank, reverse=True):
        lines |= {line.epoch: line for line in rank.epochs}
    course: list[_CoursePoint] = []
    images = 0
    for epoch in itertools.count():
        line = lines.get(epoch)
        if line is None or not line.images:
            return course
        accuracy = line.held_out_accuracy if split == "held-out" else line.train_accuracy
        if accuracy is None or not 0 <= accuracy <= 1:
            return course
        images += line.images
        course.append(_CoursePoint(images, accuracy))
    return course
