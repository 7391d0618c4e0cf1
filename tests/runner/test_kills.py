"""Processes of a study killed at seeded moments, two drivers on one folder, interrupts: nothing is lost or left."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

import kills
from driving import processes_naming
from kills import RUNS, STUDY, ended, run
from processes import wait_until
from runner.record_only import HOLD
from vitscale import store
from vitscale.store.results import RunHeader

pytestmark = pytest.mark.long(8)

KILLS = 3


@pytest.mark.parametrize("number", [0, 8], ids=["one host", "another host"])
def test_kills_lose_double_and_mix_nothing(number: int) -> None:
    """Two rounds of those that `python tests/kills.py` plays in number."""
    assert kills.play(number, KILLS)


def test_what_was_cut_goes_on_with_the_next_round(capsys: pytest.CaptureFixture[str]) -> None:
    assert kills.main(["--kills", "5", "--from", "7"], lambda _: Counter({"driver": 2})) == 0
    said = capsys.readouterr().out
    assert "round 9: 6 kills (driver 6)" in said
    assert "go on with --from 10" in said


def test_a_round_that_loses_something_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def lost(number: int) -> Counter[kills.Victim]:
        assert number, "a run that had ended is lost"
        return Counter({"rank": 1})

    assert kills.main(["--kills", "1"], lost) == 1
    assert "round 0: a run that had ended is lost" in capsys.readouterr().out


def test_lost_changed_and_doubled_runs_are_seen(tmp_path: Path) -> None:
    def outcome(name: str, kind: str) -> Path:
        path = tmp_path / "runs" / name / "outcome.json"
        path.parent.mkdir(parents=True)
        path.write_text(f'{{"kind": "{kind}"}}')
        return path

    outcome("t-r0-a0", "failed")
    changed = outcome("t-r0-a1", "completed")
    kept = kills.checked(tmp_path, {})
    assert sorted(kept) == ["t-r0-a0", "t-r0-a1"]
    changed.write_text('{"kind": "completed" }')
    with pytest.raises(AssertionError, match="lost or changed"):
        kills.checked(tmp_path, kept)
    changed.unlink()
    with pytest.raises(AssertionError, match="lost or changed"):
        kills.checked(tmp_path, kept)
    outcome("t-r1-a0", "completed")
    outcome("t-r1-a1", "completed")
    with pytest.raises(AssertionError, match="there twice"):
        kills.checked(tmp_path, {})


@pytest.fixture
def study(tmp_path: Path) -> Path:
    (tmp_path / "study.toml").write_text(STUDY)
    return tmp_path


def test_two_drivers_on_one_folder(study: Path) -> None:
    hold = study / HOLD
    hold.touch()
    first = run(study)
    results = study / "results"
    wait_until(lambda: list(results.glob("runs/*/rank-0.jsonl")), "a rank records")
    second = run(study)
    assert ended(second) == 2
    assert f"another `vitscale run` (process {first.pid})" in (study / "said.txt").read_text()
    first.kill()
    first.join()
    hold.unlink()
    assert ended(run(study)) == 0
    assert len(store.load(results).runs) == RUNS


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupts_end_all_ranks_and_say_how_to_go_on(study: Path, number: signal.Signals) -> None:
    interrupt(study, number, at_a_time=1)
    assert ended(run(study)) == 0
    assert len(store.load(study / "results").runs) == RUNS


def test_ctrl_c_and_kills_of_runs_side_by_side(tmp_path: Path) -> None:
    side_by_side = kills.Round(1, tmp_path)
    interrupt(tmp_path, signal.SIGINT, at_a_time=2)
    begun = side_by_side.results.glob("runs/*/trial.json")
    hosts = [host for path in begun for host in RunHeader.model_validate_json(path.read_text()).hosts]
    assert len(hosts) == len(set(hosts)) >= 2
    side_by_side.play(KILLS)


def interrupt(study: Path, number: signal.Signals, at_a_time: int) -> None:
    """A signal to the driver when so many runs are under way; checks that it ends them all, and says how to go on."""
    hold = study / HOLD
    hold.touch()
    driver = run(study)
    results = study / "results"
    wait_until(lambda: len(list(results.glob("runs/*/rank-0.jsonl"))) >= at_a_time, "ranks record")
    assert not list(results.glob("runs/*/outcome.json"))
    assert driver.pid is not None
    os.kill(driver.pid, number)
    assert ended(driver) == 130
    hold.unlink()
    output = (study / "said.txt").read_text()
    assert "Run the same command again" in output
    assert "Traceback" not in output
    assert processes_naming(results) == []
