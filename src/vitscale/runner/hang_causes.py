"""Finds the rank for which the others of a hanging run wait, by the collectives that each has entered.

A rank's step and phase are those of its host. The host of a GPU is a step or two ahead of it, so that in a hang of GPUs
its place says little. The flight recorder says which collective of which group a rank has entered, and all ranks of a
group enter the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vitscale.present.units import counted, listed
from vitscale.store.recorder_dumps import OpenCall, RecordedGroup, RecorderDump, read_dump

_DEFAULT_GROUP = "default_pg"
"""torch's description of the group of all ranks."""


class HangCause(NamedTuple):
    """The cause of a hang, as far as collectives show it."""

    sentence: str
    ranks: tuple[int, ...]
    """The ranks for which the others wait; empty where it is none of them."""


class RecorderFindings(NamedTuple):
    """The result of reading the recorders of all ranks."""

    cause: HangCause | None
    unavailable: str
    """Why they show no cause, as the end of a sentence; empty where they show one."""


class _Wait(NamedTuple):
    """The first collective of a group that has not ended."""

    group: str
    """In words: "group default_pg"."""
    call: OpenCall
    waiting: tuple[int, ...]
    """Ranks that have entered it."""
    absent: tuple[int, ...]
    """Ranks that have not."""
    unknown: tuple[int, ...]
    """Ranks of which nothing is known."""
    calls: Mapping[int, OpenCall]
    """Rank -> the collective as it entered it."""

    @property
    def name(self) -> str:
        """The collective in words: "all_reduce number 7 of group default_pg (1,024 elements)"."""
        elements = counted(self.call.elements, "element")
        return f"{self.call.operation} number {self.call.number} of {self.group} ({elements})"


def recorder_findings(folder: Path, world_size: int) -> RecorderFindings:
    """Read the dumps in a run's folder, and find for which ranks the others wait."""
    dumps = {}
    for rank in range(world_size):
        dump = read_dump(folder, rank)
        if dump is not None:
            dumps[rank] = dump
    readable = {rank: dump for rank, dump in dumps.items() if not dump.reason}
    if not readable:
        reasons = [dump.reason for dump in dumps.values()]
        return RecorderFindings(None, reasons[0] if reasons else "no rank has written down its collectives")
    cause = find_cause(readable, world_size)
    return RecorderFindings(cause, "" if cause is not None else "no collective is open whose ranks are all known")


def find_cause(dumps: Mapping[int, RecorderDump], world_size: int) -> HangCause | None:
    """Return the cause of a hang; None where no rank waits in a collective, or too little is known.

    Args:
        dumps: rank -> what it recorded.
        world_size: number of ranks, some of which may have no dump.
    """
    waits = _waits(dumps, world_size)
    waits_for_absent = [wait for wait in waits if wait.absent]
    if waits_for_absent:
        return _cause_of_absence(waits_for_absent)
    complete = [wait for wait in waits if not wait.unknown]
    for wait in complete:
        cause = _cause_of_mismatch(wait) or _cause_of_unbegun(wait)
        if cause is not None:
            return cause
    if not complete:
        return None
    wait = complete[0]
    return HangCause(
        f"all {len(wait.waiting)} ranks have entered {wait.name}, and it does not end: look at the network and the "
        "GPUs between them, not at one rank's program",
        (),
    )


def _waits(dumps: Mapping[int, RecorderDump], world_size: int) -> list[_Wait]:
    """Return the first open collective of each group that has one, by the name of the group."""
    groups: dict[str, dict[int, RecordedGroup]] = {}  # name -> rank -> its place
    for rank, dump in dumps.items():
        for group in dump.groups:
            groups.setdefault(group.name, {})[rank] = group
    waits = []
    for name, group_by_rank in sorted(groups.items()):
        wait = _wait_of_group(name, group_by_rank, dumps, world_size)
        if wait is not None:
            waits.append(wait)
    return waits


def _wait_of_group(
    name: str, group_by_rank: Mapping[int, RecordedGroup], dumps: Mapping[int, RecorderDump], world_size: int
) -> _Wait | None:
    """Return who waits for whom in a group's first open collective; None where all have ended.

    Args:
        name: the group's.
        group_by_rank: rank -> its place in the group, for ranks that have one.
        dumps: of all ranks.
        world_size: number of all ranks.
    """
    number = _first_open_number(group_by_rank.values())
    if number is None:
        return None
    call_by_rank = _calls_with_number(number, group_by_rank)
    members = _members(group_by_rank, world_size)
    members_with_dump = [rank for rank in members if rank in dumps]
    absent = [rank for rank in members_with_dump if _last_entered(group_by_rank.get(rank)) < number]
    return _Wait(
        group=_group_in_words(name, group_by_rank.values()),
        call=next(iter(call_by_rank.values())),
        waiting=tuple(call_by_rank),
        absent=tuple(absent),
        unknown=tuple(rank for rank in members if rank not in dumps),
        calls=call_by_rank,
    )


def _first_open_number(groups: Iterable[RecordedGroup]) -> int | None:
    """Return the number of the first collective that has not ended on some rank; None where all have.

    Args:
        groups: one group, as each of its ranks recorded it.
    """
    numbers = [group.open_calls[0].number for group in groups if group.open_calls]
    return min(numbers, default=None)


def _calls_with_number(number: int, group_by_rank: Mapping[int, RecordedGroup]) -> dict[int, OpenCall]:
    """Return rank -> its open call with this number, in the order of ranks; ranks without one are left out."""
    call_by_rank = {}
    for rank, group in sorted(group_by_rank.items()):
        for call in group.open_calls:
            if call.number == number:
                call_by_rank[rank] = call
    return call_by_rank


def _last_entered(group: RecordedGroup | None) -> int:
    """Return the number of the last collective that a rank entered in a group; 0 where it recorded no such group."""
    return 0 if group is None else group.last_entered


def _group_in_words(name: str, groups: Iterable[RecordedGroup]) -> str:
    """Return "group 0 (default_pg)"; "group mesh_shard" where its description is its name, or there is none."""
    descriptions = [group.description for group in groups if group.description]
    if not descriptions or descriptions[0] == name:
        return f"group {name}"
    return f"group {name} ({descriptions[0]})"


def _members(group_by_rank: Mapping[int, RecordedGroup], world_size: int) -> Sequence[int]:
    """Return the ranks of a group: as any of them knows them; else those that have used it."""
    for group in group_by_rank.values():
        if group.description == _DEFAULT_GROUP:
            return range(world_size)
        if group.members is not None:
            return [rank for rank in group.members if 0 <= rank < world_size]
    return sorted(group_by_rank)


def _cause_of_absence(waits: Sequence[_Wait]) -> HangCause:
    """Return the ranks that are waited for and wait for nobody; where there are none, that ranks wait for each other.

    Args:
        waits: collectives that some ranks have not entered; at least one.
    """
    waiting = {rank for wait in waits for rank in wait.waiting}
    for wait in waits:
        roots = tuple(rank for rank in wait.absent if rank not in waiting)
        if roots:
            verb = "has" if len(roots) == 1 else "have"
            waiting_verb = "waits" if len(wait.waiting) == 1 else "wait"
            return HangCause(
                f"rank {listed(roots)} {verb} not entered {wait.name}, in which rank {listed(wait.waiting)} "
                f"{waiting_verb}",
                roots,
            )
    clauses = [f"rank {listed(wait.waiting)} in {wait.name} for rank {listed(wait.absent)}" for wait in waits[:2]]
    sentence = f"ranks wait for each other, {' and '.join(clauses)}: they call collectives in unlike orders"
    return HangCause(sentence, ())


def _cause_of_mismatch(wait: _Wait) -> HangCause | None:
    """Return the ranks whose collective is another operation than that of most; None where all agree."""
    ranks_by_operation: dict[str, list[int]] = {}
    for rank, call in wait.calls.items():
        ranks_by_operation.setdefault(call.operation, []).append(rank)
    if len(ranks_by_operation) < 2:
        return None
    usual = max(ranks_by_operation, key=lambda operation: len(ranks_by_operation[operation]))
    clauses = [f"{operation} on rank {listed(ranks)}" for operation, ranks in ranks_by_operation.items()]
    others = tuple(rank for rank, call in wait.calls.items() if call.operation != usual)
    is_clear = len(ranks_by_operation[usual]) > len(others)
    sentence = f"collective number {wait.call.number} of {wait.group} is {' and '.join(clauses)}"
    return HangCause(f"{sentence}: ranks take unlike paths through the program", others if is_clear else ())


def _cause_of_unbegun(wait: _Wait) -> HangCause | None:
    """Return the ranks whose GPUs have not begun a collective that others' have; None where that does not tell them."""
    unbegun = tuple(rank for rank, call in wait.calls.items() if not call.has_begun)
    if not unbegun or len(unbegun) == len(wait.calls):
        return None
    verb = "has" if len(unbegun) == 1 else "have"
    noun = "GPU" if len(unbegun) == 1 else "GPUs"
    sentence = f"the {noun} of rank {listed(unbegun)} {verb} not begun {wait.name}, which all ranks have entered"
    return HangCause(f"{sentence}: an earlier kernel there does not end", unbegun)
