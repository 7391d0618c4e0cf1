"""Predictions of the published study's runs from the smaller of them, beside what peers' models say.

    python benchmarks/published_study.py .../epochs.csv [--no-extra-p] [--json] [--write docs/calibration.md]

Each series goes through `vitscale import --format epochs` and `vitscale predict --json`, the first by the real command,
and through linear speedup, constant seconds per step, Amdahl, USL, Ernest and Extra-P (`benchmarks/peers`; Extra-P is
installed into `benchmarks/.peers-venv`). First the split of up to 4 GPUs against 5 to 8, which is all that `--json`
prints, then weak scaling, unlike GPUs and other splits. A minute or two.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from between_marks import write_between
from peers.extra_p import extra_p, installed
from peers.intervals import KNOWN, RESIDUALS, interval_score, told
from peers.models import PEERS, Peer
from peers.runs import Array
from product import as_command, in_process
from published_series import PublishedSeries, ours, read

MARK = "published study"
OTHER_SPLITS = ((1, 2), (1, 2, 3), (1, 4), (2, 4), (1, 2, 4), (1, 2, 3, 4, 5, 6))


@dataclass(frozen=True)
class Row:
    """One model on one series. One entry per predicted run in each array."""

    model: str
    series: str
    errors: Array
    """Absolute, as a share of the run."""
    held: Array
    """Whether the 90 % interval of a future run holds it, by spread."""
    scores: Array
    """Interval scores, by spread."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("epochs", type=Path)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--no-extra-p", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    missing = "left out" if arguments.no_extra_p else installed()
    peers = (*PEERS, *([] if missing else [extra_p()]))
    series = read(arguments.epochs)
    strong = [one for one in series if not one.weak and not one.mixed_gpus]
    rows = compare(strong, (1, 2, 3, 4), peers)
    if arguments.json:
        print(json.dumps([as_json(row) for row in rows]))
        return
    text = "\n".join(page(series, rows, missing))
    print(text)
    if arguments.write:
        write_between(arguments.write, MARK, text)


def page(series: Sequence[PublishedSeries], strong_rows: Sequence[Row], missing: str | None) -> list[str]:
    """All tables; `missing` says why Extra-P is."""
    strong = [one for one in series if not one.weak and not one.mixed_gpus]
    lines = ["`python benchmarks/published_study.py epochs.csv`:", ""]
    lines += ["**Strong scaling, fitted on up to 4 GPUs, predicted 5 to 8**", ""]
    lines += table(strong_rows, strong)
    if missing:
        lines += ["", f"Extra-P: not installed ({missing})."]
    weak = [one for one in series if one.weak and not one.mixed_gpus]
    lines += ["", "**Weak scaling, fitted on up to 4 GPUs, predicted 5 to 8**", ""]
    lines += table(compare(weak, (1, 2, 3, 4), PEERS), weak)
    mixed = [one for one in series if one.mixed_gpus]
    lines += ["", "**Hosts with unlike GPUs, strong and weak, fitted on 1 and 2, predicted 3**", ""]
    lines += table(compare(mixed, (1, 2), PEERS), mixed)
    lines += ["", "**Strong scaling, other splits: MAPE (future runs held / predicted)**", ""]
    return [*lines, *splits(strong)]


def compare(series: Sequence[PublishedSeries], fitted: Sequence[int], peers: Sequence[Peer]) -> list[Row]:
    """Ours and each peer's on each series, fitted on the rank counts `fitted` and held against all others."""
    rows = []
    for number, one in enumerate(series):
        small, large = one.only(fitted), one.only([count for count in one.counts if count not in fitted])
        rows.append(_our_row(one.name, small, large, by_command=number == 0))
        rows += [_peer_row(peer, one.name, small, large) for peer in peers]
    return rows


def _our_row(name: str, small: PublishedSeries, large: PublishedSeries, by_command: bool = False) -> Row:
    said, _ = ours(small, large.counts, as_command if by_command else in_process)
    place = np.searchsorted(large.counts, large.places.gpus)
    low, high, value = said.future_low[place], said.future_high[place], said.value[place]
    return _row("**vitscale**", name, large.seconds, value, [(low, high)] * 2)


def _peer_row(peer: Peer, name: str, small: PublishedSeries, large: PublishedSeries) -> Row:
    said = [told(peer, small.places, small.seconds, large.places, spread) for spread in (RESIDUALS, KNOWN)]
    intervals = [(each.future_low, each.future_high) for each in said]
    return _row(peer.name, name, large.seconds, said[0].value, intervals)


def _row(model: str, series: str, truth: Array, value: Array, intervals: Sequence[tuple[Array, Array]]) -> Row:
    return Row(
        model,
        series,
        np.abs(value / truth - 1),
        np.array([(low <= truth) & (truth <= high) for low, high in intervals], dtype=float),
        np.array([interval_score(low, high, truth) for low, high in intervals]),
    )


def as_json(row: Row) -> dict[str, object]:
    """With one interval score and one count of held runs for each of the spreads."""
    return {
        "model": row.model.strip("*"),
        "series": row.series,
        "errors": row.errors.tolist(),
        "held": row.held.astype(int).tolist(),
        "scores": row.scores.tolist(),
    }


def table(rows: Sequence[Row], series: Sequence[PublishedSeries]) -> list[str]:
    """A row per model: error overall and by series, coverage and interval score under both spreads."""
    names = [one.name.removeprefix("vector, ") + (", weak" if one.weak and one.mixed_gpus else "") for one in series]
    heads = ["model", "MAPE", *names, "held, residuals", "held, 2.5 % known", "score, residuals", "score, 2.5 % known"]
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join(['---'] * len(heads))} |"]
    for model in dict.fromkeys(row.model for row in rows):
        of_it = [row for row in rows if row.model == model]
        errors = np.concatenate([row.errors for row in of_it])
        held = np.concatenate([row.held for row in of_it], axis=1)
        scores = np.concatenate([row.scores for row in of_it], axis=1).mean(axis=1)
        cells = [model, f"{errors.mean():.1%}", *(f"{row.errors.mean():.1%}" for row in of_it)]
        cells += [f"{int(each.sum())}/{errors.size}" for each in held]
        cells += [f"{each:.3f}" for each in scores]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def splits(series: Sequence[PublishedSeries]) -> list[str]:
    """Ours beside constant seconds per step and Amdahl for other choices of what is fitted."""
    models = ("**vitscale**", "constant step x rounded steps", "Amdahl")
    lines = [f"| fitted on | {' | '.join(models)} |", f"| {' | '.join(['---'] * (1 + len(models)))} |"]
    chosen = [peer for peer in PEERS if peer.name in models]
    for split in OTHER_SPLITS:
        able = [one for one in series if len(set(one.counts) & set(split)) >= min(2, len(split))]
        rows = compare(able, split, chosen)
        cells = []
        for model in models:
            errors = np.concatenate([row.errors for row in rows if row.model == model])
            held = np.concatenate([row.held[-1] for row in rows if row.model == model])
            cells.append(f"{errors.mean():.1%} ({int(held.sum())}/{held.size})")
        lines.append(f"| {', '.join(map(str, split))} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
