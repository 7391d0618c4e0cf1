"""The Slurm that tests run on: up in a moment, and nothing of it is left."""

from __future__ import annotations

import psutil

from driving import processes_naming
from lab.slurm_cluster import slurm_cluster
from processes import alive, wait_until


def step_daemons() -> set[int]:
    """The processes that stand around the steps of jobs; those of other clusters may end meanwhile."""
    named = [process.pid for process in psutil.process_iter(["name"]) if process.info["name"] == "slurmstepd"]
    return set(filter(alive, named))


def test_three_nodes_come_and_go() -> None:
    before = step_daemons()
    with slurm_cluster(nodes=3) as cluster:
        folder = cluster.folder
        nodes = cluster.ask("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        assert nodes == ["node0 idle", "node1 idle", "node2 idle"]
        # A process that has left its job's session and parent: Slurm's linuxproc does not follow it.
        escape = "setsid sleep 600.75 > /dev/null 2>&1 & sleep 600.75"
        cluster.ask("sbatch", "--nodes=3", "--output=/dev/null", f"--wrap={escape}")
        wait_until(lambda: len(processes_naming("600.75")) >= 2, "the job runs")
    assert not folder.exists()
    assert processes_naming("600.75") == []
    assert processes_naming(folder) == []
    assert step_daemons() <= before
