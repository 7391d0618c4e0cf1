"""Who starts `vitscale run` by a launcher is told to leave the launcher out."""

from __future__ import annotations

import pytest

from vitscale.errors import RequestError
from vitscale.runner.among_ranks import refuse_among_ranks

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "3", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("variables", "launcher", "number"),
    [
        (TORCHRUN, "torchrun", 3),
        (TORCHRUN | {"SLURM_PROCID": "1"}, "torchrun", 3),
        (TORCHRUN | {"RANK": "0", "SLURM_PROCID": "1"}, "srun", 1),
        ({"SLURM_PROCID": "1"}, "srun", 1),
        ({"OMPI_COMM_WORLD_RANK": "2", "SLURM_PROCID": "0"}, "mpirun", 2),
    ],
)
def test_a_rank_but_the_first_is_refused(variables: dict[str, str], launcher: str, number: int) -> None:
    with pytest.raises(RequestError) as caught:
        refuse_among_ranks(variables)
    assert f"this is process {number} of several that {launcher} has started" in str(caught.value)
    assert f"Write `vitscale run ... --launcher {launcher}` without {launcher} before it" in str(caught.value)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        TORCHRUN | {"RANK": "0"},
        {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # a batch script, or `srun --pty bash`
        {"RANK": "1", "WORLD_SIZE": "2"},  # a pod that its operator has numbered
    ],
)
def test_others_go_on(variables: dict[str, str]) -> None:
    refuse_among_ranks(variables)
