"""Hosts of a hostfile: what is sent to them, and real host agents behind a program that stands for ssh."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launching import FOLDER, PYTHON, BareLauncher, launch, world
from processes import wait_until
from study_factory import EIGHT_CORES
from vitscale.errors import RequestError
from vitscale.launchers import LAUNCHERS
from vitscale.launchers.mpirun import Mpirun
from vitscale.launchers.torchrun import Torchrun
from vitscale.machine.hardware import this_machine
from vitscale.machine.hosts import Host
from vitscale.processes.host_agent import end_all, processes_of_run
from vitscale.processes.launch_file import name_of
from vitscale.runner.one_run import launch_plan, start_ranks
from vitscale.schedulers import Job, hostfile
from vitscale.schedulers.hostfile import Hostfile
from vitscale.study.sections import LaunchSection

ELSEWHERE = "198.51.100.1"  # set aside for documentation (RFC 5737): nobody has it
HERE = Host(socket.gethostname(), 4)
NODE1 = Host("198.51.100.7", 4)
SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=5", "-o",
       "ServerAliveCountMax=4", "--"]  # fmt: skip
ODD = Path('/results/it\'s a "folder"; $(touch x) &')


def agent(node: int, folder: Path) -> list[str]:
    return [
        PYTHON, "-P", "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}", "--rdzv-backend=static",
        "--rdzv-conf=timeout=300", f"--master-addr={HERE.name}", "--master-port=29500", "--nproc-per-node=2",
        "--max-restarts=0", "-m", "vitscale.worker", str(folder),
    ]  # fmt: skip


# --- what is sent --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", [FOLDER, ODD, Path("/results/new\nline")])
def test_an_agent_runs_here_as_it_is_and_elsewhere_by_ssh_under_a_host_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    cwd = tmp_path / "it's home"
    cwd.mkdir()
    monkeypatch.chdir(cwd)
    hosts = (HERE, NODE1)
    made = launch(Torchrun(), world(2, 2), hosts, folder=folder)
    here, there = map(list, Hostfile(hosts).adapt(made).commands)
    assert here == agent(0, folder)
    assert there[:-1] == [*SSH, "198.51.100.7"]
    host_agent = [PYTHON, "-P", "-m", "vitscale.processes.host_agent", str(folder), "--", *agent(1, folder)]
    assert there[-1] == f"cd {shlex.quote(str(cwd))} && exec " + " ".join(map(shlex.quote, host_agent))


def test_the_line_for_the_other_host_to_the_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    monkeypatch.setattr(sys, "executable", "/opt/py thon/bin/python")
    folder = Path("/results/it's/runs/0-r0-a0")
    made = launch(Torchrun(), world(1, 1), (NODE1,), folder=folder)
    (command,) = Hostfile((NODE1,)).adapt(made).commands
    quoted = "'/results/it'\"'\"'s/runs/0-r0-a0'"
    assert command[-1] == (
        f"cd / && exec '/opt/py thon/bin/python' -P -m vitscale.processes.host_agent {quoted} -- "
        f"{PYTHON} -P -m torch.distributed.run "
        f"--standalone --nproc-per-node=1 --max-restarts=0 -m vitscale.worker {quoted}"
    )


def test_a_shell_gives_every_word_back_as_it_was(tmp_path: Path) -> None:
    """What sshd does with the line."""
    made = launch(Torchrun(), world(1, 1), (NODE1,), folder=ODD)
    (command,) = Hostfile((NODE1,)).adapt(made).commands
    shown = command[-1].replace(" && exec ", " && printf '%s\\0' ")
    answer = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, check=True, cwd=tmp_path)
    words = answer.stdout.split("\0")[:-1]
    assert words == [PYTHON, "-P", "-m", "vitscale.processes.host_agent", str(ODD), "--", *made.commands[0]]
    assert not [*tmp_path.iterdir()]


def test_a_command_for_all_hosts_is_run_once_and_here() -> None:
    hosts = (HERE, NODE1)
    made = launch(Mpirun(), world(2, 2), hosts)
    assert Hostfile(hosts).adapt(made).commands == made.commands


# --- hosts for worlds ----------------------------------------------------------------------------------------------

MIXED = (Host("a", 2), Host("b", 4), Host("c"), Host("d", 4))


@pytest.mark.parametrize(
    ("nodes", "ranks", "names"),
    [(1, 1, "a"), (1, 2, "a"), (1, 4, "b"), (2, 2, "ab"), (2, 4, "bc"), (3, 4, "bcd"), (4, 2, "abcd"), (1, 9, "c")],
)
def test_the_first_hosts_with_room(nodes: int, ranks: int, names: str) -> None:
    assert "".join(host.name for host in Hostfile(MIXED).hosts(world(nodes, ranks))) == names


def test_too_few_hosts_are_refused_with_those_there_are() -> None:
    with pytest.raises(RequestError) as caught:
        Hostfile(MIXED).hosts(world(4, 4))
    assert str(caught.value) == (
        "4 hosts with room for 4 ranks each are needed, and the hostfile has 3. Valid: a slots=2, b slots=4, "
        "c slots=any, d slots=4. Add hosts or slots, or use fewer ranks in scaling.gpus."
    )
    with pytest.raises(RequestError, match="5 hosts with room for 1 rank each are needed, and the hostfile has 4"):
        Hostfile(MIXED).hosts(world(5, 1))


def test_slots_are_those_of_the_smallest_host() -> None:
    assert Hostfile(MIXED).slots() == 2
    assert Hostfile((Host("a"), Host("b"))).slots() is None


def test_the_machine_is_the_one_described_or_else_this_one() -> None:
    assert Hostfile(MIXED, EIGHT_CORES).machine() is EIGHT_CORES
    assert Hostfile(MIXED).machine().cores == this_machine().cores


def test_srun_has_hosts_of_its_own() -> None:
    scheduler = Hostfile(MIXED)
    assert scheduler.refuses("srun", world(2, 2)) == (
        "srun takes its hosts from Slurm, not from a hostfile; use torchrun, deepspeed or mpirun"
    )
    assert {scheduler.refuses(name, world(2, 2)) for name in ("torchrun", "deepspeed", "mpirun")} == {None}


# --- real host agents ----------------------------------------------------------------------------------------------

# Stands for ssh: hands the last word to a shell that has nothing of the driver's, in a session of its own.
FAKE_SSH = """#!/bin/sh
printf '%s\\n' "$*" >> {log}
[ -e {cut} ] && exit 255
for line; do :; done
exec setsid --wait env -i PATH="$PATH" {lookup} sh -c "$line"
"""


class Elsewhere:
    """A host that `ssh` reaches, which is this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cut = folder / "cut"
        """Once it exists, ssh reaches it no more."""
        self.sent = folder / "sent"
        program = folder / "bin" / "ssh"
        program.parent.mkdir()
        tests = Path(__file__).parents[1]
        lookup = shlex.quote(f"PYTHONPATH={tests.parent / 'src'}{os.pathsep}{tests}")
        program.write_text(FAKE_SSH.format(log=self.sent, cut=self.cut, lookup=lookup))
        program.chmod(0o755)
        self.started: list[Job] = []

    def start(self) -> tuple[Job, Path]:
        """One rank of tests/arriving_ranks.py there; returns once it has arrived."""
        run = self.folder / "it's a $(folder)"
        run.mkdir()
        scheduler = Hostfile((Host(ELSEWHERE, 1),))
        section = LaunchSection(environment={"ARRIVING": 'it\'s "quoted"; $(exit)\nand more'})
        spawn = launch_plan(scheduler, section, "bare", world(1, 1), run, "arriving_ranks")
        self.started.append(start_ranks(spawn, scheduler, section, environment={}))
        wait_until(lambda: (run / "arrived-0.json").exists(), "the rank arrives")
        return self.started[-1], run


@pytest.fixture(autouse=True)
def bare_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bare` starts a rank by its own command."""
    monkeypatch.setitem(LAUNCHERS, "bare", BareLauncher())


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    made = Elsewhere(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    yield made
    for started in made.started:
        end_all(started.token)
        started.heartbeats.close()


def test_a_rank_elsewhere_is_told_everything_and_ended_by_asking(elsewhere: Elsewhere) -> None:
    started, run = elsewhere.start()
    arrived = json.loads((run / "arrived-0.json").read_text())
    assert arrived["place"] == [0, 1, 0]
    assert arrived["variables"]["ARRIVING"] == 'it\'s "quoted"; $(exit)\nand more'
    wait_until(lambda: 0 in started.heartbeats.statuses(), "it is heard of")
    assert len(processes_of_run(started.token)) == 2, "ssh's process here, and the rank there"
    assert started.end() == ()
    assert not processes_of_run(started.token)
    assert started.token not in elsewhere.sent.read_text(), "every user reads argvs"
    assert (
        elsewhere.sent.read_text()
        .splitlines()[-1]
        .endswith(f"-- {ELSEWHERE} {PYTHON} -P -m vitscale.processes.host_agent --end {name_of(started.token)}")
    )


def test_one_that_ssh_does_not_reach_any_more_ends_by_itself(elsewhere: Elsewhere) -> None:
    started, _ = elsewhere.start()
    elsewhere.cut.touch()
    assert started.end() == (ELSEWHERE,)
    wait_until(lambda: not processes_of_run(started.token), "the rank has ended")


def test_a_host_that_answers_without_vitscale_is_not_taken_for_a_silent_one(elsewhere: Elsewhere) -> None:
    started, _ = elsewhere.start()
    (elsewhere.folder / "bin" / "ssh").write_text("#!/bin/sh\nexit 127\n")
    assert started.end() == ()
    wait_until(lambda: not processes_of_run(started.token), "the rank has ended")


def test_a_slow_host_is_not_taken_for_a_silent_one(elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    """ssh gives up by itself one that it does not reach."""
    started, _ = elsewhere.start()
    (elsewhere.folder / "bin" / "ssh").write_text("#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setattr(hostfile, "_END_SECONDS", 0.2)
    assert started.end() == ()
    wait_until(lambda: not processes_of_run(started.token), "the rank has ended")
