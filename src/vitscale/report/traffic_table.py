"""The table of what an optimizer step sends: its collectives, their dtypes and bytes, and the bandwidth reached."""

from __future__ import annotations

from collections.abc import Callable

from vitscale.analysis import Analysis, TrialResult
from vitscale.analysis.time.traffic import Sent, Traffic
from vitscale.present import units
from vitscale.present.document import Cell, Table
from vitscale.present.estimate import Estimate
from vitscale.present.units import UNKNOWN
from vitscale.report.tables import TrialColumn, grouped_table, interval_cell

_MB = 1e6
NOTHING = "nothing"


def traffic_table(analysis: Analysis) -> Table | None:
    """What each trial sends in an optimizer step; None where no trial recorded it."""
    columns: list[TrialColumn] = [
        ("collectives", _cell(_collectives)),
        ("logical (MB)", _cell(lambda sent: _megabytes(sent.logical_bytes))),
        ("on the wire per rank (MB)", _cell(lambda sent: _megabytes(sent.physical_bytes))),
        ("transfer (ms)", _over_runs(lambda sent: sent.wire_seconds, 1000.0)),
        ("reached (MB/s)", _over_runs(lambda sent: sent.bytes_per_second, 1e-6)),
        ("gradients in", _cell(_gradients)),
    ]
    counted = [trial for trial in analysis.trials.values() if trial.traffic is not None]
    reasons = [trial.traffic.reason for trial in counted if trial.traffic and trial.traffic.reason]
    notes = [
        "Logical bytes are what the engine asks for, an all-reduce counted twice; those on the wire are what a rank "
        "sends under a ring.",
        *[
            f"Bytes: unavailable in {reasons.count(reason)} of {len(counted)} trials: {reason}."
            for reason in dict.fromkeys(reasons)
        ],
    ]
    return grouped_table(
        analysis,
        "What an optimizer step sends",
        analysis.curves,
        columns,
        lambda trial: trial.traffic is not None,
        always=("collectives",) if reasons else (),  # a dash at least, with its reason below
        notes=notes,
    )


def _cell(show: Callable[[Traffic], str]) -> Callable[[TrialResult], Cell]:
    return lambda trial: Cell(show(trial.traffic) if trial.traffic else UNKNOWN)


def _over_runs(figure: Callable[[Traffic], Estimate | None], scale: float) -> Callable[[TrialResult], Cell]:
    def cell(trial: TrialResult) -> Cell:
        estimate = figure(trial.traffic) if trial.traffic else None
        return interval_cell(estimate.times(scale) if estimate else None, units.number)

    return cell


def _collectives(traffic: Traffic) -> str:
    """ "2 all_reduce float32 + 1 broadcast int32"; the largest first."""
    if traffic.calls is None:
        return UNKNOWN
    largest_first = sorted(traffic.sent, key=_bytes, reverse=True)
    return " + ".join(f"{message.calls} {message.operation} {message.dtype}" for message in largest_first) or NOTHING


def _bytes(sent: Sent) -> int:
    return sent.logical_bytes or 0


def _gradients(traffic: Traffic) -> str:
    """ "bfloat16", or several with their shares."""
    shares = traffic.gradient_dtypes
    if len(shares) < 2:
        return next(iter(shares), UNKNOWN)
    return " and ".join(f"{dtype} ({units.percent(share)})" for dtype, share in shares.items())


def _megabytes(value: float | None) -> str:
    return units.number(None if value is None else value / _MB)
