"""Accuracies after equally many images, compared between GPU counts, tested, and put into words.

A series is one curve of the results. Its members are the GPU counts that were measured, each with the runs of its
trial; the base is the member that another is compared with.
"""

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
from vitscale.pages.like.series import (
    FigureSeries,
    Member,
    distinct_series_names,
    sets_differing_in_micro_batch,
    strong_micro_series,
)
from vitscale.pages.like.study import ClaimOutcome, MeasuredData
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


def accuracy_claim(measured: MeasuredData) -> ClaimOutcome:
    """Return the tests of accuracy in sentences and as data: at a fixed micro-batch, and at one global batch."""
    tests = accuracy_tests(measured.series)
    entries = {
        "accuracy": [_test_fields(test) for test in tests.against_fewest],
        "accuracy_at_equal_batch": [_test_fields(test) for test in tests.at_equal_batch],
    }
    return ClaimOutcome(tuple(_claim_sentences(tests)), entries)


def accuracy_tests(series_list: Sequence[FigureSeries]) -> AccuracyTests:
    """Return all tests of accuracy, with Holm's correction for all of them together."""
    against_fewest = _without_repeated_pairs(_tests_against_fewest_gpus(series_list))
    at_equal_batch = _without_repeated_pairs(_tests_at_equal_batch(series_list))
    uncorrected = [*against_fewest, *at_equal_batch]
    results = corrected([test.result for test in uncorrected], [test.trials for test in uncorrected])
    tests = [replace(test, result=result) for test, result in zip(uncorrected, results, strict=True)]
    first_at_equal_batch = len(against_fewest)
    return AccuracyTests(tests[:first_at_equal_batch], tests[first_at_equal_batch:])


def _without_repeated_pairs(tests: Sequence[AccuracyTest]) -> list[AccuracyTest]:
    """Return the first test of each pair of trials.

    Pairs repeat because a curve that goes on over several hosts is two series, which share the trials of one host.
    """
    test_by_pair: dict[tuple[str, str], AccuracyTest] = {}
    for test in tests:
        test_by_pair.setdefault(test.trials, test)
    return list(test_by_pair.values())


def _tests_against_fewest_gpus(series_list: Sequence[FigureSeries]) -> list[AccuracyTest]:
    """Return the tests of each strong-scaling series against its fewest GPUs.

    4 and 8 GPUs are tested; in a series that has neither, its largest GPU count.
    """
    strong = [series for series in strong_micro_series(series_list) if len(series.members) > 1]
    tests = []
    for series, name in zip(strong, distinct_series_names(strong), strict=True):
        base, *larger = series.members
        largest = larger[-1]
        compared = [member for member in larger if member.gpus in _COMPARED_COUNTS] or [largest]
        for member in compared:
            test = _accuracy_test(name, base, member)
            if test is not None:
                tests.append(test)
    return tests


def _tests_at_equal_batch(series_list: Sequence[FigureSeries]) -> list[AccuracyTest]:
    """Return tests of more GPUs against fewer GPUs at the same global batch.

    The global batch is GPUs x micro-batch, so that the two are members of series that differ in micro-batch, and in
    nothing else: 4 GPUs with micro-batch 16 and 2 GPUs with micro-batch 32 both have a global batch of 64.
    """
    tests = []
    for set_name, series_set in sets_differing_in_micro_batch(strong_micro_series(series_list)):
        for first_series, second_series in combinations(series_set, 2):
            for first, second in product(first_series.members, second_series.members):
                test = _test_at_equal_batch(set_name, first, second)
                if test is not None:
                    tests.append(test)
    return tests


def _test_at_equal_batch(name: str, first: Member, second: Member) -> AccuracyTest | None:
    """Return the test of the member on more GPUs against that on fewer, which is the base.

    Return None where their global batches differ, or an accuracy is not known.
    """
    if first.trial.trial.global_batch != second.trial.trial.global_batch:
        return None
    fewer_gpus, more_gpus = sorted((first, second), key=lambda member: member.gpus)
    return _accuracy_test(name, base=fewer_gpus, member=more_gpus)


def _accuracy_test(name: str, base: Member, member: Member) -> AccuracyTest | None:
    """Return the test of a member against the base; None where an accuracy of one of them is not known."""
    samples = equal_samples(base.trial.recorded_runs, member.trial.recorded_runs)
    if samples is None:
        return None
    base_images = _counted_images(base.trial, samples)
    images = _counted_images(member.trial, samples)
    images_counted = None
    if base_images is not None and images is not None:
        images_counted = (base_images, images)
    return AccuracyTest(
        name=name,
        gpus=member.gpus,
        base_gpus=base.gpus,
        batches=(base.trial.trial.global_batch, member.trial.trial.global_batch),
        trials=(base.trial.trial_id, member.trial.trial_id),
        samples=samples,
        result=accuracy_difference(samples.reference, samples.other, images_counted),
    )


def _counted_images(trial: TrialResult, samples: EqualSamples) -> int | None:
    """Return the number of images from which a run counted its accuracy; None where that is not recorded.

    An imported training accuracy is taken to be that of rank 0 alone, which counted its share of the images.
    """
    run = trial.recorded_runs[0]
    images = _held_out_images(run) if samples.split == "held-out" else _training_images(run)
    return images or None


def _held_out_images(run: Run) -> int:
    """Return the number of held-out images; 0 where no rank has recorded it."""
    for rank in run.ranks:
        if rank.model is not None:
            return rank.model.held_out_samples or 0
    return 0


def _training_images(run: Run) -> int:
    """Return the number of images of an epoch from which a training accuracy was counted; 0 where it is unknown."""
    first_epochs = [rank.epochs[0] for rank in run.ranks if rank.epochs]
    if not first_epochs:
        return 0
    images = first_epochs[0].images or 0
    is_of_rank_0_alone = run.header.imported is not None
    return images // run.header.trial.world.size if is_of_rank_0_alone else images


def _claim_sentences(tests: AccuracyTests) -> list[str]:
    """Return a sentence on all tests, one on each series, and one on each test at one global batch.

    Return no sentence where no series was tested against its fewest GPUs.
    """
    if not tests.against_fewest:
        return []
    tests_by_name: dict[str, list[AccuracyTest]] = {}
    for test in tests.against_fewest:
        tests_by_name.setdefault(test.name, []).append(test)
    all_tests = [*tests.against_fewest, *tests.at_equal_batch]
    tested_pairs = {test.trials for test in all_tests if test.result.p is not None}
    return [
        _overall_sentence(tests.against_fewest, corrected_for=len(tested_pairs)),
        *(_series_sentence(name, series_tests) for name, series_tests in tests_by_name.items()),
        *(_equal_batch_sentence(test) for test in tests.at_equal_batch),
    ]


def _series_sentence(name: str, tests: Sequence[AccuracyTest]) -> str:
    """Return the sentence on the tests of one series, which all have the same base."""
    first = tests[0]
    split_name = "held-out" if first.samples.split == "held-out" else "training"
    base = f"{gpus_text(first.base_gpus)} (global batch {first.batches[0]:,})"
    differences = "; ".join(accuracy_words(test) for test in tests)
    sentence = (
        f"{name}: {split_name} accuracy against {base} after {first.samples.images:,} images each: {differences}."
    )
    if any(test.result.difference.low is None for test in tests):
        sentence += " With one seed on a side, how far another would move it is not known."
    return sentence


def _equal_batch_sentence(test: AccuracyTest) -> str:
    """Return the sentence on a test at one global batch."""
    return (
        f"{test.name}, one global batch of {test.batches[0]:,}: {accuracy_words(test)}, against "
        f"{gpus_text(test.base_gpus)} after {test.samples.images:,} images each."
    )


def accuracy_words(test: AccuracyTest) -> str:
    """Return a clause on a difference of accuracy: its size, its interval or why it has none, and its verdict.

    Example: "-1.2 points at 4 GPUs (global batch 256; 95 % interval -1.9 to -0.5), lower".
    """
    result = test.result
    difference = result.difference
    head = f"{_percentage_points(difference.value)} points at {gpus_text(test.gpus)} (global batch {test.batches[1]:,}"
    if difference.low is not None and difference.high is not None:
        bounds = f"95 % interval {_percentage_points(difference.low)} to {_percentage_points(difference.high)})"
        return f"{head}; {bounds}, {_verdict_in_words(result)}"
    if result.counting_error is None:
        return f"{head}; counted from an unknown number of images), too few seeds to tell"
    beyond = "more" if result.verdict == _BEYOND_COUNTING else "no more"
    counting = f"{beyond} than counting errors explain (+/- {100 * result.counting_error:.1f})"
    return f"{head}), {counting}; too few seeds to tell"


def _verdict_in_words(result: AccuracyDifference) -> str:
    """Return the verdict on a difference that has an interval."""
    if result.verdict.startswith("too few runs"):
        return "too few seeds to tell"
    if result.verdict == NOT_AMONG_ALL:
        return f"no difference shown among all comparisons (p = {result.p_adjusted:.2g} for all)"
    if result.verdict == "no difference shown":
        low, high = result.difference.ends
        largest = 100 * max(abs(low), abs(high))
        return f"no difference shown: one of {largest:.1f} points cannot be excluded"
    return result.verdict


def _overall_sentence(tests: Sequence[AccuracyTest], corrected_for: int) -> str:
    """Return one sentence on all tests. `corrected_for`: number of pairs of trials in Holm's correction."""
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


def _test_fields(test: AccuracyTest) -> dict[str, Any]:
    """Return the JSON object of one test, with its clause."""
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


def _percentage_points(value: float) -> str:
    """Return "+1.2" for 0.012: percentage points."""
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


class _AccuracyPoint(NamedTuple):
    """The accuracy of a run after one of its epochs."""

    images: int
    """Images seen until then, those of all earlier epochs included."""
    accuracy: float


def equal_samples(reference: Sequence[Run], other: Sequence[Run]) -> EqualSamples | None:
    """Return the accuracies of two trials after equally many images.

    They are held-out accuracies where all of these runs have one, else training accuracies; None where neither is
    known of all runs. Between two epochs accuracy is taken as linear in the images seen.
    """
    splits: tuple[ClaimSplit, ...] = ("held-out", "train")
    for split in splits:
        samples = _samples_of_split(reference, other, split)
        if samples is not None:
            return samples
    return None


def _samples_of_split(reference: Sequence[Run], other: Sequence[Run], split: ClaimSplit) -> EqualSamples | None:
    """Return the accuracies on one split after the most images that every run reached.

    Return None where a side has no run, or a run no accuracy after that many images.
    """
    if not reference or not other:
        return None
    reference_curves = [_accuracy_by_images(run, split) for run in reference]
    other_curves = [_accuracy_by_images(run, split) for run in other]
    curves = [*reference_curves, *other_curves]
    if not all(curves):
        return None
    common_images = min(curve[-1].images for curve in curves)
    reference_accuracies = _accuracies_after(common_images, reference_curves)
    other_accuracies = _accuracies_after(common_images, other_curves)
    if reference_accuracies is None or other_accuracies is None:
        return None
    return EqualSamples(
        split=split,
        images=common_images,
        reference=_means_by_seed(reference, reference_accuracies),
        other=_means_by_seed(other, other_accuracies),
    )


def _accuracies_after(images: int, curves: Sequence[Sequence[_AccuracyPoint]]) -> list[float] | None:
    """Return the accuracy on each curve after so many images; None where one is unknown."""
    accuracies = []
    for curve in curves:
        accuracy = linear_between(curve, images)
        if accuracy is None:
            return None
        accuracies.append(accuracy)
    return accuracies


def _means_by_seed(runs: Sequence[Run], accuracies: Sequence[float]) -> tuple[float, ...]:
    """Return the mean accuracy of the runs of each seed; `accuracies` has one for each run.

    Imports do not record seeds: each imported run is taken to have a seed of its own.
    """
    accuracies_by_seed: dict[int | str, list[float]] = {}
    for index, (run, accuracy) in enumerate(zip(runs, accuracies, strict=True)):
        seed = seed_of(run) if run.header.imported is None else f"run {index}"
        accuracies_by_seed.setdefault(seed, []).append(accuracy)
    return tuple(math.fsum(group) / len(group) for group in accuracies_by_seed.values())


def _accuracy_by_images(run: Run, split: ClaimSplit) -> list[_AccuracyPoint]:
    """Return a run's accuracy after each epoch, with the images seen until then.

    The points end before the first epoch that has no record, no images or no valid accuracy.

    Example: epochs of 100 images with accuracies 0.2 and 0.4 give [(100, 0.2), (200, 0.4)].
    """
    line_by_epoch = _epoch_lines(run)
    points: list[_AccuracyPoint] = []
    images_seen = 0
    for epoch in itertools.count():
        line = line_by_epoch.get(epoch)
        if line is None or not line.images:
            break
        accuracy = line.held_out_accuracy if split == "held-out" else line.train_accuracy
        if accuracy is None or not 0 <= accuracy <= 1:
            break
        images_seen += line.images
        points.append(_AccuracyPoint(images_seen, accuracy))
    return points


def _epoch_lines(run: Run) -> dict[int, EpochLine]:
    """Return epoch -> its record by the lowest rank that has one, and of several by that rank the last."""
    line_by_epoch: dict[int, EpochLine] = {}
    highest_rank_first = sorted(run.ranks, key=lambda rank: rank.rank, reverse=True)
    for rank in highest_rank_first:
        for line in rank.epochs:
            line_by_epoch[line.epoch] = line  # a lower rank replaces the line of a higher one
    return line_by_epoch
