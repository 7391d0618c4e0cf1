"""The points of scaling figures as rows: measured, ideal and published; and what they say in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from vitscale.present import units
from vitscale.present.estimate import Estimate
from vitscale.published import Fact
from vitscale.report.charts.axes import Row
from vitscale.report.like.beside import Beside
from vitscale.report.like.series import DATASET_NAMES, Series

_SAMPLES = 30


def against_base(one: Series, name: str, *, per_gpu: bool = False) -> list[Row]:
    """Speedup of a strong series, efficiency of a weak one, against its smallest GPU count.

    `per_gpu`: a strong series' efficiency, its speedup for each of the base's GPUs.
    """
    base = one.base.gpus if one.base is not None else 1
    return [
        row_of(name, member.gpus, member.against_base.times(base / member.gpus if per_gpu else 1.0), units.share,
               len(member.trial.runs)) | {"base": base}
        for member in one.members
        if member.against_base is not None
    ]  # fmt: skip


def published_times(others: Beside, labels: Mapping[int, str]) -> list[Row]:
    """The published epoch times, in seconds, each in the shape of the series that it stands beside.

    Args:
        others: the facts.
        labels: `id` of a series to its name.
    """
    return [
        {
            "series": labels[id(one)],
            "what": _what(fact),
            "gpus": fact.gpus,
            "value": fact.epoch_seconds,
            "shown": units.seconds(fact.epoch_seconds),
        }
        for one, facts in others.facts
        for fact in facts
    ]


def published_against_base(others: Beside, labels: Mapping[int, str]) -> list[Row]:
    """Published speedups, or efficiencies of weak series, against the same GPU count as the series' own base.

    Left out where that count was not published.
    """
    rows = []
    for one, facts in others.facts:
        base = [fact for fact in facts if one.base is not None and fact.gpus == one.base.gpus]
        for fact in facts if base else ():
            value = base[0].epoch_seconds / fact.epoch_seconds
            row = {"series": labels[id(one)], "what": _what(fact), "gpus": fact.gpus}
            rows.append(row | {"value": value, "shown": units.share(value)})
    return rows


def _what(fact: Fact) -> str:
    return f"published: {DATASET_NAMES[fact.dataset]}, micro-batch {fact.micro_batch}, {', '.join(fact.devices)}"


def epoch_times(one: Series, name: str) -> list[Row]:
    """Epoch seconds of each GPU count that has them."""
    return [
        row_of(name, member.gpus, member.trial.epoch_seconds, units.seconds, len(member.trial.runs))
        for member in one.members
        if member.trial.epoch_seconds is not None
    ]


def row_of(name: str, gpus: int, value: Estimate, show: Callable[[float | None], str], runs: int) -> Row:
    """A point with its interval, as text too."""
    bounded = value.low is not None and value.high is not None
    bounds = f"{show(value.low)} to {show(value.high)}" if bounded else ""
    return {
        "series": name,
        "gpus": gpus,
        "value": value.value,
        "low": value.low,
        "high": value.high,
        "shown": show(value.value),
        "bounds": ", ".join(part for part in (bounds, value.note) if part),
        "runs": runs,
    }


def ideal_times(one: Series, name: str, weak: bool) -> list[Row]:
    """Perfect scaling from the smallest GPU count on, in seconds: less with every GPU, or constant where it is weak."""
    base = one.base
    if base is None or base.trial.epoch_seconds is None or one.members[-1].gpus <= base.gpus:
        return []
    seconds, largest = base.trial.epoch_seconds.value, one.members[-1].gpus
    rows = []
    for sample in range(_SAMPLES + 1):
        times = (largest / base.gpus) ** (sample / _SAMPLES)
        rows.append({"series": name, "gpus": base.gpus * times, "value": seconds if weak else seconds / times})
    return rows


def ideal_against_base(rows: Sequence[Row], weak: bool) -> list[Row]:
    """Perfect scaling: one line for all series of a base: N / N_base, or 1."""
    found = []
    for base in sorted({row["base"] for row in rows}):
        largest = max(row["gpus"] for row in rows if row["base"] == base)
        for sample in range(_SAMPLES + 1):
            times = (largest / base) ** (sample / _SAMPLES)
            found.append({"series": f"ideal {base}", "gpus": base * times, "value": 1.0 if weak else times})
    return found


def in_unit(row: Row, factor: float) -> Row:
    """The row with its value and interval multiplied."""
    return row | {key: row[key] * factor for key in ("value", "low", "high") if row.get(key) is not None}


def sentences(rows: Sequence[Row]) -> list[str]:
    """Each point in words."""
    return [
        f"{row['series']}, {gpus_text(row['gpus'])}: {row['shown']} ({row['bounds'] or 'no interval'})" for row in rows
    ]


def ratio_sentences(rows: Sequence[Row], what: str) -> list[str]:
    """Each point but the baselines, in words."""
    return [
        f"{row['series']}, {gpus_text(row['gpus'])}: {what} {row['shown']} ({row['bounds'] or 'no interval'})"
        for row in rows
        if row["gpus"] != row["base"]
    ]


def gpus_text(count: int) -> str:
    """ "1 GPU", "8 GPUs"."""
    return f"{count} GPU{'s' if count != 1 else ''}"
