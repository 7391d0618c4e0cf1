"""What a rank records of where it runs."""

from __future__ import annotations

import pytest

from vitscale.worker.surroundings import allocation


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"SLURM_JOB_ID": "4711", "SLURM_ARRAY_JOB_ID": "4700"}, "slurm 4711"),
        ({"PBS_JOBID": "99.head"}, "pbs 99.head"),
        ({"LSB_JOBID": "12"}, "lsf 12"),
        ({"SLURM_JOB_ID": ""}, None),
        ({}, None),
    ],
)
def test_the_job_that_holds_the_hosts(variables: dict[str, str], named: str | None) -> None:
    assert allocation(variables) == named
