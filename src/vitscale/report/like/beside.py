"""The published measurements beside one's own: of the same dataset, micro-batch, mode, place and model only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vitscale.published import Fact, Layout, published
from vitscale.report.like.series import SAME, Series

_MODEL, _IMAGE_SIZE = "vit-b16", 224


@dataclass(frozen=True)
class Beside:
    """Published facts for the series of a figure."""

    facts: tuple[tuple[Series, tuple[Fact, ...]], ...] = ()
    note: str = ""
    """What sets them apart, or why none are drawn; empty where there is nothing to say."""

    def __bool__(self) -> bool:
        return bool(self.facts)


def no_points(_series: Sequence[Series]) -> Beside:
    """Of a study that published none."""
    return Beside()


def beside(series: Sequence[Series]) -> Beside:
    """What was published of the workloads of these series."""
    found, other_work, themselves = [], False, False
    seen: set[tuple[Fact, ...]] = set()
    for one in series:
        facts = _facts(one)
        if not facts or facts in seen:
            continue
        if _is_published(one, facts):
            themselves = True
        elif not _same_work(one):
            other_work = True
        else:
            seen.add(facts)
            found.append((one, facts))
    if found:
        first = found[0][1][0]
        hardware = ", ".join(dict.fromkeys(name for _, facts in found for fact in facts for name in fact.devices))
        note = (
            f"hollow grey: published (arXiv {published().source.arxiv}), {hardware}, {first.precision}; other hardware"
        )
        return Beside(tuple(found), note)
    if themselves:
        return Beside(note="these are the published measurements themselves")
    if other_work:
        return Beside(note="published points left out: they are of ViT-B/16 at 224 x 224, other work than this")
    return Beside()


def _facts(one: Series) -> tuple[Fact, ...]:
    layout: Layout = "single-node" if one.place == "one host" else "one-gpu-per-node"
    if one.mode == "strong-global":
        return ()
    weak = one.mode == "weak"
    unlike = one.place == "several unlike hosts"
    clusters = dict.fromkeys(fact.cluster for fact in published().facts)
    cluster = next(name for name in clusters if (name in published().unlike_clusters) == unlike)
    found = published().of(dataset=one.dataset, micro_batch=one.micro_batch, layout=layout, weak=weak, cluster=cluster)
    if layout == "single-node" or not found or found[0].gpus == 1:
        return found
    # On one GPU both layouts are the same.
    alone = published().of(
        dataset=one.dataset, micro_batch=one.micro_batch, layout="single-node", weak=weak, cluster=cluster
    )
    return (*(fact for fact in alone if fact.gpus == 1), *found)


def _same_work(one: Series) -> bool:
    """Whether every trial trains what was published: the model, its images, how many of them, and no accumulation."""
    for member in one.members:
        trial = member.trial.trial
        share = member.gpus / 10 if one.mode == "weak" else 1.0
        model = member.trial.model_name, trial.model.image_size, trial.train.grad_accum
        if model != (_MODEL, _IMAGE_SIZE, 1) or abs(trial.data.fraction - share) > 1e-9:
            return False
    return True


def _is_published(one: Series, facts: Sequence[Fact]) -> bool:
    """Whether these are the published measurements: at half of the GPU counts or more the time is the very same."""
    times = {fact.gpus: fact.epoch_seconds for fact in facts}
    same = [
        abs(member.trial.epoch_seconds.value / times[member.gpus] - 1) < SAME
        for member in one.members
        if member.trial.epoch_seconds is not None and member.gpus in times
    ]
    return 2 * sum(same) >= len(same) > 0
