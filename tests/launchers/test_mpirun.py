from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

import needs
from launching import FOLDER, PYTHON, help_of, hosts, launch, options, world
from vitscale.errors import RequestError
from vitscale.launchers import usable_launcher
from vitscale.launchers.mpirun import Mpirun, mpirun_name
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


@pytest.mark.parametrize(("version", "said"), [("mpirun 9000", "'mpirun 9000'"), ("", "''")])
def test_an_mpi_that_is_not_known_is_refused_by_its_own_words(path: Path, version: str, said: str) -> None:
    is_installed(path, version)
    with pytest.raises(RequestError) as caught:
        usable_launcher("mpirun", world(1, 1))
    assert (
        f"{path}/mpirun is of an MPI that is not known here: {said}; known are Open MPI, MPICH, Intel MPI, Cray's "
        in (str(caught.value))
    )
    assert mpirun_name() is None


HYDRA_OPTIONS = {
    "MPICH": ("HYDRA build details:\n    Version:  5.0.2", ["-bind-to", "none"]),
    "Intel MPI": (
        "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)",
        ["-genv", "I_MPI_PIN", "0"],
    ),
}
"""Name of an MPI, its answer to --version, and the options by which it binds no rank."""


@pytest.mark.parametrize("name", HYDRA_OPTIONS)
@pytest.mark.parametrize(
    ("nodes", "ranks", "interface", "host_lines"),
    [
        (1, 4, "eth0", "localhost:4\n"),
        (2, 4, None, "node0:4\nnode1:4\n"),
        (3, 1, "eth0", "node0:1\nnode1:1\nnode2:1\n"),
    ],
)
def test_the_exact_command_of_hydra(
    path: Path, name: str, nodes: int, ranks: int, interface: str | None, host_lines: str
) -> None:
    version, unbound = HYDRA_OPTIONS[name]
    is_installed(path, version)
    argv = [
        str(path / "mpirun"), "-f", str(FOLDER / "mpirun.hostfile"),
        "-n", str(nodes * ranks), "-ppn", str(ranks), *unbound,
    ]  # fmt: skip
    if interface and nodes > 1:
        argv += ["-iface", "eth0"]
    argv += [PYTHON, "-P", "-m", "vitscale.worker", str(FOLDER)]
    made = launch(Mpirun(), world(nodes, ranks), hosts(nodes) if nodes > 1 else (), interface=interface)
    assert made.commands == (tuple(argv),)
    assert made.files == (("mpirun.hostfile", host_lines),)
    assert usable_launcher("mpirun", world(1, 1))
    assert mpirun_name() == name


def test_hydra_numbers_ranks_in_the_order_of_its_file(path: Path) -> None:
    """Also where this machine stands further down, unlike Open MPI."""
    is_installed(path, HYDRA_OPTIONS["MPICH"][0])
    node0, node1 = hosts(2)
    named = (node0, Host(socket.gethostname(), 2), node1)
    assert launch(Mpirun(), world(3, 2), named).hosts == named


def test_the_exact_command_of_pals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no mpirun, and is known by its path, wherever a link to it lies. Never run against a real one."""
    release = tmp_path / "opt/cray/pals/1.8/bin"
    release.mkdir(parents=True)
    (release / "mpiexec").write_text("#!/bin/sh\nexit 1\n")
    (release / "mpiexec").chmod(0o755)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/mpiexec"
    program.symlink_to(release / "mpiexec")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    made = launch(Mpirun(), world(2, 4), hosts(2))
    rank = (PYTHON, "-P", "-m", "vitscale.worker", str(FOLDER))
    assert made.commands == (
        (str(program), "-n", "8", "--ppn", "4", "--hosts", "node0,node1", "--cpu-bind", "none", *rank),
    )
    assert made.files == ()
    alone = launch(Mpirun(), world(1, 4)).commands
    assert alone == ((str(program), "-n", "4", "--ppn", "4", "--cpu-bind", "none", *rank),)
    assert mpirun_name() == "Cray's PALS"


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
