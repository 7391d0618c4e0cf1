"""recorder-rank-K.json in a run's folder: the collectives that rank K had entered when its run hung.

It is a short form of torch's flight recorder, which each rank writes when the driver asks for its stacks.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from vitscale.base.files import read_record
from vitscale.trial.fields import Spec


class OpenCall(Spec):
    """A collective that a rank has entered and that has not ended."""

    number: int
    """Its number in its group, from 1; the same on all ranks of the group."""
    operation: str = Field(max_length=80)
    elements: int
    """Elements of its input."""
    has_begun: bool = False
    """Whether the GPU has begun it; false too where that is unknown, as on hosts."""


class RecordedGroup(Spec):
    """A rank's place in one process group."""

    name: str = Field(max_length=200)
    """The same on all ranks."""
    description: str = Field(max_length=200)
    """torch's word for what it is for, as "default_pg"; empty where there is none."""
    members: tuple[int, ...] | None
    """Its ranks by their numbers among all; null where they are unknown."""
    last_entered: int
    """Number of the last collective that the rank has entered; 0 before the first one."""
    open_calls: tuple[OpenCall, ...]
    """The first ones of those that have not ended, in the order of their numbers."""


class RecorderDump(Spec):
    """The groups of one rank; or why they are unknown."""

    groups: tuple[RecordedGroup, ...] = ()
    reason: str = Field(default="", max_length=400)
    """Why the recorder could not be read, as the end of a sentence; empty where it could."""


def dump_path(run_folder: Path, rank: int) -> Path:
    """Return the path of a rank's dump."""
    return run_folder / f"recorder-rank-{rank}.json"


def read_dump(run_folder: Path, rank: int) -> RecorderDump | None:
    """Return a rank's dump; None where it has written none, or none that this version reads."""
    try:
        return RecorderDump.model_validate_json(read_record(dump_path(run_folder, rank)))
    except (OSError, ValueError):
        return None
