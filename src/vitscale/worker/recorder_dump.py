"""Writes down which collectives this rank has entered, for the driver of a run that hangs.

Called on a thread beside the one that hangs. Nothing here imports torch: a rank that has not imported it yet is in no
collective.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

from vitscale.processes.launch_file import RECORDER_RING
from vitscale.profiles.flight_recorder import (
    DUMP_OF_NCCL,
    DUMP_OF_OTHERS,
    GroupMembers,
    UnreadableRecorder,
    recorded_groups,
)
from vitscale.store import write_record
from vitscale.store.recorder_dumps import RecordedGroup, RecorderDump, dump_path

_MOST_REASON_CHARACTERS = 400


def write_recorder_dump(folder: Path, rank: int) -> None:
    """Writes this rank's dump into the run's folder; does nothing where there is no room for it."""
    dump = recorder_dump()
    with contextlib.suppress(OSError):
        write_record(dump_path(folder, rank), dump.model_dump_json())


def recorder_dump() -> RecorderDump:
    """Returns this rank's place in each of its groups, or why it is unknown."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    if c10d is None:
        return RecorderDump(reason="this rank has not begun to import torch.distributed")
    dumps = [
        dump for dump in (getattr(c10d, name, None) for name in (DUMP_OF_NCCL, DUMP_OF_OTHERS)) if dump is not None
    ]
    if not dumps:
        return RecorderDump(reason="this torch has no flight recorder that can be read as JSON")
    own_groups = _own_groups()
    by_name: dict[str, RecordedGroup] = {}
    try:
        for dump in dumps:
            for group in recorded_groups(dump(includeCollectives=True, onlyActive=False), own_groups):
                # A backend's recorder has nothing of the groups of another one.
                if group.last_entered or group.name not in by_name:
                    by_name[group.name] = group
    except UnreadableRecorder as error:
        return RecorderDump(reason=str(error)[:_MOST_REASON_CHARACTERS])
    if own_groups and not any(group.last_entered for group in by_name.values()):
        return RecorderDump(groups=tuple(by_name.values()), reason=_nothing_recorded())
    return RecorderDump(groups=tuple(by_name.values()))


def _nothing_recorded() -> str:
    """Returns why a recorder may be empty."""
    return f"the flight recorder has no collective (it is off where {RECORDER_RING[0]} is 0)"


def _own_groups() -> list[GroupMembers]:
    """Returns the groups of this rank, from torch's own table of them; empty where this torch has it elsewhere."""
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    groups = []
    with contextlib.suppress(AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        for group, name in list(module._world.pg_names.items()):
            ranks = tuple(sorted(module._world.pg_group_ranks[group]))
            groups.append(GroupMembers(str(name), str(group.group_desc), ranks))
    return groups
