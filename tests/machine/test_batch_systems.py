"""By which variables the job around a process is found."""

from __future__ import annotations

import pytest

from vitscale.machine.batch_systems import BATCH_SYSTEMS, FLUX, LSF, PBS, SLURM, BatchSystemFacts, system_of_job


@pytest.mark.parametrize(
    ("variables", "system"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "12"}, SLURM),
        ({"PBS_JOBID": "12.pbs1"}, None),  # PBS names no nodes
        ({"PBS_JOBID": "12.pbs1", "PBS_NODEFILE": "/var/nodes"}, PBS),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "node1 8"}, LSF),
        ({"LSB_MCPU_HOSTS": "node1 8"}, None),
        ({"FLUX_ENCLOSING_ID": "f1"}, None),  # also outside jobs
    ],
)
def test_the_job_around_a_process(variables: dict[str, str], system: BatchSystemFacts | None) -> None:
    assert system_of_job(variables) is system


def test_no_two_have_a_word_in_common() -> None:
    for field in ("title", "allocation_command", "cancel_program", "list_command", "job_id_variable"):
        words = {getattr(system, field) for system in BATCH_SYSTEMS.values()}
        assert len(words) == len(BATCH_SYSTEMS)
    assert FLUX.list_command.format(names="a") == "flux jobs -a"
    assert SLURM.list_command.format(names="a,b") == "squeue --name=a,b"
