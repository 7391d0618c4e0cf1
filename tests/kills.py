"""Kills at seeded moments that lose, double and mix nothing: `python tests/kills.py --kills 10000`.

A round is a study in a folder of its own, made of its number alone. In it one process after the other is ended by
SIGKILL: the driver, a rank, the launcher, the process that ranks are forked from, the agent on another host, all that
runs on that host; each time the same command goes on, until the study is through. What was cut goes on with
`--from ROUND`. Moments follow what the driver does, and not a clock, so that kills fall into a study under way however
busy the machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Literal

import psutil

from driving import TINY_MODEL, processes_naming, tree
from processes import alive, wait_until
from runner import record_only
from vitscale import store

Kind = Literal["one host", "side by side", "another host", "prepared"]
Victim = Literal["driver", "rank", "launcher", "prepared process", "agent", "host"]
RUNS = 4
STUDY = f"""
name = "kills"
{TINY_MODEL}
[data]
name = "digits"
[train]
precision = "fp32"
micro_batch = 8
[scaling]
gpus = [1, 2]
[launch]
launcher = "record-only"
[measure]
steps = 20
repeats = 2
"""
# Real ranks, one at a time: they are what a prepared process forks.
_PREPARED = STUDY.replace("record-only", "local").replace("[1, 2]", "[1]")
# Runs on one host or two of three, which are this machine by other addresses.
_SIDE_BY_SIDE = (
    f"""{STUDY}parallel_runs = 3
[sweep]
"train.seed" = [0, 1]
""".replace("repeats = 2", "repeats = 1")
    .replace("[1, 2]", "[1, 2]\ngpus_per_node = 1")
    .replace(
        "[launch]",
        f'[launch]\nhostfile = "hosts"\nthreads_per_rank = 1\nenvironment = {{ {record_only.STEP_SECONDS} = "0.02" }}',
    )
)
_MOST_KILLS = 8
"""In a round."""
_VICTIMS: dict[Kind, tuple[Victim, ...]] = {
    "one host": ("driver", "driver", "rank", "launcher"),
    "side by side": ("driver", "driver", "rank", "launcher"),
    "another host": ("driver", "rank", "agent", "host"),
    "prepared": ("driver", "rank", "prepared process"),
}
_KINDS: tuple[Kind, ...] = ("one host", "side by side", "one host", "another host", "one host")
# Stands for ssh to a host that can be cut off: what it is told to run has nothing of the driver's, and its own session.
_SSH = """#!/bin/sh
[ -e {cut} ] && exit 255
for line; do :; done
exec setsid --wait env -i PATH="$PATH" PYTHONPATH={package} sh -c "$line"
"""
# Drivers are forked from a process that has imported what they need: they would else mostly import.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["vitscale.cli", "vitscale.runner", "vitscale.pages", "scipy.special", "runner.record_only"]
)


def run(study: Path, *options: str) -> ForkServerProcess:
    """A driver under way, which writes to `results` in the study's folder."""
    arguments = ["run", "study.toml", "-o", "results", *options]
    driver = _FORKS.Process(target=_drive, args=(arguments, study))
    driver.start()
    return driver


def _drive(arguments: list[str], study: Path) -> None:
    os.environ["PATH"] = f"{study / 'bin'}{os.pathsep}{os.environ['PATH']}"
    record_only.drive(arguments, study, study / "said.txt")


def ended(driver: ForkServerProcess) -> int | None:
    """Waits for a driver; its exit code."""
    driver.join(300)
    return driver.exitcode


class Round:
    """One study, and how often who was killed in it."""

    def __init__(self, number: int, folder: Path) -> None:
        self._moments = random.Random(f"kills {number}")
        self.kind: Kind = "prepared" if number % 40 == 7 else _KINDS[number % len(_KINDS)]
        self.study, self.results = folder, folder / "results"
        self.killed: Counter[Victim] = Counter()
        self._runs = 2 if self.kind == "prepared" else RUNS
        self._options = ["--retry-failed"]
        self._cut = folder / "cut"
        text = STUDY
        if self.kind == "prepared":
            text = _PREPARED
        elif self.kind == "side by side":
            text = _SIDE_BY_SIDE
            (folder / "hosts").write_text("".join(f"127.0.0.{n} slots=1\n" for n in (2, 3, 4)))
        elif self.kind == "another host":
            (folder / "hosts").write_text("198.51.100.7 slots=2\n")
            self._options += ["--hostfile", "hosts"]
            ssh = folder / "bin" / "ssh"
            ssh.parent.mkdir()
            ssh.write_text(_SSH.format(cut=self._cut, package=shlex.quote(str(Path(store.__file__).parents[2]))))
            ssh.chmod(0o755)
        (folder / "study.toml").write_text(text)

    def play(self, most: int) -> None:
        """Kills so often, or until the study is through, and looks at what is there after each.

        Raises:
            AssertionError: a run was lost, doubled or mixed, or something was left behind.
        """
        kept: dict[str, dict[str, bytes]] = {}
        while self.killed.total() < most and len(_completed(self.results)) < self._runs:
            self._kill()
            wait_until(lambda: not processes_naming(self.results), "all ranks are gone")
            kept = checked(self.results, kept)
        # What a kill has made fail is done again.
        assert 0 in (ended(run(self.study, *self._options)) for _ in range(3)), self._said()
        checked(self.results, kept)
        self._check_runs()

    def _kill(self) -> None:
        """Starts a driver, and ends it or another process of the study once so much has come to the results."""
        victim = self._moments.choice(_VICTIMS[self.kind])
        entries, delay_seconds = self._moments.randrange(14), self._moments.uniform(0.0, 0.05)
        before = _number_of_entries(self.results)
        driver = run(self.study, *self._options)
        while driver.is_alive() and _number_of_entries(self.results) < before + entries:
            time.sleep(0.001)
        driver.join(delay_seconds)
        pids: Sequence[int] = ()
        while driver.is_alive() and not (pids := self._pids(victim, driver)):
            time.sleep(0.001)
        if victim == "host":
            self._cut.touch()
        hit = [pid for pid in pids if alive(pid)]
        for pid in hit:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.killed[victim] += bool(hit)
        code = ended(driver)
        self._cut.unlink(missing_ok=True)
        assert code == -signal.SIGKILL if victim == "driver" and hit else code in (0, 1), self._said()

    def _pids(self, victim: Victim, driver: ForkServerProcess) -> Sequence[int]:
        """What a victim runs as now, from the top down; none where it does not run."""
        if victim == "driver":
            return [driver.pid or 0]
        parents: dict[int, int] = {}
        commands: dict[int, list[str]] = {}
        for process in _below(driver.pid or 0):
            with suppress(psutil.Error):
                parents[process.pid], commands[process.pid] = process.ppid(), process.cmdline()
        if victim == "host":
            return list(commands)
        modules = {"agent": "vitscale.processes.host_agent", "prepared process": "vitscale.worker.prepared"}
        if victim in modules:
            return [pid for pid, command in commands.items() if command[1:4] == ["-P", "-m", modules[victim]]][:1]
        # Launchers and ranks are named alike; so are a prepared process and its forks, which have one as their parent.
        if self.kind == "prepared":
            prepared = [pid for pid, command in commands.items() if modules["prepared process"] in command]
            launched = [pid for pid in prepared if parents[pid] in prepared]
        else:
            launched = [pid for pid, command in commands.items() if command[1:2] == [record_only.__file__]]
        return [pid for pid in launched if (parents[pid] in launched) == (victim == "rank")][-1:]

    def _check_runs(self) -> None:
        if self.kind == "side by side":
            _check_no_host_was_shared(self.results)
        completed = store.load(self.results).runs
        assert len(completed) == len(_completed(self.results)) == self._runs
        for each in completed:
            mark = int(each.header.trial_id, 16) % 1_000_000 + each.header.repeat
            assert each.outcome.kind == "completed", each.outcome
            assert [rank.rank for rank in each.ranks] == list(range(each.header.trial.world.size))
            for rank in each.ranks:
                own = [(step.step, mark if self.kind == "prepared" else step.images) for step in rank.steps]
                assert own == [(step, mark) for step in range(len(own))]
                assert len(own) >= 20

    def _said(self) -> str:
        return (self.study / "said.txt").read_text()


def _check_no_host_was_shared(results: Path) -> None:
    """By what runs say of their hosts and times."""
    runs = [(run.header.hosts, run.outcome) for run in store.load(results).runs]
    together = [
        (hosts, others)
        for (hosts, own), (others, other) in itertools.combinations(runs, 2)
        if own.started_unix_seconds < other.started_unix_seconds + other.wall_seconds
        and other.started_unix_seconds < own.started_unix_seconds + own.wall_seconds
    ]
    assert not [pair for pair in together if {*pair[0]} & {*pair[1]}]


def _completed(results: Path) -> list[str]:
    """Trial and repeat of each run that is through."""
    outcomes = {path.parent.name: json.loads(path.read_text()) for path in results.glob("runs/*/outcome.json")}
    return [name.rpartition("-a")[0] for name, outcome in outcomes.items() if outcome["kind"] == "completed"]


def checked(results: Path, kept: dict[str, dict[str, bytes]]) -> dict[str, dict[str, bytes]]:
    """The runs that have ended, each with the content of its files; those `kept` are as they were.

    Raises:
        AssertionError: a run was lost or doubled, or a file is neither whole nor plainly incomplete.
    """
    for path in results.rglob("*.json"):
        if not path.name.startswith("."):
            json.loads(path.read_text())
    for path in results.glob("runs/*/rank-*.jsonl"):
        record = store.read_rank(path)
        assert all(line.endswith("cut off") for line in record.broken), record.broken
    now = {path.parent.name: tree(path.parent) for path in results.glob("runs/*/outcome.json")}
    assert {name: now.get(name) for name in kept} == kept, "a run that had ended is lost or changed"
    completed = _completed(results)
    assert len(completed) == len(set(completed)), f"a run is there twice: {completed}"
    return now


def _below(pid: int) -> list[psutil.Process]:
    try:
        below: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    return below


def _number_of_entries(results: Path) -> int:
    return sum(len(folders) + len(files) for _, folders, files in os.walk(results))


def play(number: int, most: int = _MOST_KILLS) -> Counter[Victim]:
    """A round from its beginning to its end; who was killed how often.

    Raises:
        AssertionError: something was lost, doubled, mixed or left behind.
    """
    with tempfile.TemporaryDirectory(prefix="vitscale-kills-") as folder:
        own = Round(number, Path(folder))
        own.play(most)
        return own.killed


def main(arguments: list[str] | None = None, played: Callable[[int], Counter[Victim]] = play) -> int:
    """Plays rounds until there were so many kills; 1 where something was lost, doubled or mixed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--from", type=int, default=0, dest="first", metavar="ROUND", help="number of the first round")
    asked = parser.parse_args(arguments)
    killed: Counter[Victim] = Counter()
    number, faults = asked.first, 0
    while killed.total() < asked.kills:
        try:
            killed += played(number)
        except AssertionError as error:
            faults += 1
            print(f"round {number}: {str(error)[:2000]}", flush=True)
        number += 1
        whom = ", ".join(f"{victim} {count}" for victim, count in killed.most_common())
        print(f"round {number - 1}: {killed.total():,} kills ({whom})", flush=True)
    print(f"{faults} rounds in which something was lost, doubled, mixed or left; go on with --from {number}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
