"""What a doubling of the GPUs gains: tested, in words, and as a chart beside what a ring's transfers would leave."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vitscale.analysis import TrialResult
from vitscale.analysis.claims import MARGIN, Doubling, doubling_test
from vitscale.analysis.statistics import corrected, ratio
from vitscale.analysis.time.run_waterfall import run_seconds
from vitscale.analysis.time.traffic import Traffic
from vitscale.pages.charts.axes import ChartRow, Plot
from vitscale.pages.charts.scaling import point_row
from vitscale.pages.like.curves import bars_note, curves_view, gpus_text
from vitscale.pages.like.selection import Selection
from vitscale.pages.like.series import FigureSeries, distinct_series_names, strong_micro_series
from vitscale.pages.like.study import ClaimOutcome, MeasuredData, StudyFigure
from vitscale.prediction.network.links import OPERATIONS, Level, Link, LinkDraws, Network, cheapest, lines
from vitscale.present import units
from vitscale.present.data import attributes
from vitscale.present.document import ControlOption, Figure, FigureView
from vitscale.present.estimate import Estimate


@dataclass(frozen=True)
class PublishedGain:
    """The gain of a doubling as the thesis reports it."""

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
    """The time and bytes of a step's collectives on a ring."""

    seconds: float
    sent_bytes: float
    """Bytes that a rank sends."""
    calls: int
    """Number of collectives."""
    basis: str
    """The bandwidth that the seconds rest on, and its source."""


@dataclass(frozen=True)
class SeriesDoubling:
    """One doubling of one series."""

    name: str
    gpus: int
    """GPUs before the doubling."""
    trials: tuple[str, str]
    """Identities of the trial on fewer GPUs, and of that on twice as many."""
    test: Doubling
    run_gain: Estimate | None
    """Gain of whole runs, with start-up, evaluation and checkpoint; None where a part of them is unknown."""
    transfer: Transfer | None
    runs: int
    """Runs of the side that has fewer."""


def doublings(series_list: Sequence[FigureSeries], network: Network | None) -> list[SeriesDoubling]:
    """Return the test of every doubling of GPUs that strong-micro series measured on like hardware.

    Holm's correction is for all of them. A curve that goes on over several hosts is two series, which share the trials
    of one host: a pair of trials is tested once.
    """
    strong = strong_micro_series(series_list)
    test_by_trials: dict[tuple[str, str], SeriesDoubling] = {}
    for series, name in zip(strong, distinct_series_names(strong), strict=True):
        trial_by_gpus = {member.gpus: member.trial for member in series.members if member.trial.comparable_costs}
        for gpus, fewer_gpus in trial_by_gpus.items():
            more_gpus = trial_by_gpus.get(2 * gpus)
            if more_gpus is None:
                continue
            pair = (fewer_gpus.trial_id, more_gpus.trial_id)
            if pair not in test_by_trials and not fewer_gpus.reasons_not_to_compare(more_gpus):
                test_by_trials[pair] = _tested_doubling(name, gpus, fewer_gpus, more_gpus, network)
    uncorrected = list(test_by_trials.values())
    gains = corrected([doubling.test.gain for doubling in uncorrected], list(test_by_trials))
    return [
        replace(doubling, test=replace(doubling.test, gain=gain))
        for doubling, gain in zip(uncorrected, gains, strict=True)
    ]


def transfer_of(trial: TrialResult, network: Network | None) -> Transfer | None:
    """Return the time and bytes of a step's collectives in a trial.

    The time is worked out from the links of the network if these were checked or declared, else it is that of the
    explained steps. Return None where neither is known: an assumed network would prove nothing.
    """
    traffic = trial.traffic
    if traffic is None or not traffic.physical_bytes:
        return None
    calls = sum(message.calls for message in traffic.sent)
    links = _crossed_links(trial, network)
    are_links_known = bool(links) and all(link.source != "assumed" for link in links)
    if are_links_known and _are_messages_known(traffic):
        slowest = min(links, key=lambda link: link.bandwidth_bytes_per_second)
        hop = units.seconds(slowest.latency_seconds)
        basis = f"{_rate_text(slowest.bandwidth_bytes_per_second)} and {hop} a hop, {slowest.described}"
        return Transfer(_seconds_by_links(trial, traffic, links), traffic.physical_bytes, calls, basis)
    bandwidth = traffic.bytes_per_second
    if bandwidth is None or traffic.wire_seconds is None:
        return None
    basis = f"{_rate_text(bandwidth.value)}, as explained steps did"
    return Transfer(traffic.wire_seconds.value, traffic.physical_bytes, calls, basis)


def _are_messages_known(traffic: Traffic) -> bool:
    """Whether every message of a step has an operation whose time can be worked out, and a size."""
    return all(message.operation in OPERATIONS and message.tensor_bytes is not None for message in traffic.sent)


def _crossed_links(trial: TrialResult, network: Network | None) -> list[Link]:
    """Return the links that a trial's all-reduces cross, that between hosts before that inside one.

    Return none of an unknown network.
    """
    if network is None:
        return []
    world = trial.trial.world
    levels: list[Level] = []
    if world.nodes > 1:
        levels.append("across")
    if world.nodes == 1 or world.ranks_per_node > 1:
        levels.append("inside")
    return [network.link(level, "all_reduce") for level in levels]


def _seconds_by_links(trial: TrialResult, traffic: Traffic, links: Sequence[Link]) -> float:
    """Return the seconds of a step's collectives, each by the fastest algorithm over these links."""
    import numpy as np

    # Of a single link both are the same.
    across = _link_draws(links[0])
    inside = _link_draws(links[-1])
    ranks_per_node = np.asarray(float(trial.trial.world.ranks_per_node))
    backend = traffic.backend or "nccl"
    seconds = 0.0
    for message in traffic.sent:
        ranks = np.asarray(float(message.ranks))
        algorithms = lines(message.operation, ranks, ranks_per_node, inside, across, backend)
        call_bytes = (message.tensor_bytes or 0) / max(1, message.calls)
        seconds += message.calls * float(cheapest(algorithms, call_bytes))
    return seconds


def _link_draws(link: Link) -> LinkDraws:
    import numpy as np

    return LinkDraws(np.asarray(link.bandwidth_bytes_per_second), np.asarray(link.latency_seconds))


def doublings_claim(measured: MeasuredData) -> ClaimOutcome:
    """Return the tests of all doublings in sentences and as data.

    They say whether a doubling still shortens training, by how much, and whether transfers explain the missing gain.
    """
    tests = doublings(measured.series, measured.network)
    sentences = tuple(_doubling_sentence(doubling) for doubling in tests)
    entries = {"doublings": [_doubling_fields(doubling) for doubling in tests]}
    return ClaimOutcome((_overall_sentence(tests), *sentences) if tests else (), entries)


def doublings_figure(figure: StudyFigure, selection: Selection, network: Network | None) -> Figure | str:
    """Draw gains of epochs, and of whole runs where these are known, by the larger GPU count of each doubling.

    Where no doubling was measured, return a sentence that says so.
    """
    tests = doublings(selection.series, network)
    if not tests:
        return "No two GPU counts of these results are one twice the other, on like hardware."
    labels = list(dict.fromkeys(doubling.name for doubling in tests))
    epoch_rows = [_gain_row(doubling, doubling.test.gain.ratio) for doubling in tests]
    run_rows = [_gain_row(doubling, doubling.run_gain) for doubling in tests if doubling.run_gain is not None]
    transfer_rows = _transfer_rows(tests)
    published = _published_rows(labels[0], {row["x"] for row in epoch_rows})
    notes = [*selection.notes, bars_note(epoch_rows), "2 is ideal; hollow grey: published"]
    if transfer_rows:
        notes.append("dashed: were all transfers to come on top of the step on half the GPUs")
    of_epochs = Plot({"rows": epoch_rows, "ideal": transfer_rows, "published": published})
    views = [_gain_view(ControlOption("epoch", "gain of an epoch"), of_epochs, notes)]
    if run_rows:
        of_runs = Plot({"rows": run_rows, "ideal": [], "published": published})
        views.append(_gain_view(ControlOption("whole-run", "gain of a whole run"), of_runs, notes))
    return Figure(figure.name, figure.heading, tuple(views), tuple(labels))


def _gain_view(measure: ControlOption, plot: Plot, notes: Sequence[str]) -> FigureView:
    return curves_view({"measure": measure}, plot, "times as fast as on half the GPUs", notes)


def _transfer_rows(tests: Sequence[SeriesDoubling]) -> list[ChartRow]:
    """Return two rows for the gain that transfers would leave of each doubling: the ends of a short level line.

    Its ends lie on either side of the GPU count, for a line through one point could not be seen.
    """
    rows: list[ChartRow] = []
    for index, doubling in enumerate(tests):
        if doubling.test.left is not None:
            series = f"{index} transfers"
            larger = 2 * doubling.gpus
            rows += [{"series": series, "x": larger * end, "value": doubling.test.left} for end in (0.94, 1.06)]
    return rows


def _published_rows(series: str, counts: Collection[int]) -> list[ChartRow]:
    """Return a row for each published gain at a GPU count that was measured.

    `series` is the series whose shape their points have.
    """
    rows = []
    for gain in GAINS:
        if gain.gpus in counts:
            row = {"series": series, "what": f"published: {gain.where}", "x": gain.gpus, "value": gain.gain}
            rows.append(row | {"shown": f"{gain.gain:.3f}"})
    return rows


def _tested_doubling(
    name: str, gpus: int, fewer_gpus: TrialResult, more_gpus: TrialResult, network: Network | None
) -> SeriesDoubling:
    """Return the test of one doubling.

    Args:
        name: the series.
        gpus: GPUs before the doubling.
        fewer_gpus: the trial on that many.
        more_gpus: the trial on twice as many.
        network: the network between the ranks; None: unknown.
    """
    transfer = transfer_of(more_gpus, network)
    deciding_runs = (fewer_gpus.deciding_runs, more_gpus.deciding_runs)
    test = doubling_test(
        epochs=(fewer_gpus.comparable_costs, more_gpus.comparable_costs),
        steps=(fewer_gpus.observed_steps, more_gpus.observed_steps),
        transfer_seconds=transfer.seconds if transfer else None,
        deciding_runs=deciding_runs,
    )
    seconds_of_fewer = run_seconds(fewer_gpus)
    seconds_of_more = run_seconds(more_gpus)
    run_gain = None
    if seconds_of_fewer and seconds_of_more:
        run_gain = ratio(seconds_of_fewer, seconds_of_more, deciding_runs)
    return SeriesDoubling(
        name=name,
        gpus=gpus,
        trials=(fewer_gpus.trial_id, more_gpus.trial_id),
        test=test,
        run_gain=run_gain,
        transfer=transfer,
        runs=min(len(fewer_gpus.run_figures), len(more_gpus.run_figures)),
    )


def _gain_row(doubling: SeriesDoubling, gain: Estimate) -> ChartRow:
    """Return the chart's row with a gain, at the larger GPU count."""
    return {"series": doubling.name, "x": 2 * doubling.gpus} | point_row(gain, _three_digits, doubling.runs)


def _overall_sentence(tests: Sequence[SeriesDoubling]) -> str:
    """Return a sentence on the claim that doublings beyond 2 GPUs hardly shorten training, over all tests."""
    beyond = [doubling.test.hardly for doubling in tests if doubling.gpus >= 2]
    if not beyond:
        return "No doubling beyond 2 GPUs was measured: that these hardly shorten training is not tested."
    counts = ", ".join(f"{kind} in {beyond.count(kind)}" for kind in ("confirmed", "refuted", "not decided"))
    return (
        f"That doublings beyond 2 GPUs hardly shorten training (published: 1.9 % and 2.9 %; here: less than "
        f"{100 * MARGIN:.0f} %): {counts}."
    )


_VERDICT_CLAUSES = {
    "faster": "a doubling shortens training",
    "slower": "a doubling lengthens training",
    "no significant difference": "no difference shown",
    "not significant among all comparisons": "no difference shown among all doublings",
    "too few repeats to tell": "not decided: too few runs",
}


def _doubling_sentence(doubling: SeriesDoubling) -> str:
    """Return a sentence on one doubling: gains of an epoch and of a whole run, and the gain that transfers leave."""
    clauses = [_epoch_clause(doubling)]
    if doubling.run_gain is not None:
        clauses.append(f"a whole run {_gain_text(doubling.run_gain)} times")
    clauses.append(_transfer_clause(doubling))
    return "; ".join(clauses) + "."


def _epoch_clause(doubling: SeriesDoubling) -> str:
    """Return a clause on the gain of an epoch, with the published gain at these GPU counts."""
    gain = doubling.test.gain
    more_gpus = 2 * doubling.gpus
    published = ""
    for published_gain in GAINS:
        if published_gain.gpus == more_gpus:
            published += f"; published: {published_gain.gain:.4g} {published_gain.where}"
    return (
        f"{doubling.name}, {doubling.gpus} to {gpus_text(more_gpus)}: an epoch is "
        f"{_gain_text(gain.ratio)} times as fast, in {_time_saved(gain.ratio.value)} time "
        f"({_VERDICT_CLAUSES[gain.verdict]}{published})"
    )


def _transfer_clause(doubling: SeriesDoubling) -> str:
    """Return a clause on the time of transfers, the gain that they would leave, and whether they explain the test."""
    transfer = doubling.transfer
    test = doubling.test
    if transfer is None or test.left is None:
        return "what transfers would leave is unknown, for nothing says how fast the link is: vitscale check"
    verdict = {
        "do not explain it": "less is measured, so transfers alone do not explain it",
        "are enough": "more is measured, so transfers are enough to explain it",
        "not decided": "whether less is measured is not decided",
    }[test.transfers or "not decided"]
    return (
        f"a rank sends {units.size(round(transfer.sent_bytes))} a step in "
        f"{units.counted(transfer.calls, 'collective')}, which takes a ring "
        f"{units.seconds(transfer.seconds)} ({transfer.basis}); had each step to wait for "
        f"all of it, {test.left:.3g} times would be left: {verdict}"
    )


def _time_saved(gain: float) -> str:
    """Return the time of an epoch on twice the GPUs against before: "30.6 % less" for a gain of 1.44."""
    share = 100 * (1 - 1 / gain)
    return f"{abs(share):.1f} % {'less' if share >= 0 else 'more'}"


def _gain_text(gain: Estimate) -> str:
    if gain.low is None or gain.high is None:
        return f"{gain.value:.3g}"
    return f"{gain.value:.3g} (95 % interval {_three_digits(gain.low)} to {_three_digits(gain.high)})"


def _three_digits(value: float | None) -> str:
    return units.UNKNOWN if value is None else f"{value:.3g}"


def _rate_text(bytes_per_second: float) -> str:
    return f"at {bytes_per_second / 1e9:.3g} GB/s"


def _doubling_fields(doubling: SeriesDoubling) -> dict[str, Any]:
    """Return the JSON object of one doubling, with its sentence."""
    test = doubling.test
    transfer = doubling.transfer
    run_gain = doubling.run_gain
    published = {gain.gpus: gain.gain for gain in GAINS}
    return {
        "workload": doubling.name,
        "gpus": 2 * doubling.gpus,
        "base_gpus": doubling.gpus,
        "gain": test.gain.ratio.value,
        **attributes(test.gain.ratio, "low", "high"),
        **attributes(test.gain, "p", "p_adjusted", "verdict"),
        "hardly_shortens": test.hardly,
        "published_gain": published.get(2 * doubling.gpus),
        "run_gain": run_gain.value if run_gain else None,
        **attributes(run_gain, "low", "high", prefix="run_"),
        "transfer_seconds": transfer.seconds if transfer else None,
        **attributes(transfer, "sent_bytes"),
        "left_by_transfers": test.left,
        "transfers": test.transfers,
        "text": _doubling_sentence(doubling),
    }
