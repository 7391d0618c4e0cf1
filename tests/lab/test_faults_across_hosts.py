"""Faults on several hosts, under real launchers and a real sshd: one true reason each, and nothing is left anywhere.

Ranks are those of `runner/light_worker.py`: everything but the training is the product's.
"""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import needs
from driving import TINY_MODEL
from processes import wait_until
from runner.light_worker import FAULTS, GO
from vitscale import store
from vitscale.lab import laboratory
from vitscale.lab.laboratory import Laboratory
from vitscale.processes import launch_file
from vitscale.store.results import Outcome, Run

pytestmark = pytest.mark.long(14)

WORKER = Path(__file__).parents[1] / "runner" / "light_worker.py"
STUDY = """
name = "faults"
{model}
[data]
name = "digits"
[train]
precision = "fp32"
micro_batch = 8
[scaling]
gpus = [2]
[sweep]
"train.seed" = {seeds}
[measure]
steps = 20
repeats = 1
hang_seconds = {hang_seconds}
retries = {retries}
"""
GONE_SECONDS = 60
"""After a link is cut both sides notice within 5 s; the rest is a busy machine's."""


class Study:
    """A study whose driver runs on the first host of a lab of two."""

    def __init__(
        self, folder: Path, lab: Laboratory, launcher: str, faults: tuple[str, ...], retries: int = 0, hang: int = 120
    ) -> None:
        folder.mkdir(exist_ok=True)
        seeds = [FAULTS.index(fault) for fault in faults]
        (folder / "study.toml").write_text(
            STUDY.format(model=TINY_MODEL, seeds=seeds, retries=retries, hang_seconds=hang)
        )
        self.lab, self.results = lab, folder / "results"
        cli = [sys.executable, str(WORKER), "cli", "run", str(folder / "study.toml"), "-o", str(self.results)]
        cli += ["--launcher", launcher, "--hostfile", str(lab.hostfile)]
        self.driver = subprocess.Popen(lab.command(0, cli), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def finish(self) -> str:
        """Waits for the driver; returns what it said."""
        return self.driver.communicate(timeout=300)[0]

    def under_way(self) -> Path:
        """Waits until both ranks of a run record steps; returns its folder."""
        wait_until(lambda: self._recording() is not None or self.driver.poll() is not None, "both ranks record steps")
        found = self._recording()
        assert found is not None
        return found

    def _recording(self) -> Path | None:
        for run in self.results.glob("runs/*"):
            if self.lab.processes(1) and all(
                b'"kind":"step"' in _content(run / f"rank-{rank}.jsonl") for rank in (0, 1)
            ):
                return run
        return None

    def runs(self) -> list[Run]:
        return list(store.load(self.results).runs)

    def outcome(self) -> Outcome:
        (run,) = self.runs()
        return run.outcome

    def gone(self, *hosts: int) -> None:
        for host in hosts:
            wait_until(functools.partial(self._empty, host), f"host {host} is empty", GONE_SECONDS)

    def _empty(self, host: int) -> bool:
        return not self.lab.processes(host)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@contextmanager
def two_hosts() -> Iterator[Laboratory]:
    needs.root_and("unshare", "nsenter", "ip", "sshd", "ssh", "mpirun")
    with laboratory(hosts=2) as lab:
        yield lab


# --- a rank goes wrong ----------------------------------------------------------------------------------------------

BEFALLING = (
    ("mpirun", ("killed", "raises", "exits_early", "well")),
    ("mpirun", ("stopped",)),
    ("mpirun", ("stuck",)),
    ("torchrun", ("killed",)),
)
"""Studies: launcher and faults."""
BEFALLING_AT_NIGHT = (("torchrun", ("raises", "exits_early")),)
"""Each of its runs imports torch on both hosts anew. By day a rank raises under it on one host
(tests/worker/test_scripts_on_ranks.py)."""
HANG_SECONDS = {"mpirun": 15, "torchrun": 120}
"""Only where something hangs it is waited for; torchrun's agents take seconds to start."""


Befallen = dict[tuple[str, str], Run]
"""By launcher and fault."""


@pytest.fixture(scope="module")
def by_day(tmp_path_factory: pytest.TempPathFactory, lost: object) -> Befallen:
    """Beside what is lost."""
    return befallen(tmp_path_factory.mktemp("faults"), BEFALLING)


@pytest.fixture(scope="module")
def at_night(tmp_path_factory: pytest.TempPathFactory) -> Befallen:
    return befallen(tmp_path_factory.mktemp("faults"), BEFALLING_AT_NIGHT)


def befallen(folder: Path, befalling: Sequence[tuple[str, tuple[str, ...]]]) -> Befallen:
    """Every fault under every launcher, all at once: all of it is mostly waiting. Whatever is left on the hosts fails
    the tests."""
    with two_hosts() as lab:
        studies = [
            (launcher, Study(folder / str(number), lab, launcher, faults, hang=HANG_SECONDS[launcher]))
            for number, (launcher, faults) in enumerate(befalling)
        ]
        said = [study.finish() for _, study in studies]
        assert all("Traceback" not in text for text in said), said
        found = {
            (launcher, FAULTS[run.header.trial.train.seed]): run for launcher, study in studies for run in study.runs()
        }
        assert set(found) == {(name, fault) for name, faults in befalling for fault in faults}, said
        wait_until(lambda: [lab.processes(host) for host in (0, 1)] == [[], []], "nothing is left on the hosts")
        for run_folder in folder.glob("*/results/runs/*"):
            launch = launch_file.read(run_folder)
            assert launch is not None
            for port in (launch.master_port or 0, (launch.master_port or 0) + 1):
                _bind(lab, port)
        return found


def _bind(lab: Laboratory, port: int) -> None:
    """A port that anybody still held could not be bound."""
    program = f"import socket; socket.create_server(('', {port})).close()"
    subprocess.run(lab.command(0, [sys.executable, "-c", program]), check=True)


RAISED = "rank 1 raised ValueError: the sensor on rank 1 reads nonsense"


@pytest.mark.parametrize(
    ("worlds", "launcher", "fault", "kind", "said"),
    [
        ("by_day", "mpirun", "killed", "failed", "rank 1 was ended by SIGKILL without a word"),
        ("by_day", "torchrun", "killed", "failed", "rank 1 was ended by SIGKILL without a word"),
        ("by_day", "mpirun", "raises", "failed", RAISED),
        pytest.param("at_night", "torchrun", "raises", "failed", RAISED, marks=pytest.mark.nightly),
        ("by_day", "mpirun", "exits_early", "failed", "rank 1 ended without a word before its work was done"),
        pytest.param(
            "at_night", "torchrun", "exits_early", "failed", "before its work was done", marks=pytest.mark.nightly
        ),
        ("by_day", "mpirun", "stopped", "hang", "rank 1 is stopped or starved: no sign of life for"),
        ("by_day", "mpirun", "stuck", "hang", "rank 1 stands in forward of step 4, and the others wait for it"),
    ],
)
def test_a_rank_that_goes_wrong_is_named_with_its_host(
    request: pytest.FixtureRequest, worlds: str, launcher: str, fault: str, kind: str, said: str
) -> None:
    outcome = request.getfixturevalue(worlds)[launcher, fault].outcome
    assert (outcome.kind, outcome.rank, outcome.host) == (kind, 1, "host1"), outcome.reason
    assert said in outcome.reason
    assert not outcome.transient


def test_the_study_goes_on_after_faults(by_day: Befallen) -> None:
    assert by_day["mpirun", "well"].outcome.kind == "completed"


def test_a_stuck_rank_says_where_it_stands(by_day: Befallen) -> None:
    """Written down by itself when the driver asked, on the other host."""
    assert "in befall" in by_day["mpirun", "stuck"].outcome.detail


# --- a host, a link, a launcher or the driver goes ------------------------------------------------------------------


def cut_link(folder: Path) -> tuple[Outcome, list[Run]]:
    """The first try loses its link and the second finds it mended: it is the cable, not the trial."""
    with two_hosts() as lab:
        study = Study(folder, lab, "torchrun", ("endless",), retries=1)
        first = study.under_way()
        lab.cut(1)
        (folder / GO).touch()
        # The session of sshd itself takes longer to be given up by both of its ends.
        wait_until(
            lambda: all(_content(Path(f"/proc/{pid}/cmdline")).startswith(b"sshd:") for pid in lab.processes(1)),
            "all of the run is gone from host 1",
            GONE_SECONDS,
        )
        wait_until((first / "outcome.json").exists, "the first try has its outcome", GONE_SECONDS)
        lab.mend(1)
        study.finish()
        study.gone(0, 1)
        return Outcome.model_validate_json((first / "outcome.json").read_text()), study.runs()


def host_gone(folder: Path) -> Outcome:
    with two_hosts() as lab:
        study = Study(folder, lab, "mpirun", ("endless",))
        study.under_way()
        lab.kill(1)
        study.finish()
        study.gone(0)
        return study.outcome()


def launcher_killed(folder: Path) -> Outcome:
    with two_hosts() as lab:
        study = Study(folder, lab, "mpirun", ("endless",))
        study.under_way()
        subprocess.run(lab.command(0, ["pkill", "-KILL", "-x", "mpirun"]), check=True)
        study.finish()
        study.gone(0, 1)
        return study.outcome()


def driver_killed(folder: Path) -> list[Run]:
    """By SIGKILL while ranks train; the second call does the rest."""
    with two_hosts() as lab:
        study = Study(folder, lab, "torchrun", ("endless",))
        study.under_way()
        subprocess.run(lab.command(0, ["pkill", "-KILL", "-f", "light_worker.py cli"]), check=True)
        study.driver.wait()
        study.gone(0, 1)
        assert study.runs() == []
        (folder / GO).touch()
        study = Study(folder, lab, "torchrun", ("endless",))
        study.finish()
        return study.runs()


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Any]]]:
    """All at once, each in a lab of its own: most of their time is waiting for silence."""
    folder = tmp_path_factory.mktemp("lost")
    with ThreadPoolExecutor() as pool:
        yield {each.__name__: pool.submit(each, folder / each.__name__) for each in _LOSSES}


_LOSSES = (cut_link, host_gone, launcher_killed, driver_killed)


def test_a_cut_link_is_told_from_a_fault_of_the_trial_and_tried_again(lost: dict[str, Future[Any]]) -> None:
    first, runs = lost["cut_link"].result()
    assert first.reason == "host host1 does not answer any more: it or its link is gone (rank 1)"
    assert (first.kind, first.host, first.transient) == ("failed", "host1", True)
    assert [(run.outcome.kind, run.header.attempt) for run in runs] == [("completed", 1)]


def test_a_host_that_is_gone_is_named(lost: dict[str, Future[Any]]) -> None:
    outcome = lost["host_gone"].result()
    assert isinstance(outcome, Outcome)
    assert (outcome.kind, outcome.host) == ("failed", "host1"), outcome.reason


def test_a_launcher_that_is_killed_is_told(lost: dict[str, Future[Any]]) -> None:
    outcome = lost["launcher_killed"].result()
    assert isinstance(outcome, Outcome)
    assert outcome.kind == "failed"
    assert f"the launcher was ended by {signal.SIGKILL.name}" in outcome.reason


def test_a_driver_that_is_killed_leaves_nothing_on_any_host(lost: dict[str, Future[Any]]) -> None:
    (run,) = lost["driver_killed"].result()
    assert (run.outcome.kind, run.header.attempt) == ("completed", 1)
