"""The driver killed at random moments: nothing lost, nothing doubled, nothing mixed, nothing left behind."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from driving import TINY_MODEL, processes_naming, tree
from processes import wait_until
from runner import record_only
from vitscale import store

KILLS = 8
KILLS_SIDE_BY_SIDE = 4
KILLS_NIGHTLY = 200
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
RUNS = 4
SIDE_BY_SIDE = f"""
{STUDY.replace("repeats = 2", "repeats = 1")}parallel_runs = 3
[sweep]
"train.seed" = [0, 1]
"""
# Drivers are forked from a process that has imported what they need: 200 of them would else mostly import.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["vitscale.cli", "vitscale.runner", "vitscale.report", "scipy.special", "runner.record_only"]
)


def finished_runs(results: Path) -> dict[str, dict[str, bytes]]:
    """Every run that has its outcome, with the content of all its files."""
    return {path.parent.name: tree(path.parent) for path in results.glob("runs/*/outcome.json")}


@pytest.fixture
def study(tmp_path: Path) -> Path:
    (tmp_path / "study.toml").write_text(STUDY)
    return tmp_path


@pytest.fixture
def side_by_side(tmp_path: Path) -> Path:
    """Runs on one host or two of three, which are this machine by other addresses."""
    text = SIDE_BY_SIDE.replace("gpus = [1, 2]", "gpus = [1, 2]\ngpus_per_node = 1")
    launch = f'hostfile = "hosts"\nthreads_per_rank = 1\nenvironment = {{ {record_only.STEP_SECONDS} = "0.02" }}'
    text = text.replace("[launch]", f"[launch]\n{launch}")
    (tmp_path / "study.toml").write_text(text)
    (tmp_path / "hosts").write_text("".join(f"127.0.0.{n} slots=1\n" for n in (2, 3, 4)))
    return tmp_path


def check_no_host_was_shared(results: Path) -> bool:
    """By what runs say of their hosts and times; whether any two went on together."""
    runs = [(run.header.hosts, run.outcome) for run in store.load(results).runs]
    together = [
        (hosts, others)
        for (hosts, own), (others, other) in itertools.combinations(runs, 2)
        if own.started_unix_seconds < other.started_unix_seconds + other.wall_seconds
        and other.started_unix_seconds < own.started_unix_seconds + own.wall_seconds
    ]
    assert not [pair for pair in together if {*pair[0]} & {*pair[1]}]
    return bool(together)


def run(study: Path, results: str = "results") -> ForkServerProcess:
    """A driver under way."""
    arguments = ["run", "study.toml", "-o", results]
    driver = FORKS.Process(target=record_only.drive, args=(arguments, study, study / "said.txt"))
    driver.start()
    return driver


def ended(driver: ForkServerProcess) -> int | None:
    """Waits for a driver; its exit code."""
    driver.join(120)
    return driver.exitcode


def check_whole(results: Path) -> None:
    """Each file is whole, or plainly incomplete."""
    for path in results.rglob("*.json"):
        if not path.name.startswith("."):
            json.loads(path.read_text())
    for path in results.glob("runs/*/rank-*.jsonl"):
        record = store.read_rank(path)
        assert all(line.endswith("cut off") for line in record.broken)


def kill_at(driver: ForkServerProcess, results: Path, entries: int, delay_seconds: float) -> None:
    """SIGKILL so long after so many files and folders have come to the results; where the study ends before, then."""
    before = number_of_entries(results)
    while driver.is_alive() and number_of_entries(results) < before + entries:
        time.sleep(0.001)
    driver.join(delay_seconds)
    driver.kill()
    driver.join()


def number_of_entries(results: Path) -> int:
    return sum(len(folders) + len(files) for _, folders, files in os.walk(results))


@pytest.mark.parametrize("kills", [KILLS, pytest.param(KILLS_NIGHTLY, marks=pytest.mark.nightly)])
def test_many_kills_lose_double_and_mix_nothing(study: Path, kills: int) -> None:
    check_kills(study, kills)


@pytest.mark.parametrize("kills", [KILLS_SIDE_BY_SIDE, pytest.param(KILLS_NIGHTLY, marks=pytest.mark.nightly)])
def test_ctrl_c_and_many_kills_of_runs_side_by_side(side_by_side: Path, kills: int) -> None:
    interrupt(side_by_side, signal.SIGINT, at_a_time=2)
    check_kills(side_by_side, kills)
    through = [side_by_side / "results", *side_by_side.glob("through-*")]
    together = [check_no_host_was_shared(results) for results in through]
    assert any(together)


def check_kills(study: Path, kills: int) -> None:
    """Seeded SIGKILLs of the driver, until the study is through; what was finished once is never touched again.

    They follow what the driver does, and not a clock, so that several fall into each study however busy the machine.
    """
    random_moments = random.Random(20260221)
    results = study / "results"
    kept: dict[str, dict[str, bytes]] = {}
    for _ in range(kills):
        driver = run(study)
        kill_at(driver, results, random_moments.randrange(25), random_moments.uniform(0.0, 0.05))
        wait_until(lambda: not processes_naming(results), "all ranks are gone")
        if not results.exists():
            continue
        check_whole(results)
        now = finished_runs(results)
        assert {name: now[name] for name in kept} == kept
        kept = now
        if len(kept) == RUNS:
            # Through: begin anew, so that all kills fall into a study under way.
            assert ended(run(study)) == 0
            assert finished_runs(results) == kept
            loaded = store.load(results)
            assert len(loaded.runs) == RUNS
            assert len({(r.header.trial_id, r.header.repeat) for r in loaded.runs}) == RUNS
            for one in loaded.runs:
                mark = int(one.header.trial_id, 16) % 1_000_000 + one.header.repeat
                assert one.outcome.kind == "completed"
                assert [r.rank for r in one.ranks] == list(range(one.header.trial.world.size))
                for record in one.ranks:
                    assert [(s.step, s.images) for s in record.steps] == [(n, mark) for n in range(20)]
            results.rename(study / f"through-{len(list(study.glob('through-*')))}")
            kept = {}
    assert list(study.glob("through-*")), "no study came through: the kills fall too early to prove anything"
    assert ended(run(study)) == 0
    assert len(store.load(results).runs) == RUNS


def test_two_drivers_on_one_folder(study: Path) -> None:
    first = run(study)
    results = study / "results"
    wait_until(lambda: list(results.glob("runs/*/rank-0.jsonl")), "a rank records")
    second = run(study)
    assert ended(second) == 2
    assert f"another `vitscale run` (process {first.pid})" in (study / "said.txt").read_text()
    first.kill()
    first.join()
    assert ended(run(study)) == 0
    assert len(store.load(results).runs) == RUNS


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupts_end_all_ranks_and_say_how_to_go_on(study: Path, number: signal.Signals) -> None:
    interrupt(study, number, at_a_time=1)
    assert ended(run(study)) == 0
    assert len(store.load(study / "results").runs) == RUNS


def interrupt(study: Path, number: signal.Signals, at_a_time: int) -> None:
    """A signal to the driver when so many runs are under way; checks that it ends them all, and says how to go on."""
    driver = run(study)
    results = study / "results"

    def under_way() -> int:
        return len(list(results.glob("runs/*/rank-0.jsonl"))) - len(list(results.glob("runs/*/outcome.json")))

    wait_until(lambda: under_way() >= at_a_time, "ranks record")
    assert driver.pid is not None
    os.kill(driver.pid, number)
    assert ended(driver) == 130
    output = (study / "said.txt").read_text()
    assert "Run the same command again" in output
    assert "Traceback" not in output
    assert processes_naming(results) == []
