"""Runs the meters of other packages around an epoch.

One that fails ends nothing: its figures are null, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping

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
            values, problems = _reading(meter)
        reason = f"meter {shown(name)}: {'; '.join(problems)}" if problems else None
        lines.append(MeterLine(meter=name, epoch=epoch, values=values, reason=reason))
    return lines


def _reading(meter: EpochMeter) -> tuple[dict[str, float | None], list[str]]:
    """Ends a meter; returns its values, and what is wrong with them."""
    try:
        reading: object = meter.end()
        if not isinstance(reading, Mapping):
            return {}, [f"end returned {shown(reading)}, and no mapping of names to numbers"]
        values = {str(name): _finite(value) for name, value in reading.items()}
        problems = [
            f"{shown(str(name))} is {shown(value)}, and no finite number"
            for name, value in reading.items()
            if values[str(name)] is None
        ]
    except Exception as error:
        return {}, [f"end: {fault(error)}"]
    return values, problems


def _finite(value: object) -> float | None:
    """The number, also that of an array or tensor of one; None where it is none, or not finite."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if abs(number) < float("inf") else None
