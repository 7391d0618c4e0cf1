"""The batch systems: what is known of each without asking it, and its own words for messages.

`vitscale.schedulers` has the code that talks to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSystemFacts:
    """Names of a batch system, its commands for messages, and the variables by which its jobs are known."""

    name: str
    """Its name in a study (`launch.scheduler`) and in records: "pbs"."""
    title: str
    """Its name in messages: "PBS"."""
    allocation_command: str
    """The command by which a user gets two nodes to work on by hand."""
    cancel_program: str
    """The command that cancels jobs by their ids."""
    list_command: str
    """The command that shows jobs; {names} stands for their names, with commas between."""
    job_id_variable: str
    """The variable that holds the job's id in every process of a job."""
    node_variable: str | None = None
    """A variable that jobs have too, and without which their nodes are not known; None where there is no such one."""
    is_found_by_variables: bool = True
    """Whether these variables are set in jobs alone, so that a study in a job need not name the batch system."""

    def has_job_around(self, variables: Mapping[str, str]) -> bool:
        """Whether a process with these environment variables runs in a job whose nodes are known."""
        has_nodes = self.node_variable is None or self.node_variable in variables
        return self.is_found_by_variables and self.job_id_variable in variables and has_nodes


SLURM = BatchSystemFacts(
    name="slurm",
    title="Slurm",
    allocation_command="salloc --nodes=2",
    cancel_program="scancel",
    list_command="squeue --name={names}",
    job_id_variable="SLURM_JOB_ID",
)
PBS = BatchSystemFacts(
    name="pbs",
    title="PBS",
    allocation_command="qsub -I -l select=2 -l place=scatter",
    cancel_program="qdel",
    list_command="qstat -u $USER",
    job_id_variable="PBS_JOBID",
    node_variable="PBS_NODEFILE",
)
LSF = BatchSystemFacts(
    name="lsf",
    title="LSF",
    allocation_command='bsub -Is -n 2 -R "span[ptile=1]" bash',
    cancel_program="bkill",
    list_command="bjobs -a",
    job_id_variable="LSB_JOBID",
    node_variable="LSB_MCPU_HOSTS",
)
FLUX = BatchSystemFacts(
    name="flux",
    title="Flux",
    allocation_command="flux alloc --nodes=2",
    cancel_program="flux cancel",
    list_command="flux jobs -a",
    job_id_variable="FLUX_ENCLOSING_ID",
    is_found_by_variables=False,  # Flux sets its variables in some processes outside jobs too
)
BATCH_SYSTEMS: Mapping[str, BatchSystemFacts] = {facts.name: facts for facts in (SLURM, PBS, LSF, FLUX)}
"""All batch systems of vitscale's own, by name."""

KUBERNETES = "kubernetes"
"""Name of the scheduler of pods. It is no batch system: a manifest has started the pods before vitscale runs."""
PODS_VARIABLE = "VITSCALE_PODS"
"""Variable of each pod of a manifest: the path of the set's hostfile, the first pod's name in its first line."""


def system_of_job(variables: Mapping[str, str]) -> BatchSystemFacts | None:
    """Return the batch system in whose job a process with these environment variables runs; None outside jobs.

    Flux is never returned: see `BatchSystemFacts.is_found_by_variables`.
    """
    for facts in BATCH_SYSTEMS.values():
        if facts.has_job_around(variables):
            return facts
    return None
