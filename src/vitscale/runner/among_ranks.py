"""Refuses to be one of several ranks: `srun vitscale run` and the like would start all ranks once for each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from vitscale.errors import RequestError


class RankMarks(NamedTuple):
    """The variables by which a process knows that a launcher has started it as a rank."""

    launcher: str
    """The launcher's command, in messages."""
    sign: str
    """A variable that this launcher alone sets."""
    number: str
    """The variable that holds the rank's number, from 0."""


_LAUNCHERS = (
    RankMarks("torchrun", sign="TORCHELASTIC_RUN_ID", number="RANK"),
    RankMarks("mpirun", sign="OMPI_COMM_WORLD_RANK", number="OMPI_COMM_WORLD_RANK"),
    RankMarks("srun", sign="SLURM_PROCID", number="SLURM_PROCID"),
)


def refuse_among_ranks(variables: Mapping[str, str]) -> None:
    """Refuse to go on in a process that a launcher has started as a rank other than the first.

    The first is let through: so is a shell that `srun --pty` has started, and a batch script.

    Args:
        variables: the process's environment.

    Raises:
        RequestError: it is such a rank.
    """
    for marks in _LAUNCHERS:
        number = variables.get(marks.number, "0")
        if marks.sign in variables and number != "0":
            raise RequestError(
                f"this is process {number} of several that {marks.launcher} has started, and vitscale starts all ranks "
                "itself, on all hosts",
                next_step=f"Write `vitscale run ... --launcher {marks.launcher}` without {marks.launcher} before it",
            )
