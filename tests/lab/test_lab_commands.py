"""`vitscale lab` as a user types it: what it prints, and what bad input gets."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import needs
from driving import vitscale
from vitscale.errors import RequestError, VitscaleError
from vitscale.lab import LabPlan, down, laboratories, parse_bandwidth, processes, state, up

NAME = f"said-{os.getpid()}"


@pytest.fixture(scope="module")
def printed() -> Iterator[str]:
    """What `up` printed; the lab is there as long as the tests run."""
    needs.root_and("ip", "tc", "unshare", "nsenter", "ssh", "sshd")
    try:
        arguments = ("--hosts", "2", "--bandwidth", "0.5gbit", "--cores-per-host", "0.4", "--slots", "3")
        answer = vitscale("lab", "up", "--name", NAME, *arguments)
        assert (answer.returncode, answer.stderr) == (0, "")
        yield answer.stdout
    finally:
        down(NAME)


def test_up_prints_the_hostfile_and_the_exact_commands(printed: str) -> None:
    program = "vitscale" if shutil.which("vitscale") else f"{sys.executable} -P -m vitscale"
    hostfile = f"/run/vitscale-lab-{NAME}/hostfile"
    assert printed.splitlines() == [
        f"Lab '{NAME}': host0, host1; 500 Mbit/s to and from each, 0.4 cores for each.",
        f"Hostfile: {hostfile}",
        f"A study:  {program} lab exec --name {NAME} host0 -- "
        f"{program} run STUDY.toml --hostfile {hostfile} --launcher mpirun",
        f"A shell:  {program} lab exec --name {NAME} host0 -- bash",
        f"The end:  {program} lab down --name {NAME}",
    ]
    assert Path(hostfile).read_text() == "host0 slots=3\nhost1 slots=3\n"
    assert Path(hostfile).parent.stat().st_mode & 0o777 == 0o700


def test_the_printed_command_runs_the_tool_on_a_host(printed: str) -> None:
    line = next(line for line in printed.splitlines() if line.startswith("A study:"))
    argv = line.removeprefix("A study:").split()
    argv[argv.index("run") :] = ["--version"]
    answer = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert answer.stdout.startswith("vitscale ")


def test_exec_passes_arguments_and_the_exit_code_on(printed: str, tmp_path: Path) -> None:
    script = "import os, sys; print(os.uname().nodename, os.getcwd(), sys.argv[1:]); sys.exit(9)"
    given = ["--name", "-x", "two words"]
    argv = ["lab", "exec", "--name", NAME, "host1", "--", sys.executable, "-c", script, *given]
    answer = vitscale(*argv, cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (9, f"host1 {tmp_path} {given}\n")


@pytest.mark.parametrize(
    ("verb", "said", "code"),
    [(["down"], "vitscale", 2), (["exec", "host1", "--", "true"], "vitscale", 2), (["status"], "note", 0)],
)
def test_a_lab_is_not_ended_from_its_own_hosts(printed: str, verb: list[str], said: str, code: int) -> None:
    """Process ids mean others there."""
    named = [] if verb == ["status"] else ["--name", NAME]
    inside = [sys.executable, "-m", "vitscale", "lab", verb[0], *named, *verb[1:]]
    answer = vitscale("lab", "exec", "--name", NAME, "host0", "--", *inside)
    assert (answer.returncode, answer.stdout) == (code, "")
    assert answer.stderr.startswith(f"{said}: lab '{NAME}' was made elsewhere: this is one of its hosts, or another")


def test_status_tells_of_every_host(printed: str) -> None:
    found = json.loads(vitscale("lab", "status", "--json").stdout)
    assert found["hostfiles"][NAME] == f"/run/vitscale-lab-{NAME}/hostfile"
    assert [host for host in found["hosts"] if host["lab"] == NAME] == [
        {
            "lab": NAME,
            "host": f"host{number}",
            "address": f"10.77.0.{number + 1}",
            "slots": 3,
            "bandwidth_mbit": 500.0,
            "cores": 0.4,
            "state": "up",
            "processes": 0,
        }
        for number in (0, 1)
    ]
    assert sum(NAME in line for line in vitscale("lab", "status").stdout.splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["up", "--hosts", "0"], "hosts: 0. Valid: 1 to 64."),
        (["up", "--hosts", "65"], "hosts: 65. Valid: 1 to 64."),
        (["up", "--slots", "0"], "slots: 0. Valid: 1 to 1024."),
        (["up", "--cores-per-host", "0"], "cores per host: 0.0. Valid: 0.05 to"),
        (["up", "--cores-per-host", "nan"], "cores per host: nan. Valid: 0.05 to"),
        (["up", "--bandwidth", "fast"], "'fast' is no bandwidth. Valid: a number and mbit or gbit, from 1mbit to"),
        (["up", "--name", "../etc"], "'../etc' cannot be the name of a lab. Valid: at most 31 of a-z, 0-9 and -"),
        (["down", "--name", "a/b"], "'a/b' cannot be the name of a lab."),
        (["exec", "--name", "no-such-lab", "host0", "--", "ls"], "there is no lab 'no-such-lab'."),
        (
            ["exec", "--name", NAME, "host2", "--", "ls"],
            "unknown host 'host2'. Did you mean 'host1'? Valid: host0, host1.",
        ),
        (["up", "--name", NAME], "a lab 'NAME' exists already. Use it"),
    ],
)
def test_bad_input_is_one_message(printed: str, arguments: list[str], said: str) -> None:
    answer = vitscale("lab", *arguments)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith(f"vitscale: {said.replace('NAME', NAME)}")
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "expected"), [("100mbit", 100.0), ("1gbit", 1000.0), ("2.5gbit", 2500.0), ("1mbit", 1.0)]
)
def test_bandwidths(text: str, expected: float) -> None:
    assert parse_bandwidth(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "100",
        "mbit",
        "-1mbit",
        "1 gbit",
        "1e3mbit",
        "0.5mbit",
        "101gbit",
        "1Gbit",
        "nanmbit",
        "1mbit\n",
        "\u0661mbit",
    ],
)
def test_what_is_no_bandwidth(text: str) -> None:
    with pytest.raises(RequestError, match="is no bandwidth"):
        parse_bandwidth(text)


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("sys.argv", ["/my env/bin/vitscale", "lab", "up", "--hosts", "2"])
    with pytest.raises(RequestError) as caught:
        up(LabPlan(NAME))
    command = "sudo '/my env/bin/vitscale' lab up --hosts 2"
    assert str(caught.value) == f"vitscale lab needs root: it makes namespaces. Use: {command}."
    monkeypatch.setattr("sys.argv", ["/lib/vitscale/__main__.py", "lab", "down"])
    with pytest.raises(RequestError, match=f"Use: sudo {sys.executable} -P -m vitscale lab down"):
        up(LabPlan(NAME))
    with pytest.raises(RequestError, match="needs root"):
        down(NAME)
    with pytest.raises(RequestError, match="needs root"):
        laboratories()


def test_without_iproute2_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs.root_and()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(processes, "_SYSTEM_FOLDERS", ())
    with pytest.raises(RequestError, match=r"needs .*ip, tc\. Install it: apt-get install util-linux mount iproute2\."):
        up(LabPlan(NAME))


@pytest.mark.parametrize("content", ["", "{}", '{"name": "x"', '{"name": "a", "hosts": [{"first": {"pid": 1}}]}'])
def test_a_damaged_folder_is_left_alone_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setattr(state, "RUN", tmp_path)
    folder = state.folder_of("a")
    folder.mkdir(0o700)
    (folder / "lab.json").write_text(content)
    with pytest.raises(VitscaleError, match=r"is no lab's folder: lab\.json cannot be read"):
        state.read("a")


def test_a_folder_that_others_may_write_to_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "RUN", tmp_path)
    state.folder_of("a").mkdir(0o700)
    state.folder_of("a").chmod(0o777)
    with pytest.raises(VitscaleError, match="others may write to it"):
        state.read("a")
