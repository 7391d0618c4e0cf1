"""Runs the meters of other packages around an epoch.

One that fails ends nothing: its figures are null, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from vitscale.base.plugins import fault
from vitscale.errors import shown
from vitscale.probes import EpochMeter
from vitscale.store.records import MeterLine


def begin_meters(meters: Mapping[str, EpochMeter], device: torch.device) -> dict[str, str]:
    """Begins each meter before an epoch's first step; returns those that failed: name -> why."""
    failures: dict[str, str] = {}
    for name, meter in meters.items():
        try:
            meter.begin(device)
        except Exception as error:
            failures[name] = f"begin: {fault(error)}"
    return failures


def end_meters(meters: Mapping[str, EpochMeter], epoch: int, failures: Mapping[str, str]) -> list[MeterLine]:
    """Ends each meter after an epoch's last step; returns what it measured.

    Args:
        meters: name -> meter.
        epoch: number of the epoch that is over.
        failures: meters that have not begun, from `begin_meters`.
    """
    lines: list[MeterLine] = []
    for name, meter in meters.items():
        values: dict[str, float | None] = {}
        if name in failures:
            problems = [failures[name]]
        else:
            reading = _end_meter(meter)
            values = reading.values_by_name
            problems = reading.problems
        reason = f"meter {shown(name)}: {'; '.join(problems)}" if problems else None
        lines.append(MeterLine(meter=name, epoch=epoch, values=values, reason=reason))
    return lines


class _Reading(NamedTuple):
    """What a meter of another package has measured in an epoch."""

    values_by_name: dict[str, float | None]
    problems: list[str]
    """What is wrong with values that are None, or why there are none."""


def _end_meter(meter: EpochMeter) -> _Reading:
    """Ends a meter and returns its values, with a problem for each that is no finite number, or for all of them."""
    values: dict[str, float | None] = {}
    problems: list[str] = []
    try:
        answer: object = meter.end()
        if not isinstance(answer, Mapping):
            return _Reading({}, [f"end returned {shown(answer)}, and no mapping of names to numbers"])
        for name, value in answer.items():
            number = _finite_number(value)
            values[str(name)] = number
            if number is None:
                problems.append(f"{shown(str(name))} is {shown(value)}, and no finite number")
    except Exception as error:
        return _Reading({}, [f"end: {fault(error)}"])
    return _Reading(values, problems)


def _finite_number(value: object) -> float | None:
    """Returns a value as a number, also an array or tensor of one element; None where it is no finite number."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if abs(number) < float("inf") else None
