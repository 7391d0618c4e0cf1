"""One host against several: which trials may be compared, the test of all GPU counts in words, and their chart.

A series is the GPU counts at which one workload was measured. A workload that was measured both in one host and over
several hosts has two series, which are compared at each GPU count that both have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vitscale.analysis import TrialResult
from vitscale.analysis.claims import CountRatio, HostsTest, hosts_test
from vitscale.pages.charts.axes import (
    DASHED,
    IDEAL_COLOUR,
    ChartRow,
    ChartSpec,
    Plot,
    colour_encoding,
    cut_bars,
    quantity,
)
from vitscale.pages.charts.scaling import point_row
from vitscale.pages.like.curves import bars_note, curves_view, times_view
from vitscale.pages.like.selection import Selection
from vitscale.pages.like.series import FigureSeries, PublishedPoints, distinct_series_names, strong_micro_series
from vitscale.pages.like.study import ClaimOutcome, MeasuredData, StudyFigure
from vitscale.present import units
from vitscale.present.data import attributes
from vitscale.present.document import ControlOption, Figure, FigureView


@dataclass(frozen=True)
class HostPair:
    """One workload that was measured in one host and over several, and the test of the two series."""

    name: str
    """The workload's name, which differs from those of the other pairs: "CIFAR-10, micro-batch 16"."""
    one_host: FigureSeries
    several_hosts: FigureSeries
    test: HostsTest


class _TestedSeries(NamedTuple):
    """The two series of a workload, and their test."""

    one_host: FigureSeries
    several_hosts: FigureSeries
    test: HostsTest


def host_pairs(series_list: Sequence[FigureSeries]) -> list[HostPair]:
    """Return each workload of strong scaling that was measured at one GPU count both in one host and over several.

    Two trials at one GPU count are compared only where they ran on like hardware.
    """
    strong = strong_micro_series(series_list)
    one_host_series = [series for series in strong if series.hosts == "one host"]
    several_hosts_series = [series for series in strong if series.hosts != "one host"]
    tested: list[_TestedSeries] = []
    for one_host in one_host_series:
        for several_hosts in several_hosts_series:
            if several_hosts.workload_key != one_host.workload_key:
                continue
            test = _test_at_common_counts(one_host, several_hosts)
            if test is not None:
                tested.append(_TestedSeries(one_host, several_hosts, test))
    workload_names = distinct_series_names([pair.one_host for pair in tested])
    return [HostPair(name, *pair) for name, pair in zip(workload_names, tested, strict=True)]


def _test_at_common_counts(one_host: FigureSeries, several_hosts: FigureSeries) -> HostsTest | None:
    """Return the test of a workload at all GPU counts that may be compared; None where no count may be."""
    one_host_trials = _comparable_trials(one_host)
    several_hosts_trials = _comparable_trials(several_hosts)
    common_counts = [gpus for gpus in one_host_trials if gpus in several_hosts_trials]
    compared_counts = [
        gpus for gpus in common_counts if _may_be_compared(one_host_trials[gpus], several_hosts_trials[gpus])
    ]
    return hosts_test(
        {gpus: one_host_trials[gpus].comparable_costs for gpus in compared_counts},
        {gpus: several_hosts_trials[gpus].comparable_costs for gpus in compared_counts},
    )


def _may_be_compared(one_host_trial: TrialResult, several_hosts_trial: TrialResult) -> bool:
    """Whether two trials at one GPU count ran on like hardware.

    A series over several hosts may begin with a trial in one host, of a single GPU for instance; that one is not
    compared.
    """
    is_over_several = several_hosts_trial.trial.world.nodes > 1
    return is_over_several and not one_host_trial.reasons_not_to_compare(several_hosts_trial)


def _comparable_trials(series: FigureSeries) -> dict[int, TrialResult]:
    """Return GPU count -> its trial, for the trials that have epoch times or rates which may be compared."""
    return {member.gpus: member.trial for member in series.members if member.trial.comparable_costs}


def hosts_claim(measured: MeasuredData) -> ClaimOutcome:
    """Return the tests of all workloads that were measured both ways, in sentences and as data."""
    pairs = host_pairs(measured.series)
    sentences = tuple(f"{pair.name}: {hosts_sentence(pair.test)}" for pair in pairs)
    return ClaimOutcome(sentences, {"hosts": [_pair_fields(pair) for pair in pairs]})


def hosts_sentence(test: HostsTest) -> str:
    """Return a sentence on the ratio of epoch times over several hosts to those in one, and the test's verdict."""
    counts = units.counted(len(test.counts), "GPU count")
    ratio = test.ratio
    head = f"over several hosts an epoch takes {_signed_percent(ratio.value - 1)} against one host ({counts}"
    if ratio.low is None or ratio.high is None:
        return f"{head}, one run on a side): too few to tell; one ratio has no interval."
    bounds = f"95 % interval {_signed_percent(ratio.low - 1)} to {_signed_percent(ratio.high - 1)}"
    scatter = ""
    if test.scatter is not None:
        scatter = f"; from count to count it scatters by {100 * test.scatter:.1f} %"
    return f"{head}; {bounds}{scatter}): {_verdict_in_words(test)}."


def _verdict_in_words(test: HostsTest) -> str:
    """Return the verdict of the test of all GPU counts as the end of a sentence."""
    margin = f"{100 * test.margin:.0f} %"
    p_value = _p_value(test)
    limit = f"a difference of {100 * (test.cannot_exclude or 0.0):.1f} % cannot be excluded"
    return {
        "too few to tell": f"too few to tell; {limit}",
        "equivalent": f"no difference shown, and one beyond {margin} is excluded{p_value}; {limit}",
        "no difference shown": f"no difference shown, which is not that there is none: {limit}",
        "different": f"there is a difference; one beyond {margin} is not excluded",
        "different, but within the margin": f"there is a difference, and it is within {margin}{p_value}",
    }[test.verdict]


def hosts_figure(figure: StudyFigure, selection: Selection, published: PublishedPoints) -> Figure | str:
    """Return the ratio of epoch times by GPU count, and both epoch times.

    Where no workload was measured both ways, return a sentence that says so.
    """
    pairs = host_pairs(selection.series)
    if not pairs:
        return "No workload of these results was measured at one GPU count both in one host and over several."
    series: list[FigureSeries] = []
    labels: list[str] = []
    for pair in pairs:
        workload = f"{pair.name}, " if len(pairs) > 1 else ""
        several_label = "one GPU in each host" if pair.several_hosts.hosts == "one GPU a host" else "several hosts"
        series += [pair.one_host, pair.several_hosts]
        labels += [f"{workload}all GPUs in one host", f"{workload}{several_label}"]
    views = [_ratio_view(pairs, selection.notes)]
    times = times_view(figure, Selection(tuple(series), selection.notes), labels, published)
    if times is not None:
        views.append(times)
    series_names = dict.fromkeys([*(pair.name for pair in pairs), *labels])
    return Figure(figure.name, figure.heading, tuple(views), tuple(series_names))


def _ratio_view(pairs: Sequence[HostPair], departures: Sequence[str]) -> FigureView:
    """Draw epoch times over several hosts as a multiple of those in one, their means, and the margin of the test.

    `departures`: notes on how the selected series differ from the study's.
    """
    margin = pairs[0].test.margin
    rows: list[ChartRow] = []
    for pair in pairs:
        rows += _ratio_rows(pair)
    means = [{"series": pair.name, **attributes(pair.test.ratio, "value", "low", "high")} for pair in pairs]
    drawn_range = _drawn_range(_levels([*rows, *means]), margin)
    cut_bars(rows, drawn_range.lowest, drawn_range.highest)
    domain = {"domain": list(drawn_range), "nice": False, "clamp": True, "zero": False}
    y = quantity("value", "several hosts / one host", scale=domain, axis={"format": ".2f", "tickCount": 6})
    plot = Plot({"rows": rows, "means": means, "lines": _reference_lines(margin)})
    _add_means_and_lines(plot, y, domain, [pair.name for pair in pairs])
    notes = [
        *departures,
        f"line and band: mean over GPU counts and its 95 % interval; dashed: +/- {100 * margin:.0f} %",
        bars_note(rows),
    ]
    sentences = [f"{pair.name}: {hosts_sentence(pair.test)}" for pair in pairs]
    choice = {"measure": ControlOption("ratio", "several hosts against one")}
    return curves_view(choice, plot, "", notes, y=y, less_is_better=True, joined=False, further_sentences=sentences)


class _RatioRange(NamedTuple):
    """The ends of the axis of ratios."""

    lowest: float
    highest: float


def _drawn_range(levels: Sequence[float], margin: float) -> _RatioRange:
    """Return the range of ratios to draw: all levels and the margin, but no more than from 0.68 to 1.42.

    The interval of two runs can be so wide that the points would shrink to a line.
    """
    lowest = max(0.7, min(*levels, 1 / (1 + margin)))
    highest = min(1.4, max(*levels, 1 + margin))
    return _RatioRange(lowest - 0.02, highest + 0.02)


def _reference_lines(margin: float) -> list[ChartRow]:
    """Return a row for the line of equal times, and one for each end of the margin."""
    return [
        {"value": 1.0, "equal": True},
        {"value": 1 / (1 + margin), "equal": False},
        {"value": 1 + margin, "equal": False},
    ]


def _add_means_and_lines(plot: Plot, y: ChartSpec, domain: ChartSpec, series: Sequence[str]) -> None:
    """Add the means over GPU counts with their bands, and the reference lines, below the points."""
    colour = colour_encoding(series)
    band = {"type": "rect", "opacity": 0.13}
    low_end = quantity("low", scale=domain)
    plot.add("means", band, "datum.low != null", color=colour, y=low_end, y2={"field": "high"})
    rule = {"type": "rule", "color": IDEAL_COLOUR}
    plot.add("lines", rule, "datum.equal", y=y)
    plot.add("lines", rule | {"strokeDash": DASHED}, "!datum.equal", y=y)
    plot.add("means", {"type": "rule", "strokeWidth": 1.6}, y=y, color=colour)


def _levels(rows: Sequence[ChartRow]) -> list[float]:
    """Return the values of rows and the ends of their intervals, where they are known."""
    levels = []
    for row in rows:
        levels += [row[key] for key in ("value", "low", "high") if row[key] is not None]
    return levels


def _ratio_rows(pair: HostPair) -> list[ChartRow]:
    """Return a row with the ratio of epoch times at each GPU count that was tested, and both epoch times in words."""
    one_host_trials = {member.gpus: member.trial for member in pair.one_host.members}
    several_hosts_trials = {member.gpus: member.trial for member in pair.several_hosts.members}
    rows = []
    for count in pair.test.counts:
        epoch_times = _epoch_times_in_words(several_hosts_trials[count.gpus], one_host_trials[count.gpus])
        rows.append(_ratio_row(pair.name, count, epoch_times))
    return rows


def _ratio_row(series: str, count: CountRatio, epoch_times: str) -> ChartRow:
    """Return the chart's row with the ratio of epoch times at one GPU count.

    Its `bounds`, which a page shows beside the ratio, ends with the epoch times where these are known, as in
    "0.98 to 1.05 (4.1 s against 4 s)" or, where the runs are too few for an interval, "2 runs (4.1 s against 4 s)".
    """
    fewer_runs = min(count.one_host_runs, count.several_hosts_runs)
    ratio_fields = point_row(count.ratio, _three_decimals, fewer_runs)
    if epoch_times:
        ratio_fields["bounds"] = f"{ratio_fields['bounds']} ({epoch_times})"
    return {"series": series, "x": count.gpus, **ratio_fields}


def _epoch_times_in_words(several_hosts_trial: TrialResult, one_host_trial: TrialResult) -> str:
    """Return "4.1 s against 4 s", those over several hosts first; only one time or none where they are unknown."""
    seconds = (several_hosts_trial.epoch_seconds, one_host_trial.epoch_seconds)
    return " against ".join(units.seconds(estimate.value) for estimate in seconds if estimate)


def _three_decimals(value: float | None) -> str:
    return f"{value:.3f}"


def _pair_fields(pair: HostPair) -> dict[str, Any]:
    """Return the JSON object of one workload, with its sentence."""
    test = pair.test
    return {
        "workload": pair.name,
        "ratio": test.ratio.value,
        **attributes(test.ratio, "low", "high"),
        **attributes(test, "scatter", "margin", "p_equivalence", "cannot_exclude", "verdict"),
        "counts": [
            {
                "gpus": count.gpus,
                "ratio": count.ratio.value,
                **attributes(count.ratio, "low", "high"),
                "runs": [count.one_host_runs, count.several_hosts_runs],
            }
            for count in test.counts
        ],
        "text": hosts_sentence(test),
    }


def _signed_percent(value: float) -> str:
    """Return "+1.1 %" for 0.011; from 100 on in powers of ten: "+1.20e+04 %"."""
    return f"{100 * value:+z.1f} %" if abs(value) < 100 else f"{100 * value:+.2e} %"


def _p_value(test: HostsTest) -> str:
    """Return " (p = 0.002)" of the test of equivalence; "" where it was not tested."""
    if test.p_equivalence is None:
        return ""
    return f" (p = {test.p_equivalence:.3f})" if test.p_equivalence >= 0.001 else " (p = below 0.001)"
