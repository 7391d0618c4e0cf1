"""The page of `published_tables.py`: the answer, all points, sources, labels and paired differences, in 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from paired import (
    OURS,
    Difference,
    Intervals,
    Point,
    clopper_pearson,
    difference,
    errors,
    intervals_of_other_sources,
    same_intervals,
)  # fmt: skip

from vitscale.prediction.results import CONFIDENCE

FEWEST_POINTS = 8
"""Of a source that is said to be behind a peer."""

_FURTHEST = 6


@dataclass(frozen=True)
class Figures:
    """One model on some points. Errors are of logarithms, as shares."""

    points: int
    mean: float
    median: float
    signed: float
    """Above 0: predicted too fast."""
    held: int
    """By vitscale's widths about the model's middle; so `width` and `score`."""
    width: float
    score: float
    own_held: int | None
    """By the model's own errors on the other sources; None with one source."""
    own_score: float | None


def figures_of(points: Sequence[Point], model: str, own: Intervals) -> Figures:
    """Of one model; `own`: its intervals by the other sources."""
    off, same = errors(points, model), same_intervals(points, model)
    known = not np.isnan(own.low).any()
    return Figures(
        len(points),
        float(np.abs(off).mean()),
        float(np.median(np.abs(off))),
        float(off.mean()),
        int(same.held.sum()),
        float((same.high - same.low).mean()),
        float(same.scores.mean()),
        int(own.held.sum()) if known else None,
        float(own.scores.mean()) if known else None,
    )


def page(
    points: Sequence[Point],
    earlier: Sequence[Point],
    notes: Mapping[str, str],
    seed: int,
    command: str,
    head: Sequence[str] = (),
) -> tuple[str, dict[str, Any]]:
    """The text, and the same figures for a machine.

    Args:
        points: held out, of all series.
        earlier: of an earlier version, or none.
        notes: series -> what was said of it.
        seed: of the bootstrap.
        command: the arguments, which are said first.
        head: said next.
    """
    if not points:
        lines = [f"`python benchmarks/published_tables.py {command}`:", "", "No point was predicted.", *_notes(notes)]
        return "\n".join(lines), {}
    models = list(points[0].predicted)
    sources = list(dict.fromkeys(point.source for point in points))
    own = {model: intervals_of_other_sources(points, model) for model in models}
    scopes = {"all": [True] * len(points)} | {name: [one.source == name for one in points] for name in sources}
    found: dict[str, dict[str, Figures]] = {}
    for scope, chosen in scopes.items():
        some = [point for point, taken in zip(points, chosen, strict=True) if taken]
        found[scope] = {m: figures_of(some, m, Intervals(own[m].low[chosen], own[m].high[chosen])) for m in models}
    labels = {label: _of_label([one for one in points if one.label == label]) for label in _labels(points)}
    against = {model: differences(points, model, seed) for model in models[1:]}
    behind = _behind(points, models, sources, seed)
    lines = [f"`python benchmarks/published_tables.py {command}`:", "", "```text"]
    lines += [line for said in head for line in textwrap.wrap(said, 80)]
    lines += _answer(points, found["all"], labels)
    lines += ["", f"All sources: {len(points)} points", *_model_table(found["all"])]
    lines += ["", *textwrap.wrap(_LEGEND, 80)]
    lines += ["", "Intervals of a future run, by label", *_label_table(labels)]
    lines += ["", "vitscale less each peer, over units (below 0: vitscale is better)", *_difference_table(against)]
    lines += textwrap.wrap(_units_told(points), 80)
    if earlier:
        then = differences_in_time(points, earlier, seed)
        lines += ["", f"Now less the earlier version: {then.pop('told')}", *_difference_table({OURS: then})]
        against |= {"earlier version": then}
    for source in sources:
        lines += ["", f"{source}: {found[source][OURS].points} points", *_model_table(found[source])]
    lines += ["", *textwrap.wrap(behind, 80), "", "Furthest off", *_furthest(points), *_notes(notes), "```"]
    content = {
        "figures": {scope: {m: asdict(one) for m, one in by.items()} for scope, by in found.items()},
        "labels": labels,
        "differences": {m: {k: d and asdict(d) for k, d in by.items()} for m, by in against.items()},
        "behind": behind,
    }
    return "\n".join(lines), content


_LEGEND = (
    "Errors are ln(predicted/measured) in %; signed above 0: predicted too fast. held, score: with vitscale's own "
    "widths about each model's middle; own: with the 5th to 95th percentile of the model's own errors on the other "
    "sources. "
    "Scores are interval scores of logarithms (Gneiting & Raftery 2007, equation 43): less is better."
)


def _answer(points: Sequence[Point], found: Mapping[str, Figures], labels: Mapping[str, Any]) -> list[str]:
    ours = found[OURS]
    best = min((name for name in found if name != OURS), key=lambda name: found[name].mean)

    def share(value: float, sign: str = "") -> str:
        return f"{100 * value:{sign}.1f} %"

    by_label = "; ".join(f"{label} {one['held']} of {one['points']}" for label, one in labels.items())
    told = (
        f"{len({one.series for one in points})} series, {len(points)} points: vitscale is off by {share(ours.mean)} in "
        f"the mean, {share(ours.median)} in the median, {share(ours.signed, '+')} signed; of the peers {best} is best "
        f"with {share(found[best].mean)} and {share(found[best].median)}. Its 90 % intervals held {ours.held} of "
        f"{ours.points} runs ({by_label})."
    )
    return textwrap.wrap(told, 80)


def _labels(points: Sequence[Point]) -> list[str]:
    return sorted({point.label for point in points})


def _of_label(points: Sequence[Point]) -> dict[str, Any]:
    ours = same_intervals(points, OURS)
    held, off = int(ours.held.sum()), errors(points, OURS)
    low, high = clopper_pearson(held, len(points))
    return {
        "points": len(points), "held": held, "low": low, "high": high, "contains": low <= CONFIDENCE <= high,
        "width": float((ours.high - ours.low).mean()), "score": float(ours.scores.mean()),
        "mean": float(np.abs(off).mean()), "signed": float(off.mean()),
    }  # fmt: skip


def differences(points: Sequence[Point], model: str, seed: int) -> dict[str, Difference | None]:
    """vitscale less a model: of errors, of scores with the same widths, of scores with its own errors elsewhere."""
    ours = same_intervals(points, OURS).scores
    own = intervals_of_other_sources(points, model)
    return {
        "error": difference(np.abs(errors(points, OURS)), np.abs(errors(points, model)), points, seed),
        "score": difference(ours, same_intervals(points, model).scores, points, seed),
        "own": None if np.isnan(own.low).any() else difference(ours, own.scores, points, seed),
    }


def differences_in_time(now: Sequence[Point], earlier: Sequence[Point], seed: int) -> dict[str, Any]:
    """vitscale now less vitscale in an earlier version, on the points that both have."""
    then = {(one.series, one.gpus): one for one in earlier}
    both = [one for one in now if (one.series, one.gpus) in then]
    if not both:
        return {"told": "no point in common", "error": None, "score": None, "own": None}
    before = [then[one.series, one.gpus] for one in both]

    def of(figure: Any) -> Difference | None:
        return difference(figure(both), figure(before), both, seed)

    return {
        "told": f"{len(both)} points in common",
        "error": of(lambda some: np.abs(errors(some, OURS))),
        "score": of(lambda some: same_intervals(some, OURS).scores),
        "own": None,
    }


def _behind(points: Sequence[Point], models: Sequence[str], sources: Sequence[str], seed: int) -> str:
    told = []
    for source in sources:
        some = [one for one in points if one.source == source]
        if len(some) < FEWEST_POINTS:
            continue
        for model in models[1:]:
            apart = differences(some, model, seed)["error"]
            if apart is not None and apart.behind:
                told.append(f"{source}: {model} by {100 * apart.mean:.1f} % +- {100 * apart.standard_error:.1f}")
    head = f"Sources of {FEWEST_POINTS} points or more behind a peer by more than two standard errors"
    return f"{head}: {'; '.join(told) or 'none'}."


def _units_told(points: Sequence[Point]) -> str:
    series, of_units = ({getattr(point, name) for point in points} for name in ("series", "unit"))
    return (
        f"A unit is a series, or several that share figures: {len(series)} series are {len(of_units)} units. "
        "90 % by bootstrap over units, 2,000 resamples. own: vitscale's intervals less the peer's own."
    )


def _model_table(found: Mapping[str, Figures]) -> list[str]:
    rows = [["model", "mean", "median", "signed", "held", "width", "score", "own", "score"]]
    for model, one in found.items():
        own = ["-", "-"] if one.own_score is None else [f"{one.own_held}/{one.points}", f"{one.own_score:.3f}"]
        rows.append(
            [model, *(f"{100 * each:.1f}" for each in (one.mean, one.median)), f"{100 * one.signed:+.1f}",
             f"{one.held}/{one.points}", f"{one.width:.3f}", f"{one.score:.3f}", *own]
        )  # fmt: skip
    return aligned(rows)


def _label_table(labels: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = [["label", "held", "share", "exact 90 %", "has 0.90", "width", "score", "mean", "signed"]]
    for label, one in labels.items():
        rows.append(
            [label, f"{one['held']}/{one['points']}", f"{one['held'] / one['points']:.2f}",
             f"{one['low']:.2f}-{one['high']:.2f}", "yes" if one["contains"] else "NO", f"{one['width']:.3f}",
             f"{one['score']:.3f}", f"{100 * one['mean']:.1f}", f"{100 * one['signed']:+.1f}"]
        )  # fmt: skip
    return aligned(rows)


def _furthest(points: Sequence[Point]) -> list[str]:
    off, held = errors(points, OURS), same_intervals(points, OURS).held
    rows = [["series", "GPUs", "off, %", "held", "label"]]
    for n in np.argsort(-np.abs(off))[:_FURTHEST]:
        one = points[n]
        rows.append([one.series[:40], str(one.gpus), f"{100 * off[n]:+.1f}", "yes" if held[n] else "NO", one.label])
    return aligned(rows)


def _difference_table(against: Mapping[str, Mapping[str, Difference | None]]) -> list[str]:
    rows = [["", "error", "90 %", "score", "90 %", "own", "90 %"]]
    for model, by in against.items():
        cells = [model]
        for name, scale, digits in (("error", 100, 1), ("score", 1, 2), ("own", 1, 2)):
            one = by[name]
            if one is None:
                cells += ["-", "-"]
            else:
                mean, low, high = (f"{scale * each:+.{digits}f}" for each in (one.mean, one.low, one.high))
                cells += [mean, f"{low} {high}"]
        rows.append(cells)
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns two spaces apart, the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if n == 0 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _notes(notes: Mapping[str, str]) -> list[str]:
    return [line for name, said in notes.items() for line in textwrap.wrap(f"{name}: {said}", 80)]
