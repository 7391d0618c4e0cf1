from __future__ import annotations

from pathlib import Path

import pytest

import needs
from launching import FOLDER, PYTHON, help_of, hosts, launch, options, world
from vitscale.launchers.srun import Srun


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (1, 8), (8, 1), (2, 4)])
@pytest.mark.parametrize("interface", [None, "eth0"])
def test_the_exact_command(nodes: int, ranks: int, interface: str | None) -> None:
    argv = (
        "srun", "--job-name=0123456789ab-r0-a0",
        f"--nodes={nodes}", f"--ntasks={nodes * ranks}", f"--ntasks-per-node={ranks}",
        "--distribution=block", "--overlap", "--cpu-bind=none", "--mpi=none", "--export=ALL",
        "--kill-on-bad-exit=1",
        PYTHON, "-P", "-m", "vitscale.worker", str(FOLDER),
    )  # fmt: skip
    made = launch(Srun(), world(nodes, ranks), interface=interface)
    assert made.commands == (argv,)
    assert not made.per_host
    named = launch(Srun(), world(nodes, ranks), hosts(nodes), interface=interface).commands[0]
    assert named == (*argv[:5], "--nodelist=" + ",".join(f"node{n}" for n in range(nodes)), *argv[5:])


def test_srun_knows_every_option_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs.programs("srun")
    conf = tmp_path / "slurm.conf"  # srun does not even help without one
    conf.write_text("ClusterName=none\nSlurmctldHost=localhost\nNodeName=localhost\nPartitionName=all Nodes=ALL\n")
    monkeypatch.setenv("SLURM_CONF", str(conf))
    helped = help_of("srun", "--help")
    assert len(given := options(launch(Srun(), world(2, 2), hosts(2)).commands[0])) == 11
    # --cpu-bind stands in the help only where the cluster has a plugin for it.
    assert [option for option in given if option not in helped] in ([], ["--cpu-bind"])
