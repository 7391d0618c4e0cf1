"""Reads back the traces that vitscale wrote of its own explained steps (`report --format trace`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, get_args

from vitscale.base.time_spans import Interval, intersection, length, union
from vitscale.errors import StoreError, printable, shown
from vitscale.importers.contents import MOST_GPUS, LogRank, LogRun, TrialSetting, identified
from vitscale.importers.records import step_line
from vitscale.profiles.step_trace import read_step_trace
from vitscale.profiles.trace_figures import TimeShares
from vitscale.store.records import ExplainedLine
from vitscale.trial.trial import Precision


def exported_run(path: Path, data: dict[str, list[Any]], number: int) -> LogRun:
    """Reads the run that vitscale wrote as a trace, and adds its ranks' and steps' figures to `data`.

    Raises:
        StoreError: the file does not say of what run it is, or holds no step.
    """
    about, ranks = read_step_trace(path)
    numbers: dict[str, Any] = {
        name: about.get(name) for name in ("gpus", "nodes", "micro_batch", "grad_accum", "zero_stage")
    }
    gpus, nodes = numbers["gpus"], numbers["nodes"]
    whole = all(value is None or (type(value) is int and 0 <= value <= MOST_GPUS) for value in numbers.values())
    if not (whole and ranks and gpus and nodes and nodes <= gpus and max(ranks) < gpus and all(ranks.values())):
        raise StoreError(f"{shown(path.name)} does not say of what ranks it is", next_step="Write it again")
    texts = {name: printable(str(about.get(name) or ""))[:100] or None for name in ("series", "engine", "precision")}
    devices = about.get("device_names")
    devices = devices if isinstance(devices, dict) else {}
    images = (numbers["micro_batch"] or 0) * (numbers["grad_accum"] or 1)
    own = []
    for rank, lines in ranks.items():
        device = printable(str(devices.get(str(rank)) or "unknown device"))[:100]
        steps = tuple(step_line(line.step, line.seconds, images) for line in lines if about.get("steps_known"))
        own.append(LogRank(rank, device, None, steps, explained=tuple(lines)))
        shares = [_shares(line) for line in lines]
        rest = {"job": number, "rank": rank}
        data["ranks"].append(
            {**rest, "file": path.name, "device": device, "world_size": gpus, **_together(shares).as_json()}
            | {"kernel_seconds": {}, "achieved_flops_per_second": None, "steps_told": "by vitscale, which wrote them"}
        )
        data["steps"] += [
            {**rest, "step": line.step, "whole": True, **share.as_json()}
            for line, share in zip(lines, shares, strict=True)
        ]
    setting = TrialSetting(
        gpus=gpus,
        nodes=nodes,
        micro_batch=numbers["micro_batch"],
        grad_accum=numbers["grad_accum"] or 1,
        zero_stage=numbers["zero_stage"],
        engine=texts["engine"],
        precision=next((known for known in get_args(Precision) if known == texts["precision"]), None),
        series=texts["series"],
        device="cpu" if about.get("device") == "cpu" else "cuda",
    )
    return LogRun(setting, path.name, (identified(path),), tuple(own), one_host_told=True)


def _shares(line: ExplainedLine) -> TimeShares:
    """Time shares of an explained step. On a host, only idle time while a collective is in flight counts as idle."""
    inside: Interval = (0.0, line.seconds)
    idle = intersection(union(line.idle), [inside])
    flight = intersection(union((start, end) for _, _, start, end in line.collectives), [inside])
    copies = intersection(union(line.copies), [inside])
    exposed = intersection(idle, flight)
    if line.device == "cpu":
        idle = exposed
    copying = length(intersection(idle, copies)) - length(intersection(exposed, copies))
    return TimeShares(
        line.seconds,
        line.seconds - length(idle),
        length(exposed),
        copying,
        length(idle) - length(exposed) - copying,
        length(flight),
        length(copies),
        1 - length(exposed) / length(flight) if flight else None,
    )


def _together(shares: Sequence[TimeShares]) -> TimeShares:
    total, compute, exposed, copy, idle, flight, copying, _ = (
        sum(value or 0.0 for value in column) for column in zip(*map(astuple, shares), strict=True)
    )
    return TimeShares(total, compute, exposed, copy, idle, flight, copying, 1 - exposed / flight if flight else None)
