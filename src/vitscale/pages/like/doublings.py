"""What a doubling of the GPUs gains: tested, in words, and as a chart beside what a ring's transfers would leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vitscale.analysis import TrialResult
from vitscale.analysis.claims import MARGIN, Doubling, doubling_test
from vitscale.analysis.statistics import corrected, ratio
from vitscale.analysis.time.run_waterfall import run_seconds
from vitscale.pages.charts.axes import ChartRow, Plot
from vitscale.pages.charts.scaling import point_row
from vitscale.pages.like.curves import bars_note, curves_view, gpus_text
from vitscale.pages.like.selection import Selection
from vitscale.pages.like.series import FigureSeries, names
from vitscale.pages.like.study import ClaimOutcome, Material, StudyFigure
from vitscale.prediction.network.links import OPERATIONS, Level, LinkDraws, Network, cheapest, lines
from vitscale.present import units
from vitscale.present.data import attributes
from vitscale.present.document import ControlOption, Figure
from vitscale.present.estimate import Estimate


@dataclass(frozen=True)
class PublishedGain:
    """What a study reports about a doubling."""

    gpus: int
    """GPUs after the doubling."""
    gain: float
    """Times as fast: "26 % faster" is 1.26."""
    where: str


GAINS = (
    PublishedGain(2, 1.26, "on average over all platforms"),
    PublishedGain(4, 1.019, "on A100 PCIe and V100 PCIe"),
    PublishedGain(8, 1.029, "on A100 with NVLink"),
)
"""The gains that the abstract gives; no other figure of the thesis is used here."""


@dataclass(frozen=True)
class Transfer:
    """What a step's collectives take on a ring."""

    seconds: float
    sent_bytes: float
    """Bytes that a rank sends."""
    calls: int
    """Number of collectives."""
    told_by: str
    """The bandwidth that the seconds rest on, and its source."""


@dataclass(frozen=True)
class SeriesDoubling:
    """One doubling of one series."""

    name: str
    gpus: int
    """GPUs before the doubling."""
    trials: tuple[str, str]
    test: Doubling
    run_gain: Estimate | None
    """Gain of whole runs, with start-up, evaluation and checkpoint; None where a part of them is unknown."""
    transfer: Transfer | None
    runs: int
    """Runs of the side that has fewer."""


def doublings(series: Sequence[FigureSeries], network: Network | None) -> list[SeriesDoubling]:
    """Every doubling that strong-micro series measured on like hardware, with Holm's correction for all of them.

    A curve that goes on over several hosts is two series, which share what was measured in one: that counts once.
    """
    strong = [curve for curve in series if curve.mode == "strong-micro"]
    tests: dict[tuple[str, str], SeriesDoubling] = {}
    for curve, name in zip(strong, names(strong), strict=True):
        members = {member.gpus: member.trial for member in curve.members if member.trial.comparable_costs}
        for gpus, fewer in members.items():
            more = members.get(2 * gpus)
            if more is not None and (fewer.trial_id, more.trial_id) not in tests and not fewer.unlike(more):
                tests[fewer.trial_id, more.trial_id] = _doubling(name, gpus, fewer, more, network)
    gains = corrected([test.test.gain for test in tests.values()], list(tests))
    return [replace(test, test=replace(test.test, gain=gain)) for test, gain in zip(tests.values(), gains, strict=True)]


def transfer_of(trial: TrialResult, network: Network | None) -> Transfer | None:
    """What a step of a trial sends, by the link that was checked or declared, else by its explained steps.

    None where neither is known: an assumed network would prove nothing.
    """
    sent = trial.traffic
    if sent is None or not sent.physical_bytes:
        return None
    world, calls = trial.trial.world, sum(message.calls for message in sent.sent)
    crossed: list[Level] = ["inside"] if world.nodes == 1 else ["across"]
    crossed += ["inside"] if world.nodes > 1 and world.ranks_per_node > 1 else []
    links = [network.link(level, "all_reduce") for level in crossed] if network is not None else []
    known = bool(links) and all(link.source != "assumed" for link in links)
    if known and all(message.operation in OPERATIONS and message.tensor_bytes is not None for message in sent.sent):
        import numpy as np

        across, inside = (
            LinkDraws(np.asarray(link.bandwidth_bytes_per_second), np.asarray(link.latency_seconds))
            for link in (links[0], links[-1])
        )
        per_node, backend = np.asarray(float(world.ranks_per_node)), sent.backend or "nccl"
        seconds = 0.0
        for message in sent.sent:
            algorithms = lines(message.operation, np.asarray(float(message.ranks)), per_node, inside, across, backend)
            seconds += message.calls * float(cheapest(algorithms, (message.tensor_bytes or 0) / max(1, message.calls)))
        slowest = min(links, key=lambda link: link.bandwidth_bytes_per_second)
        hop = units.seconds(slowest.latency_seconds)
        told = f"{_rate(slowest.bandwidth_bytes_per_second)} and {hop} a hop, {slowest.described}"
        return Transfer(seconds, sent.physical_bytes, calls, told)
    reached = sent.bytes_per_second
    if reached is None or sent.wire_seconds is None:
        return None
    told = f"{_rate(reached.value)}, as explained steps did"
    return Transfer(sent.wire_seconds.value, sent.physical_bytes, calls, told)


def doublings_claim(material: Material) -> ClaimOutcome:
    """Whether a doubling still shortens training, by how much, and whether transfers explain what is missing."""
    tests = doublings(material.series, material.network)
    told = tuple(_sentence(doubling) for doubling in tests)
    return ClaimOutcome(
        (_overall(tests), *told) if told else (), {"doublings": [_entry(doubling) for doubling in tests]}
    )


def doublings_figure(figure: StudyFigure, chosen: Selection, network: Network | None) -> Figure | str:
    """Gains of epochs, and of whole runs where these are known, by the larger GPU count of each doubling."""
    tests = doublings(chosen.series, network)
    if not tests:
        return "No two GPU counts of these results are one twice the other, on like hardware."
    labels = list(dict.fromkeys(doubling.name for doubling in tests))
    rows = [_row(doubling, doubling.test.gain.ratio) for doubling in tests]
    # Each has a short line, because a single doubling would have no length.
    left = [
        {"series": f"{index} transfers", "x": 2 * doubling.gpus * end, "value": doubling.test.left}
        for index, doubling in enumerate(tests)
        if doubling.test.left is not None
        for end in (0.94, 1.06)
    ]
    counts = {row["x"] for row in rows}
    published = [
        {"series": labels[0], "what": f"published: {gain.where}", "x": gain.gpus, "value": gain.gain,
         "shown": f"{gain.gain:.3f}"}
        for gain in GAINS
        if gain.gpus in counts
    ]  # fmt: skip
    whole = [_row(doubling, doubling.run_gain) for doubling in tests if doubling.run_gain is not None]
    notes = [*chosen.notes, bars_note(rows), "2 is ideal; hollow grey: published"]
    notes += ["dashed: were all transfers to come on top of the step on half the GPUs"] if left else []
    views = [
        curves_view(
            {"measure": ControlOption(name, label)},
            Plot({"rows": some, "ideal": dashed, "published": published}),
            "times as fast as on half the GPUs",
            notes,
        )
        for name, label, some, dashed in (("epoch", "gain of an epoch", rows, left),
                                          ("whole-run", "gain of a whole run", whole, []))
        if some
    ]  # fmt: skip
    return Figure(figure.name, figure.heading, tuple(views), tuple(labels))


def _doubling(name: str, gpus: int, fewer: TrialResult, more: TrialResult, network: Network | None) -> SeriesDoubling:
    transfer = transfer_of(more, network)
    runs, looked = (run_seconds(fewer), run_seconds(more)), (fewer.looked, more.looked)
    return SeriesDoubling(
        name,
        gpus,
        (fewer.trial_id, more.trial_id),
        doubling_test(
            (fewer.comparable_costs, more.comparable_costs),
            (fewer.observed_steps, more.observed_steps),
            transfer.seconds if transfer else None,
            looked,
        ),
        ratio(runs[0], runs[1], looked) if runs[0] and runs[1] else None,
        transfer,
        min(len(fewer.run_figures), len(more.run_figures)),
    )


def _row(doubling: SeriesDoubling, gain: Estimate) -> ChartRow:
    return {"series": doubling.name, "x": 2 * doubling.gpus} | point_row(gain, _times, doubling.runs)


def _overall(tests: Sequence[SeriesDoubling]) -> str:
    beyond = [doubling.test.hardly for doubling in tests if doubling.gpus >= 2]
    if not beyond:
        return "No doubling beyond 2 GPUs was measured: that these hardly shorten training is not tested."
    counts = ", ".join(f"{kind} in {beyond.count(kind)}" for kind in ("confirmed", "refuted", "not decided"))
    return (
        f"That doublings beyond 2 GPUs hardly shorten training (published: 1.9 % and 2.9 %; here: less than "
        f"{100 * MARGIN:.0f} %): {counts}."
    )


_DIRECTION = {
    "faster": "a doubling shortens training",
    "slower": "a doubling lengthens training",
    "no significant difference": "no difference shown",
    "not significant among all comparisons": "no difference shown among all doublings",
    "too few repeats to tell": "not decided: too few runs",
}


def _sentence(doubling: SeriesDoubling) -> str:
    test = doubling.test
    published = [f"; published: {gain.gain:.4g} {gain.where}" for gain in GAINS if gain.gpus == 2 * doubling.gpus]
    parts = [
        f"{doubling.name}, {doubling.gpus} to {gpus_text(2 * doubling.gpus)}: an epoch is "
        f"{_interval(test.gain.ratio)} times as fast, in {_time_saved(test.gain.ratio.value)} time "
        f"({_DIRECTION[test.gain.verdict]}{''.join(published)})"
    ]
    if doubling.run_gain is not None:
        parts.append(f"a whole run {_interval(doubling.run_gain)} times")
    if doubling.transfer is None or test.left is None:
        parts.append("what transfers would leave is unknown, for nothing says how fast the link is: vitscale check")
    else:
        verdict = {
            "do not explain it": "less is measured, so transfers alone do not explain it",
            "are enough": "more is measured, so transfers are enough to explain it",
            "not decided": "whether less is measured is not decided",
        }[test.transfers or "not decided"]
        parts.append(
            f"a rank sends {units.size(round(doubling.transfer.sent_bytes))} a step in "
            f"{units.counted(doubling.transfer.calls, 'collective')}, which takes a ring "
            f"{units.seconds(doubling.transfer.seconds)} ({doubling.transfer.told_by}); had each step to wait for "
            f"all of it, {test.left:.3g} times would be left: {verdict}"
        )
    return "; ".join(parts) + "."


def _time_saved(gain: float) -> str:
    """ "30.6 % less"."""
    share = 100 * (1 - 1 / gain)
    return f"{abs(share):.1f} % {'less' if share >= 0 else 'more'}"


def _interval(gain: Estimate) -> str:
    if gain.low is None or gain.high is None:
        return f"{gain.value:.3g}"
    return f"{gain.value:.3g} (95 % interval {_times(gain.low)} to {_times(gain.high)})"


def _times(value: float | None) -> str:
    return units.UNKNOWN if value is None else f"{value:.3g}"


def _rate(bytes_per_second: float) -> str:
    return f"at {bytes_per_second / 1e9:.3g} GB/s"


def _entry(doubling: SeriesDoubling) -> dict[str, Any]:
    test, transfer, run = doubling.test, doubling.transfer, doubling.run_gain
    return {
        "workload": doubling.name,
        "gpus": 2 * doubling.gpus,
        "base_gpus": doubling.gpus,
        "gain": test.gain.ratio.value,
        **attributes(test.gain.ratio, "low", "high"),
        **attributes(test.gain, "p", "p_adjusted", "verdict"),
        "hardly_shortens": test.hardly,
        "published_gain": next((gain.gain for gain in GAINS if gain.gpus == 2 * doubling.gpus), None),
        "run_gain": run.value if run else None,
        **attributes(run, "low", "high", prefix="run_"),
        "transfer_seconds": transfer.seconds if transfer else None,
        **attributes(transfer, "sent_bytes"),
        "left_by_transfers": test.left,
        "transfers": test.transfers,
        "text": _sentence(doubling),
    }
