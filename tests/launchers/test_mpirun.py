from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

import needs
from launching import FOLDER, PYTHON, help_of, hosts, launch, options, world
from vitscale.errors import RequestError
from vitscale.launchers import usable_launcher
from vitscale.launchers.mpirun import Mpirun
from vitscale.machine.hosts import Host


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH, with an mpirun in it."""
    (tmp_path / "bin").mkdir()
    is_installed(tmp_path / "bin", "mpirun (Open MPI) 4.1.4")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "bin"


def is_installed(folder: Path, version: str) -> None:
    program = folder / "mpirun"
    program.write_text(f"#!/bin/sh\n[ \"$*\" = --version ] && echo '{version}'\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("nodes", "ranks", "hostfile"),
    [
        (1, 1, "localhost slots=1\n"),
        (1, 8, "localhost slots=8\n"),
        (8, 1, "".join(f"node{n} slots=1\n" for n in range(8))),
        (2, 4, "node0 slots=4\nnode1 slots=4\n"),
    ],
)
@pytest.mark.parametrize("interface", [None, "eth0"])
@pytest.mark.parametrize("root", [False, True])
def test_the_exact_command(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: int,
    ranks: int,
    hostfile: str,
    interface: str | None,
    root: bool,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    argv = [
        str(path / "mpirun"), "-np", str(nodes * ranks), "--hostfile", str(FOLDER / "mpirun.hostfile"),
        "--map-by", f"ppr:{ranks}:node", "--bind-to", "none",
    ]  # fmt: skip
    if interface and nodes > 1:  # Open MPI 5 refuses to start over loopback, and on one machine has no need to
        argv += ["--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0"]
    if root:
        argv += ["--allow-run-as-root"]
    argv += [PYTHON, "-P", "-m", "vitscale.worker", str(FOLDER)]
    made = launch(Mpirun(), world(nodes, ranks), hosts(nodes) if nodes > 1 else (), interface=interface)
    assert made.commands == (tuple(argv),)
    assert made.files == (("mpirun.hostfile", hostfile),)
    assert not made.per_host


def test_one_node_may_be_another_host(path: Path) -> None:
    assert launch(Mpirun(), world(1, 2), hosts(1)).files == (("mpirun.hostfile", "node0 slots=2\n"),)


def test_ranks_meet_on_this_machine_which_mpirun_numbers_first(path: Path) -> None:
    """Wherever the hostfile has it: Open MPI 4 lists its own host before all others."""
    own = Host(socket.gethostname(), 2)
    node0, node1 = hosts(2)
    made = launch(Mpirun(), world(3, 2), (node0, own, node1))
    assert made.hosts == (own, node0, node1)
    assert made.files == (("mpirun.hostfile", f"{own.name} slots=2\nnode0 slots=2\nnode1 slots=2\n"),)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (
            "HYDRA build details:\n    Version:  4.1.2",
            "is MPICH's or Intel MPI's (hydra); put Open MPI's first in PATH",
        ),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11", "is MPICH's or Intel MPI's (hydra)"),
        ("mpirun 9000", "is not Open MPI's: 'mpirun 9000'; put Open MPI's first in PATH, or use launcher = 'srun'"),
        ("", "is not Open MPI's: ''"),
    ],
)
def test_other_mpis_are_refused_by_name(path: Path, version: str, said: str) -> None:
    is_installed(path, version)
    with pytest.raises(RequestError) as caught:
        usable_launcher("mpirun", world(1, 1))
    assert f"{path}/mpirun {said}" in str(caught.value)


@pytest.mark.parametrize("version", ["mpirun (Open MPI) 4.1.4", "mpirun (Open MPI) 5.0.10"])
def test_open_mpi_is_taken(path: Path, version: str) -> None:
    is_installed(path, version)
    assert usable_launcher("mpirun", world(1, 1))
    with pytest.raises(RequestError, match="2 nodes need 2 hosts, and none are named"):
        usable_launcher("mpirun", world(2, 1))


def test_mpirun_knows_every_option_it_is_given() -> None:
    needs.programs("mpirun")
    argv = launch(Mpirun(), world(2, 2), hosts(2), interface="eth0").commands[0]
    if "Open MPI) 4." not in help_of("mpirun", "--version"):
        pytest.skip("only Open MPI 4 lists its options; tests/lab starts ranks with them")
    helped = help_of("mpirun", "--allow-run-as-root", "--help", "all")
    given = options(argv)
    assert {"--hostfile", "--map-by", "--bind-to", "--mca"} <= set(given)
    assert [option for option in [*given, "-np"] if option not in helped] == []
