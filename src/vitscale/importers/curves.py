"""Which imported trials make a curve: the same share of the data is strong scaling, the same share per GPU weak."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from vitscale.importers.findings import Setting
from vitscale.record import Curve, CurvePoint
from vitscale.trial import Mode, Trial, exact


@dataclass(frozen=True)
class _Place:
    """A trial's place in its group."""

    setting: Setting
    trial_id: str

    @property
    def fraction(self) -> Fraction:
        return exact(self.setting.fraction)

    @property
    def per_gpu(self) -> Fraction:
        return exact(self.setting.fraction) / self.setting.gpus


@dataclass(frozen=True)
class _Line:
    """A curve before its labels are known."""

    group: Mapping[str, Any]
    mode: Mode
    share: float
    """Of the dataset; of weak scaling per GPU."""
    places: tuple[_Place, ...]


def curves_of(found: Sequence[tuple[Setting, Trial]]) -> tuple[Curve, ...]:
    """The curves through all trials, in the order of the files; every trial is on at least one.

    Args:
        found: each trial once, with the setting it came from.
    """
    groups: dict[tuple[Any, ...], tuple[dict[str, Any], list[_Place]]] = {}
    split = _apart_by_device(found)
    for setting, trial in found:
        labels = _labels(setting, trial, setting.devices if _without_devices(setting, trial) in split else None)
        groups.setdefault(tuple(labels.values()), (labels, []))[1].append(_Place(setting, trial.identity()))
    lines = [line for labels, places in groups.values() for line in _lines(labels, places)]
    return tuple(
        Curve(
            mode=line.mode,
            labels=_telling(line, lines),
            points=tuple(CurvePoint(gpus=place.setting.gpus, trial_id=place.trial_id) for place in line.places),
        )
        for line in lines
    )


def _labels(setting: Setting, trial: Trial, devices: tuple[str, ...] | None) -> dict[str, Any]:
    """All that may tell two groups apart; None where the file does not say it."""
    return {
        "series": setting.series,
        "train.engine": trial.train.engine,
        "train.zero_stage": trial.train.zero_stage,
        "cluster": setting.cluster,
        "device": None if devices is None else " and ".join(devices) or "unknown device",
        "layout": setting.layout or _hosts(setting),
        "data.name": setting.dataset,
        "train.precision": trial.train.precision,
        "train.micro_batch": trial.train.micro_batch,
        "train.grad_accum": trial.train.grad_accum,
    }


def _hosts(setting: Setting) -> str | None:
    """Of a file without layouts: how many GPUs lie on one host matters where there are several hosts."""
    return None if setting.nodes == 1 else f"{setting.gpus // setting.nodes} per node"


def _without_devices(setting: Setting, trial: Trial) -> tuple[Any, ...]:
    return (*_labels(replace(setting, devices=()), trial, None).values(), setting.gpus, setting.fraction)


def _apart_by_device(found: Iterable[tuple[Setting, Trial]]) -> set[tuple[Any, ...]]:
    """Of groups in which one GPU count ran on unlike devices: those are a curve for each, not one."""
    seen: dict[tuple[Any, ...], set[tuple[str, ...]]] = {}
    members: dict[tuple[Any, ...], set[tuple[Any, ...]]] = {}
    for setting, trial in found:
        key = _without_devices(setting, trial)
        seen.setdefault(key, set()).add(setting.devices)
        members.setdefault(key[:-2], set()).add(key)
    apart = {key[:-2] for key, devices in seen.items() if len(devices) > 1}
    return {key for group in apart for key in members[group]}


def _lines(labels: Mapping[str, Any], places: Sequence[_Place]) -> Iterable[_Line]:
    """The curves of one group: strong, then weak, then each trial that is on neither."""
    strong = _alike(places, lambda place: place.fraction)
    on_strong = {place.trial_id for same in strong for place in same}
    # Two strong curves cross every share per GPU: only what is on none of them makes a weak one.
    weak = [
        same
        for same in _alike(places, lambda place: place.per_gpu)
        if any(place.trial_id not in on_strong for place in same)
    ]
    on_any = on_strong | {place.trial_id for same in weak for place in same}
    alone = [[place] for place in places if place.trial_id not in on_any]
    for same in (*strong, *alone):
        yield _Line(labels, "strong-micro", same[0].setting.fraction, tuple(same))
    for same in weak:
        yield _Line(labels, "weak", same[0].setting.fraction / same[0].setting.gpus, tuple(same))


def _alike(places: Sequence[_Place], of: Any) -> list[list[_Place]]:
    by_value: dict[Fraction, list[_Place]] = {}
    for place in places:
        by_value.setdefault(of(place), []).append(place)
    return [
        sorted(same, key=lambda place: place.setting.gpus)
        for same in by_value.values()
        if len({place.setting.gpus for place in same}) > 1
    ]


def _telling(line: _Line, lines: Sequence[_Line]) -> dict[str, Any]:
    """The labels that differ within the import; of a single series what a reader would ask for first."""
    differ = {key for key, value in line.group.items() if any(other.group[key] != value for other in lines)}
    if not differ:
        differ = {key for key in ("series", "cluster", "data.name", "train.micro_batch") if line.group[key] is not None}
    told = {key: value for key, value in line.group.items() if key in differ and value is not None}
    same = [other for other in lines if other.group == line.group and other.mode == line.mode]
    if len(same) > 1:
        told |= {"scaling.fraction_per_gpu" if line.mode == "weak" else "data.fraction": line.share}
    return told
