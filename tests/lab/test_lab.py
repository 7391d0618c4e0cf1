"""Hosts of a laboratory are to each other what hosts of a cluster are: names, links of known rate, ssh, cores."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import needs
from lab import traffic
from processes import alive, pid_in, wait_until
from vitscale.lab import Laboratory, laboratory

MEGABITS = 200.0
CORES = 0.4
ONE_SENDS_BYTES = 16 << 20


@pytest.fixture(scope="module")
def lab() -> Iterator[Laboratory]:
    needs.root_and("ip", "tc", "unshare", "nsenter", "ssh", "sshd", "pdsh")
    with laboratory(hosts=3, bandwidth_mbit=MEGABITS, cores_per_host=CORES, slots=2) as made:
        yield made


def said(lab: Laboratory, host: int, *argv: str) -> str:
    answer = subprocess.run(lab.command(host, argv), capture_output=True, text=True, check=False, timeout=300)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def python(lab: Laboratory, host: int, *argv: str) -> subprocess.Popen[str]:
    command = lab.command(host, [sys.executable, "-S", *argv])
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_the_hostfile_names_the_hosts_and_is_seen_inside(lab: Laboratory) -> None:
    assert lab.hostfile.read_text() == "host0 slots=2\nhost1 slots=2\nhost2 slots=2\n"
    assert said(lab, 1, "cat", str(lab.hostfile)) == lab.hostfile.read_text()


def test_each_host_has_its_name_and_its_address(lab: Laboratory) -> None:
    for number, (name, address) in enumerate(zip(lab.names, lab.addresses, strict=True)):
        assert said(lab, number, "uname", "-n").strip() == name == f"host{number}"
        assert address == f"10.77.0.{number + 1}"
        assert f" {address}/24 " in said(lab, number, "ip", "-oneline", "address", "show", "dev", lab.interface)
        assert sorted(said(lab, number, "ls", "/sys/class/net").split()) == sorted(["lo", lab.interface])


def test_every_host_reaches_every_other_by_name_over_ssh(lab: Laboratory) -> None:
    for number in range(3):
        names = said(lab, number, "pdsh", "-R", "ssh", "-w", ",".join(lab.names), "uname", "-n")
        assert sorted(names.split("\n")) == ["", *(f"{name}: {name}" for name in lab.names)]


def test_ssh_needs_nothing_of_the_users_and_works_by_address_too(lab: Laboratory) -> None:
    argv = ("env", "-u", "SSH_AUTH_SOCK", "HOME=/nonexistent", "ssh", lab.addresses[2], "uname", "-n")
    assert said(lab, 0, *argv).strip() == "host2"


def test_only_a_hosts_own_processes_are_seen_inside(lab: Laboratory) -> None:
    with python(lab, 1, "-c", "import signal; signal.pause()") as other:
        try:
            wait_until(lambda: len(lab.processes(1)) == 1, "a process runs on host1")
            seen = said(lab, 0, "ps", "-e", "-o", "args=").splitlines()
            assert len(seen) == 3  # the first process, sshd, ps itself
            assert lab.processes(0) == []
        finally:
            other.kill()
    wait_until(lambda: lab.processes(1) == [], "it is killed with what ran it")


def test_shared_memory_and_run_are_a_hosts_own_and_the_rest_is_shared(lab: Laboratory, tmp_path: Path) -> None:
    for folder in ("/dev/shm", "/run"):
        said(lab, 0, "touch", f"{folder}/vitscale-lab-test")
        assert "vitscale-lab-test" not in said(lab, 1, "ls", folder)
        assert not Path(folder, "vitscale-lab-test").exists()
    said(lab, 0, "touch", str(tmp_path / "shared"))
    assert said(lab, 1, "ls", str(tmp_path)) == "shared\n"


def megabits(lab: Laboratory, targets: dict[int, list[str]], senders: dict[int, int]) -> list[float]:
    """What every host receives per second while `targets` of each are sent to by all at once."""
    ends = [
        python(lab, host, traffic.__file__, str(senders.get(host, 0)), str(ONE_SENDS_BYTES), *targets.get(host, []))
        for host in sorted({*targets, *senders})
    ]
    answers = [end.communicate(timeout=120)[0].split() for end in ends]
    assert [end.returncode for end in ends] == [0] * len(ends)
    return [int(received) * 8e-6 / float(seconds) for received, seconds in answers if received != "0"]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("targets", "senders"),
    [
        ({0: ["host1"]}, {1: 1}),
        ({0: ["host1"], 1: ["host2"], 2: ["host0"]}, {0: 1, 1: 1, 2: 1}),
        ({1: ["host0"], 2: ["host0"]}, {0: 2}),
    ],
    ids=["one way", "a ring", "two to one"],
)
def test_a_link_carries_its_rate_each_way(
    lab: Laboratory, targets: dict[int, list[str]], senders: dict[int, int]
) -> None:
    """TCP gets 1448 of every 1514 bytes. A host's rate holds for all that it sends, and for all that it receives.

    A busy machine can only make it slower: the best of up to ten counts, and none may be faster.
    """
    rounds = [megabits(lab, targets, senders)]
    while max(map(min, rounds)) < 0.9 * MEGABITS and len(rounds) < 10:
        rounds.append(megabits(lab, targets, senders))
    assert max(map(min, rounds)) == pytest.approx(MEGABITS, rel=0.1)
    assert max(map(max, rounds)) <= MEGABITS


BUSY = """
import sys, time
used, began = time.process_time(), time.monotonic()
while time.monotonic() - began < float(sys.argv[1]):
    pass
print(time.process_time() - used, began, time.monotonic())
"""


@pytest.mark.alone
@pytest.mark.parametrize("cores", [CORES, 0.2])
def test_all_processes_of_a_host_share_its_cores(lab: Laboratory, cores: float) -> None:
    lab.slow(2, cores)
    try:
        assert lab.cores(2) == pytest.approx(cores)
        busy = [python(lab, 2, "-c", BUSY, "2") for _ in range(2)]
        used = [tuple(map(float, one.communicate(timeout=300)[0].split())) for one in busy]
    finally:
        lab.slow(2, CORES)
    # They begin one after the other: of the later one's time some is after the earlier one's end.
    rate = sum(cpu for cpu, _, _ in used) / (max(end for *_, end in used) - min(began for _, began, _ in used))
    assert 0.5 * cores < rate < 1.15 * cores  # others may use the machine too; nothing may use more than its share


@pytest.mark.alone
def test_what_ssh_starts_counts_against_the_hosts_cores(lab: Laboratory) -> None:
    groups = said(lab, 0, "ssh", "host1", "cat", "/proc/self/cgroup")
    assert f"/{lab.state.cgroup}/host1\n" in groups
    assert said(lab, 1, "cat", "/proc/self/cgroup") == groups


def test_a_pulled_cable_stops_everything_until_it_is_plugged_in(lab: Laboratory) -> None:
    reach = ("ssh", "-o", "ConnectTimeout=1", "host1", "true")
    lab.cut(1)
    try:
        assert said(lab, 1, "cat", f"/sys/class/net/{lab.interface}/carrier") == "0\n"
        assert subprocess.run(lab.command(0, reach), capture_output=True, check=False).returncode == 255
        said(lab, 0, "ssh", "host2", "true")
    finally:
        lab.mend(1)
    said(lab, 0, *reach[:2], "ConnectTimeout=30", *reach[3:])


# --- commands ------------------------------------------------------------------------------------------------------


def test_a_command_keeps_folder_environment_and_open_files(lab: Laboratory, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("from outside\n")
    script = "import os, sys; print(os.getcwd(), os.environ['GIVEN'], sys.argv[1:], sys.stdin.read())"
    with (tmp_path / "in").open() as given:
        answer = subprocess.run(
            lab.command(0, [sys.executable, "-c", script, "it's $HOME", "--", ""]),
            stdin=given,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"GIVEN": "a value"},
            check=True,
        )
    assert answer.stdout == f"{tmp_path} a value [\"it's $HOME\", '--', ''] from outside\n\n"


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", -9), ("kill -15 $$", -15)])
def test_a_command_ends_as_it_ended_inside(lab: Laboratory, script: str, code: int) -> None:
    assert subprocess.run(lab.command(0, ["sh", "-c", script]), check=False).returncode == code


def test_what_cannot_be_run_is_said(lab: Laboratory) -> None:
    answer = subprocess.run(lab.command(0, ["no-such-program"]), capture_output=True, text=True, check=False)
    assert answer.returncode == 127
    assert answer.stderr == "vitscale lab: 'no-such-program' cannot be run: No such file or directory\n"


def test_signals_reach_the_command(lab: Laboratory, tmp_path: Path) -> None:
    # Waited for and not handled: between a look for signals and `pause` one would be lost.
    script = (
        "import os, pathlib, signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        f"pathlib.Path({str(tmp_path / 'ready')!r}).write_text(f'{{os.getpid()}}\\n')\n"
        "signal.sigwait([signal.SIGTERM])\n"
        "sys.exit(5)\n"
    )
    with python(lab, 0, "-c", script) as running:
        pid_in(tmp_path / "ready")
        running.terminate()
        assert running.wait(60) == 5


COUNTING = """
import pathlib, signal, sys
ends = {signal.SIGINT, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, ends)
folder, count = pathlib.Path(sys.argv[1]), 0
(folder / "ready").write_text("1\\n")
while signal.sigwait(ends) == signal.SIGINT:
    count += 1
    (folder / "interrupted").write_text("1\\n")
sys.exit(count)
"""


def test_ctrl_c_reaches_the_command_once(lab: Laboratory, tmp_path: Path) -> None:
    """A terminal sends it to the command as well as to what runs it."""
    pid, terminal = pty.fork()
    if pid == 0:
        argv = lab.command(0, [sys.executable, "-S", "-c", COUNTING, str(tmp_path)])
        os.execv(argv[0], argv)  # noqa: S606 - no shell is wanted
    pid_in(tmp_path / "ready")
    os.write(terminal, b"\x03")
    pid_in(tmp_path / "interrupted")
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    os.close(terminal)


def test_a_command_dies_with_what_ran_it(lab: Laboratory) -> None:
    with python(lab, 0, "-c", "import signal; signal.pause()") as running:
        wait_until(lambda: lab.processes(0), "it runs")
        (inside,) = lab.processes(0)
        running.kill()
    wait_until(lambda: not alive(inside), "it is gone")


def test_orphans_inside_are_reaped(lab: Laboratory) -> None:
    said(lab, 0, "sh", "-c", "for one in 1 2 3; do (true &) & done")
    wait_until(lambda: "Z" not in said(lab, 0, "ps", "-e", "-o", "stat="), "no zombie is left")
