"""One host against several: what may be compared, the test of all GPU counts in words, and their chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vitscale.analysis import TrialResult
from vitscale.analysis.claims import HostsTest, hosts_test
from vitscale.pages.charts.axes import DASHED, IDEAL_COLOUR, ChartRow, Plot, colour_encoding, cut_bars, quantity
from vitscale.pages.charts.scaling import point_row
from vitscale.pages.like.curves import bars_note, curves_view, times_view
from vitscale.pages.like.selection import Selection
from vitscale.pages.like.series import FigureSeries, PublishedPoints, names
from vitscale.pages.like.study import ClaimOutcome, Material, StudyFigure
from vitscale.present import units
from vitscale.present.data import attributes
from vitscale.present.document import ControlOption, Figure, FigureView


@dataclass(frozen=True)
class HostPair:
    """One workload, in one host and over several."""

    name: str
    inside: FigureSeries
    spread: FigureSeries
    test: HostsTest


def host_pairs(series: Sequence[FigureSeries]) -> list[HostPair]:
    """Every strong-scaling workload that was measured both ways, on like hardware, at a count of two GPUs or more."""
    strong = [curve for curve in series if curve.mode == "strong-micro"]
    pairs = []
    for inside in (curve for curve in strong if curve.hosts == "one host"):
        for spread in (curve for curve in strong if curve.hosts != "one host" and curve.group == inside.group):
            test = _test(inside, spread)
            if test is not None:
                pairs.append((inside, spread, test))
    labels = names([inside for inside, _, _ in pairs])
    return [HostPair(name, *pair) for name, pair in zip(labels, pairs, strict=True)]


def _test(inside: FigureSeries, spread: FigureSeries) -> HostsTest | None:
    one_host, several = _trials(inside), _trials(spread)
    both = [
        gpus
        for gpus in one_host
        if gpus in several and several[gpus].trial.world.nodes > 1 and not one_host[gpus].unlike(several[gpus])
    ]
    return hosts_test(
        {gpus: one_host[gpus].comparable_costs for gpus in both},
        {gpus: several[gpus].comparable_costs for gpus in both},
    )


def _trials(series: FigureSeries) -> dict[int, TrialResult]:
    return {member.gpus: member.trial for member in series.members if member.trial.comparable_costs}


def hosts_claim(material: Material) -> ClaimOutcome:
    """Tests every workload that was measured both ways."""
    pairs = host_pairs(material.series)
    sentences = tuple(f"{pair.name}: {hosts_sentence(pair.test)}" for pair in pairs)
    return ClaimOutcome(sentences, {"hosts": [_entry(pair) for pair in pairs]})


def hosts_sentence(test: HostsTest) -> str:
    """What is known of one host against several."""
    counts = f"{len(test.counts)} GPU count{'s' if len(test.counts) != 1 else ''}"
    whole, margin = test.ratio, f"{100 * test.margin:.0f} %"
    head = f"over several hosts an epoch takes {_share(whole.value - 1)} against one host ({counts}"
    if whole.low is None or whole.high is None:
        return f"{head}, one run on a side): too few to tell; one ratio has no interval."
    bounds = f"95 % interval {_share(whole.low - 1)} to {_share(whole.high - 1)}"
    scatter = f"; from count to count it scatters by {100 * test.scatter:.1f} %" if test.scatter is not None else ""
    limit = f"a difference of {100 * (test.cannot_exclude or 0.0):.1f} % cannot be excluded"
    verdict = {
        "too few to tell": f"too few to tell; {limit}",
        "equivalent": f"no difference shown, and one beyond {margin} is excluded{_p(test)}; {limit}",
        "no difference shown": f"no difference shown, which is not that there is none: {limit}",
        "different": f"there is a difference; one beyond {margin} is not excluded",
        "different, but within the margin": f"there is a difference, and it is within {margin}{_p(test)}",
    }[test.verdict]
    return f"{head}; {bounds}{scatter}): {verdict}."


def hosts_figure(figure: StudyFigure, chosen: Selection, published: PublishedPoints) -> Figure | str:
    """The ratio of epoch times by GPU count, and both epoch times; a lack where no workload was measured both ways."""
    pairs = host_pairs(chosen.series)
    if not pairs:
        return "No workload of these results was measured at one GPU count both in one host and over several."
    both = Selection(tuple(series for pair in pairs for series in (pair.inside, pair.spread)), chosen.notes)
    labels = [label for pair in pairs for label in _both_labels(pair, says_workload=len(pairs) > 1)]
    times = times_view(figure, both, labels, published)
    views = (_ratio_view(pairs, chosen.notes), *([times] if times is not None else []))
    return Figure(figure.name, figure.heading, views, tuple(dict.fromkeys([*(pair.name for pair in pairs), *labels])))


def _both_labels(pair: HostPair, *, says_workload: bool) -> tuple[str, str]:
    """What a pair's two curves are called."""
    workload = f"{pair.name}, " if says_workload else ""
    spread = "one GPU in each host" if pair.spread.hosts == "one GPU a host" else "several hosts"
    return f"{workload}all GPUs in one host", f"{workload}{spread}"


def _ratio_view(pairs: Sequence[HostPair], departures: Sequence[str]) -> FigureView:
    """Epoch times over several hosts as a multiple of those in one, their means and the margin."""
    rows = [row for pair in pairs for row in _rows(pair)]
    margin, labels = pairs[0].test.margin, [pair.name for pair in pairs]
    means = [{"series": pair.name, **attributes(pair.test.ratio, "value", "low", "high")} for pair in pairs]
    bounds = [1 / (1 + margin), 1 + margin]
    known = [value for row in (*rows, *means) for key in ("value", "low", "high") if (value := row[key]) is not None]
    # The interval of two runs can be so wide that the points would shrink to a line.
    lowest, highest = max(0.7, min(*known, bounds[0])) - 0.02, min(1.4, max(*known, bounds[1])) + 0.02
    cut_bars(rows, lowest, highest)
    domain = {"domain": [lowest, highest], "nice": False, "clamp": True, "zero": False}
    y = quantity("value", "several hosts / one host", scale=domain, axis={"format": ".2f", "tickCount": 6})
    lines = [{"value": 1.0, "equal": True}, *({"value": bound, "equal": False} for bound in bounds)]
    plot = Plot({"rows": rows, "means": means, "lines": lines})
    colour, band = colour_encoding(labels), {"y": quantity("low", scale=domain), "y2": {"field": "high"}}
    plot.add("means", {"type": "rect", "opacity": 0.13}, "datum.low != null", color=colour, **band)
    rule = {"type": "rule", "color": IDEAL_COLOUR}
    plot.add("lines", rule, "datum.equal", y=y)
    plot.add("lines", rule | {"strokeDash": DASHED}, "!datum.equal", y=y)
    plot.add("means", {"type": "rule", "strokeWidth": 1.6}, y=y, color=colour)
    notes = [
        *departures,
        f"line and band: mean over GPU counts and its 95 % interval; dashed: +/- {100 * margin:.0f} %",
        bars_note(rows),
    ]
    told = [f"{pair.name}: {hosts_sentence(pair.test)}" for pair in pairs]
    choice = {"measure": ControlOption("ratio", "several hosts against one")}
    return curves_view(choice, plot, "", notes, y=y, less_is_better=True, joined=False, more=told)


def _rows(pair: HostPair) -> list[ChartRow]:
    inside = {member.gpus: member.trial for member in pair.inside.members}
    spread = {member.gpus: member.trial for member in pair.spread.members}
    rows = []
    for count in pair.test.counts:
        times = [units.seconds(e.value) for t in (spread[count.gpus], inside[count.gpus]) if (e := t.epoch_seconds)]
        runs = min(count.one_host_runs, count.several_hosts_runs)
        row = point_row(count.ratio, lambda value: f"{value:.3f}", runs)
        told = f"{row['bounds']} ({' against '.join(times)})" if times else row["bounds"]
        rows.append({"series": pair.name, "x": count.gpus} | row | {"bounds": told})
    return rows


def _entry(pair: HostPair) -> dict[str, Any]:
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


def _share(value: float) -> str:
    return f"{100 * value:+z.1f} %" if abs(value) < 100 else f"{100 * value:+.2e} %"


def _p(test: HostsTest) -> str:
    """ " (p = 0.002)"; nothing where no equivalence was tested."""
    if test.p_equivalence is None:
        return ""
    return f" (p = {test.p_equivalence:.3f})" if test.p_equivalence >= 0.001 else " (p = below 0.001)"
