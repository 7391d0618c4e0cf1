"""The study's two claims, tested on the results at hand, in words: what is shown, and what cannot be excluded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vitscale.analysis.claims import HostsTest
from vitscale.analysis.statistics import NOT_AMONG_ALL, corrected
from vitscale.report.like_paper.accuracy_tests import AccuracyTest, against_fewest, at_equal_batch
from vitscale.report.like_paper.host_pairs import HostPair, host_pairs
from vitscale.report.like_paper.points import gpus_text
from vitscale.report.like_paper.series import Series


@dataclass(frozen=True)
class Claims:
    """Both claims."""

    accuracy: tuple[AccuracyTest, ...]
    """N GPUs against the fewest, the micro-batch fixed: the global batch is N times as large."""
    equal_batch: tuple[AccuracyTest, ...]
    """More GPUs against fewer at one global batch: what is left is the number of GPUs itself."""
    hosts: tuple[HostPair, ...]


def claims(found: Sequence[Series]) -> Claims:
    """Tests both claims on all series of strong scaling; accuracies with Holm's correction for all of them."""
    fewest, equal = against_fewest(found), at_equal_batch(found)
    tests = [*fewest, *equal]
    results = corrected([test.result for test in tests], [test.trials for test in tests])
    tests = [replace(test, result=result) for test, result in zip(tests, results, strict=True)]
    return Claims(tuple(tests[: len(fewest)]), tuple(tests[len(fewest) :]), tuple(host_pairs(found)))


def accuracy_sentences(tested: Claims) -> list[str]:
    """All together first, then a sentence for each series, then those at one global batch; none without a test."""
    tests = tested.accuracy
    if not tests:
        return []
    by_name: dict[str, list[AccuracyTest]] = {}
    for test in tests:
        by_name.setdefault(test.name, []).append(test)
    lines = [_overall(tests, len({test.trials for test in (*tests, *tested.equal_batch) if test.result.p is not None}))]
    for name, some in by_name.items():
        first = some[0]
        kind = "held-out" if first.samples.split == "held-out" else "training"
        single = any(test.result.low is None for test in some)
        lines.append(
            f"{name}: {kind} accuracy against {gpus_text(first.base_gpus)} (global batch {first.batches[0]:,}) after "
            f"{first.samples.images:,} images each: {'; '.join(accuracy_words(test) for test in some)}"
            + (". With one run on a side, how far another seed would move it is not known." if single else ".")
        )
    for test in tested.equal_batch:
        lines.append(
            f"{test.name}, one global batch of {test.batches[0]:,}: {accuracy_words(test)}, against "
            f"{gpus_text(test.base_gpus)} after {test.samples.images:,} images each."
        )
    return lines


def accuracy_words(test: AccuracyTest) -> str:
    """One difference of accuracy: its size, its interval or why there is none, and what to make of it."""
    result = test.result
    head = f"{_points(result.difference)} points at {gpus_text(test.gpus)} (global batch {test.batches[1]:,}"
    if result.low is not None and result.high is not None:
        bounds = f"95 % interval {_points(result.low)} to {_points(result.high)})"
        if result.verdict.startswith("too few runs"):
            return f"{head}; {bounds}, too few runs to tell"
        if result.verdict == NOT_AMONG_ALL:
            return f"{head}; {bounds}, no difference shown among all comparisons (p = {result.p_adjusted:.2g} for all)"
        if result.verdict == "no difference shown":
            largest = 100 * max(abs(result.low), abs(result.high))
            return f"{head}; {bounds}, no difference shown: one of {largest:.1f} points cannot be excluded"
        return f"{head}; {bounds}, {result.verdict}"
    if result.counting_error is None:
        return f"{head}; counted from an unknown number of images), too few runs to tell"
    beyond = "more" if result.verdict == "too few runs: beyond counting error" else "no more"
    counting = f"{beyond} than counting errors explain (+/- {100 * result.counting_error:.1f})"
    return f"{head}), {counting}; too few runs to tell"


def _overall(tests: Sequence[AccuracyTest], corrected_for: int) -> str:
    """`corrected_for`: so many pairs of trials were tested."""
    told = [test.result.verdict for test in tests]
    lower, higher = told.count("lower"), told.count("higher")
    few = sum(verdict.startswith("too few runs") for verdict in told)
    compared = f"{len(tests)} comparison{'s' if len(tests) != 1 else ''} with fewer GPUs after equal images"
    counts = [f"lower in {lower}, higher in {higher}, no difference shown in {len(tests) - lower - higher - few}"]
    counts += [f"too few runs to tell in {few}"] if few else []
    beyond = told.count("too few runs: beyond counting error")
    counts[-1] += f" (of which {beyond} differ by more than counting errors explain)" if beyond else ""
    if lower + higher:
        meaning = "equal accuracy is not what these runs show"
    elif few == len(tests):
        meaning = "whether accuracy is equal takes 3 runs or more on each side"
    else:
        meaning = "no difference is shown, which is not that there is none"
    among = f" (after Holm's correction for {corrected_for} pairs)" if corrected_for > 1 else ""
    return f"Accuracy in {compared}: {', '.join(counts)}{among}; {meaning}."


def hosts_sentence(test: HostsTest) -> str:
    """What is known of one host against several."""
    counts = f"{len(test.counts)} GPU count{'s' if len(test.counts) != 1 else ''}"
    whole, margin = test.ratio, f"{100 * test.margin:.0f} %"
    head = f"over several hosts an epoch takes {_share(whole.centre - 1)} against one host ({counts}"
    if whole.low is None or whole.high is None:
        return f"{head}, one run each): too few to tell; one ratio has no interval."
    bounds = f"95 % interval {_share(whole.low - 1)} to {_share(whole.high - 1)}"
    scatter = f"; from count to count it scatters by {100 * test.scatter:.1f} %" if test.scatter is not None else ""
    limit = f"a difference of {100 * (test.cannot_exclude or 0.0):.1f} % cannot be excluded"
    verdict = {
        "too few to tell": f"too few to tell; {limit}",
        "equivalent": f"no difference shown, and one beyond {margin} is excluded (p = {_p(test)}); {limit}",
        "no difference shown": f"no difference shown, which is not that there is none: {limit}",
        "different": f"there is a difference; one beyond {margin} is not excluded",
        "different, but within the margin": f"there is a difference, and it is within {margin} (p = {_p(test)})",
    }[test.verdict]
    return f"{head}; {bounds}{scatter}): {verdict}."


def _points(value: float) -> str:
    return f"{100 * value:+.1f}"


def _share(value: float) -> str:
    return f"{100 * value:+.1f} %" if abs(value) < 100 else f"{100 * value:+.2e} %"


def _p(test: HostsTest) -> str:
    value = test.p_equivalence or 0.0
    return f"{value:.3f}" if value >= 0.001 else "below 0.001"
