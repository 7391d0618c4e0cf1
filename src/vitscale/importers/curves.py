"""Which imported trials make a curve: the same share of the data is strong scaling, the same share per GPU weak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

from vitscale.importers.contents import TrialSetting
from vitscale.importers.records import counts_hosts
from vitscale.store.results import Curve, CurvePoint
from vitscale.trial.trial import Mode, Trial, exact


@dataclass(frozen=True)
class _Point:
    """A trial and the setting it came from."""

    setting: TrialSetting
    trial: Trial

    @cached_property
    def trial_id(self) -> str:
        return self.trial.identity()

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
    """Share of the dataset; in weak scaling, the share per GPU."""
    points: tuple[_Point, ...]


def curves_of(settings_and_trials: Sequence[tuple[TrialSetting, Trial]]) -> tuple[Curve, ...]:
    """The curves through all trials, in the order of the files; every trial is on at least one.

    Args:
        settings_and_trials: each trial once, with the setting it came from.
    """
    groups: dict[tuple[Any, ...], tuple[dict[str, Any], list[_Point]]] = {}
    split = _apart_by_device(settings_and_trials)
    worlds: dict[tuple[Any, ...], set[tuple[int, int]]] = {}
    labelled = [
        (
            setting,
            trial,
            _labels(setting, trial, setting.devices if _without_devices(setting, trial) in split else None),
        )
        for setting, trial in settings_and_trials
    ]
    for setting, _, labels in labelled:
        worlds.setdefault(tuple(labels.values()), set()).add((setting.gpus, setting.nodes))
    on_hosts = {group: _on_hosts(in_group) for group, in_group in worlds.items()}
    for setting, trial, labels in labelled:
        layouts = [labels["layout"]]
        if labels["layout"] is None:
            layouts = on_hosts[tuple(labels.values())][setting.gpus, setting.nodes]
        for layout in layouts:
            own = labels | {"layout": layout}
            groups.setdefault(tuple(own.values()), (own, []))[1].append(_Point(setting, trial))
    lines = [line for labels, points in groups.values() for line in _lines(labels, points)]
    naming = _Naming.of(lines)
    return tuple(
        Curve(
            mode=line.mode,
            labels=naming.labels_of(line),
            points=tuple(CurvePoint(gpus=point.setting.gpus, trial_id=point.trial_id) for point in line.points),
        )
        for line in lines
    )


def _labels(setting: TrialSetting, trial: Trial, devices: tuple[str, ...] | None) -> dict[str, Any]:
    """All labels that may tell two groups apart, except the batch; None where the file does not say it."""
    return {
        "series": setting.series,
        "model.name": setting.model,
        "train.engine": trial.train.engine,
        "train.zero_stage": trial.train.zero_stage,
        "cluster": setting.cluster,
        "device": None if devices is None else " and ".join(devices) or "unknown device",
        "layout": None if counts_hosts(setting.layout) else setting.layout,
        "data.name": setting.dataset,
        "train.precision": trial.train.precision,
    }


def _on_hosts(worlds: Set[tuple[int, int]]) -> dict[tuple[int, int], list[str | None]]:
    """Maps (GPUs, hosts) to the layouts of the curves, by how many GPUs a full host takes, for a file without layouts.

    Settings on one host begin each curve whose hosts hold as many GPUs or more. If one of them fits no such curve, all
    settings on one host are a curve of their own.
    """
    spanning, alone = {world for world in worlds if world[1] > 1}, {world for world in worlds if world[1] == 1}
    layouts: dict[tuple[int, int], list[str | None]] = {world: [] for world in worlds}
    while spanning:
        fullest = max(spanning, key=lambda world: -(-world[0] // world[1]))
        each = -(-fullest[0] // fullest[1])
        like = {fullest} | {world for world in spanning if -(-world[0] // each) == world[1]}
        spanning -= like
        for world in like | {world for world in alone if world[0] <= each}:
            layouts[world].append(f"{each} per node")
    if not all(layouts[world] for world in alone):
        for world in alone:
            layouts[world].append(None)
    return layouts


def _without_devices(setting: TrialSetting, trial: Trial) -> tuple[Any, ...]:
    labels = _labels(setting, trial, None)
    batch = trial.train.micro_batch, trial.train.grad_accum
    return (*labels.values(), *batch, setting.nodes, setting.gpus, setting.fraction)


def _apart_by_device(settings_and_trials: Iterable[tuple[TrialSetting, Trial]]) -> set[tuple[Any, ...]]:
    """The groups in which each device gets a curve of its own: one GPU count ran on unlike devices, or each of several
    that are named ran on several GPU counts."""
    seen: dict[tuple[Any, ...], set[tuple[str, ...]]] = {}
    members: dict[tuple[Any, ...], set[tuple[Any, ...]]] = {}
    counts: dict[tuple[Any, ...], dict[tuple[str, ...], set[int]]] = {}
    for setting, trial in settings_and_trials:
        key = _without_devices(setting, trial)
        seen.setdefault(key, set()).add(setting.devices)
        members.setdefault(key[:-3], set()).add(key)
        if setting.devices:
            counts.setdefault(key[:-5], {}).setdefault(setting.devices, set()).add(setting.gpus)
    apart = {key[:-3] for key, devices in seen.items() if len(devices) > 1}
    curves = {key for key, on in counts.items() if len(on) > 1 and all(len(gpus) > 1 for gpus in on.values())}
    return {key for group, keys in members.items() if group in apart or group[:-2] in curves for key in keys}


def _lines(labels: Mapping[str, Any], points: Sequence[_Point]) -> Iterable[_Line]:
    """The curves of a group: per batch strong ones, single trials and weak ones; then those of a fixed global batch."""
    by_batch: dict[tuple[int, int], list[_Point]] = {}
    for point in points:
        by_batch.setdefault((point.trial.train.micro_batch, point.trial.train.grad_accum), []).append(point)
    strong = {batch: _alike(some, lambda point: point.fraction) for batch, some in by_batch.items()}
    on_any = {point.trial_id for curves in strong.values() for same in curves for point in same}
    # Points of two strong curves may have one share per GPU by chance: a weak curve needs a point that is on no strong
    # one. A curve of a fixed global batch needs one that is on neither kind.
    weak = {
        batch: [same for same in _alike(some, lambda point: point.per_gpu) if not _all_on(same, on_any)]
        for batch, some in by_batch.items()
    }
    on_any |= {point.trial_id for curves in weak.values() for same in curves for point in same}
    told = [point for point in points if point.setting.micro_batch is not None]
    fixed = _alike(told, lambda point: (point.fraction, point.trial.global_batch))
    fixed = [same for same in fixed if not _all_on(same, on_any)]
    on_any |= {point.trial_id for same in fixed for point in same}
    for (micro_batch, grad_accum), some in by_batch.items():
        batch_told = micro_batch > 1 or any(point.setting.micro_batch for point in some)
        batch = micro_batch if batch_told else None
        own = {**labels, "train.micro_batch": batch, "train.grad_accum": grad_accum, "train.global_batch": None}
        alone = [[point] for point in some if point.trial_id not in on_any]
        for same in (*strong[micro_batch, grad_accum], *alone):
            yield _Line(own, "strong-micro", same[0].setting.fraction, tuple(same))
        for same in weak[micro_batch, grad_accum]:
            yield _Line(own, "weak", same[0].setting.fraction / same[0].setting.gpus, tuple(same))
    for same in fixed:
        own = {**labels, "train.micro_batch": None, "train.grad_accum": None}
        whole = {"train.global_batch": same[0].trial.global_batch}
        yield _Line(own | whole, "strong-global", same[0].setting.fraction, tuple(same))


def _all_on(points: Iterable[_Point], on: Set[str]) -> bool:
    return all(point.trial_id in on for point in points)


def _alike(points: Sequence[_Point], of: Any) -> list[list[_Point]]:
    by_value: dict[Any, list[_Point]] = {}
    for point in points:
        by_value.setdefault(of(point), []).append(point)
    return [
        sorted(same, key=lambda point: point.setting.gpus)
        for same in by_value.values()
        if len({point.setting.gpus for point in same}) > 1
    ]


class _SameLabels(NamedTuple):
    """What lines have in common that only their share of the data tells apart."""

    mode: Mode
    group: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, line: _Line) -> _SameLabels:
        """The key of a line."""
        return cls(line.mode, tuple(line.group.items()))


_USUAL_LABELS = ("series", "model.name", "cluster", "data.name", "train.micro_batch", "train.global_batch")


@dataclass(frozen=True)
class _Naming:
    """How the curves of one import are told apart."""

    values: Mapping[str, Set[Any]]
    """The values that each label has on any line; all lines have all labels, None where a file does not tell."""
    lines_alike: Mapping[_SameLabels, int]
    """Number of lines with one mode and the same labels."""

    @classmethod
    def of(cls, lines: Sequence[_Line]) -> _Naming:
        """Looks at each line once."""
        values: dict[str, set[Any]] = {}
        for line in lines:
            for label, value in line.group.items():
                values.setdefault(label, set()).add(value)
        return cls(values, Counter(map(_SameLabels.of, lines)))

    def labels_of(self, line: _Line) -> dict[str, Any]:
        """The labels that differ within the import; for a single series, those that a reader would ask for first."""
        differing = {label for label in line.group if len(self.values[label]) > 1}
        if not differing:
            differing = {label for label in _USUAL_LABELS if line.group.get(label) is not None}
        labels = {label: line.group[label] for label in line.group if label in differing}
        labels = {label: value for label, value in labels.items() if value is not None}
        if self.lines_alike[_SameLabels.of(line)] > 1:
            share = "scaling.fraction_per_gpu" if line.mode == "weak" else "data.fraction"
            labels[share] = line.share
        return labels
