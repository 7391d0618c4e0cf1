"""Ranks forked from a prepared process are like those of new processes, and compute the same."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from driving import vitscale
from vitscale import store
from vitscale.processes.launch_file import COMPLETE_VARIABLE, TOKEN_VARIABLE, LaunchFile
from vitscale.schedulers.prepared import ranks_environment
from vitscale.store.records import RankRecord
from vitscale.worker.prepared import unforkable

pytestmark = [pytest.mark.long(15), pytest.mark.ranks]

STUDY = """
name = "forks"
[model]
factory = "reporting:build"
image_size = 8
[data]
name = "digits"
[train]
engine = "ddp"
precision = "fp32"
micro_batch = 32
[scaling]
gpus = [1, 2]
[launch]
oversubscribe = true
threads_per_rank = 2
environment = { COLOUR = "blue", REPORTS = "REPORTS_FOLDER" }
[measure]
steps = 5
warmup_steps = 1
repeats = 2
evaluate = false
explain = false
"""


class Compared:
    """The runs of a study under `local`; the first repeat again by the commands that `plan` shows, which start anew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copy(Path(__file__).with_name("reporting.py"), folder)
        (folder / "forked").mkdir()
        (folder / "study.toml").write_text(STUDY.replace("REPORTS_FOLDER", str(folder / "forked")))
        answer = vitscale("run", "study.toml", "-o", "results", cwd=folder, anew=True)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        self.runs = {
            (run.header.trial.world.size, run.header.repeat): run for run in store.load(folder / "results").runs
        }
        planned = json.loads(vitscale("plan", "study.toml", "--json", cwd=folder).stdout)["trials"]
        for trial in planned:
            cold = folder / f"cold-{trial['gpus']}"
            cold.mkdir()
            shutil.copy(self.run_folder(trial["gpus"], 0) / "trial.json", cold)
            ((*command, _),) = trial["commands"]
            own = {"REPORTS": str(cold), "COLOUR": "blue", "OMP_NUM_THREADS": "2"}
            subprocess.run([*command, str(cold)], cwd=folder, check=True, timeout=120, env=ranks_environment(own))

    def run_folder(self, ranks: int, repeat: int) -> Path:
        header = self.runs[ranks, repeat].header
        return self.folder / "results" / "runs" / f"{header.trial_id}-r{repeat}-a{header.attempt}"

    def launched(self, ranks: int, repeat: int) -> LaunchFile:
        return LaunchFile.model_validate_json((self.run_folder(ranks, repeat) / "launch.json").read_text())

    def cold(self, ranks: int) -> tuple[RankRecord, ...]:
        return tuple(store.read_ranks(self.folder / f"cold-{ranks}"))

    def cold_reports(self, ranks: int) -> dict[str, dict[str, Any]]:
        """By rank."""
        return _reports(self.folder / f"cold-{ranks}")

    def forked_reports(self, ranks: int, repeat: int) -> dict[str, dict[str, Any]]:
        token = self.launched(ranks, repeat).token
        every = _reports(self.folder / "forked", by_file=True).values()
        mine = [each for each in every if each["environment"][TOKEN_VARIABLE] == token]
        return {each["environment"].get("RANK", "0"): each for each in mine}


def _reports(folder: Path, *, by_file: bool = False) -> dict[str, dict[str, Any]]:
    files = sorted(folder.glob("[0-9]*-*.json"))
    return {path.name if by_file else path.name.partition("-")[0]: json.loads(path.read_text()) for path in files}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    return Compared(tmp_path_factory.mktemp("forks"))


BOTH = pytest.mark.parametrize("ranks", [1, 2])


@BOTH
def test_losses_are_those_of_new_processes_to_the_bit(compared: Compared, ranks: int) -> None:
    forked, cold = compared.runs[ranks, 0].ranks, compared.cold(ranks)
    assert len(forked) == len(cold) == ranks
    for one, other in zip(forked, cold, strict=True):
        assert len(one.steps) == 6
        assert [line.loss for line in one.steps] == [line.loss for line in other.steps]


@BOTH
def test_a_fork_is_as_a_new_process_would_be(compared: Compared, ranks: int) -> None:
    """Every pool of threads, cores, module path, arguments, signals."""
    alike = ("argv", "cwd", "path", "threads", "interop", "pools", "cores", "handlers", "death_signal", "torch_draw")
    of_forks, of_new = compared.forked_reports(ranks, 0), compared.cold_reports(ranks)
    assert [*of_forks] == [*of_new] == [str(rank) for rank in range(ranks)]
    for rank, fork in of_forks.items():
        new = of_new[rank]
        folder, other = str(compared.run_folder(ranks, 0)), str(compared.folder / f"cold-{ranks}")
        fork["argv"] = [word.replace(folder, other) for word in fork["argv"]]
        assert {key: fork[key] for key in alike} == {key: new[key] for key in alike}
        assert fork["pools"], "no pool was found to compare"
        assert fork["death_signal"] == signal.SIGKILL
        assert fork["imported_here"], "the user's module was imported before the fork"
        assert fork["session"] == fork["parent"], "Ctrl-C at the terminal would reach it"
        # Imports set variables too.
        differing = {key for key, _ in fork["environment"].items() ^ new["environment"].items()}
        assert differing - {"REPORTS", "COLUMNS", "PYTHONPATH", "MASTER_PORT"} == {TOKEN_VARIABLE, COMPLETE_VARIABLE}


@BOTH
def test_a_fork_takes_as_much_memory_as_a_new_process(compared: Compared, ranks: int) -> None:
    """What it shares with its parent counts; with pages of libraries, 65 MB of 310 would be missing."""
    for rank, fork in compared.forked_reports(ranks, 0).items():
        new = compared.cold_reports(ranks)[rank]["memory"]
        assert fork["memory"]["now_bytes"] == pytest.approx(new["now_bytes"], rel=0.03)


def test_every_fork_draws_numbers_of_its_own(compared: Compared) -> None:
    every = [report for run in compared.runs for report in compared.forked_reports(*run).values()]
    assert len(every) == 6
    for kind in range(3):
        assert len({report["draws"][kind] for report in every}) == 6


@BOTH
def test_a_fork_is_seen_from_outside_as_a_rank(compared: Compared, ranks: int) -> None:
    """By its name; the token is a secret that the kernel shows of no fork."""
    folder, launched = str(compared.run_folder(ranks, 1)), compared.launched(ranks, 1)
    for rank, report in compared.forked_reports(ranks, 1).items():
        assert report["name"] == f"vitscale rank {rank}"[:15]
        assert launched.token not in report["initial_environment"]
        assert report["files"] == sorted(["/dev/null", f"{folder}/log.txt", f"{folder}/log.txt"])
    # gloo itself prints a line a rank under some releases of torch (2.10).
    lines = [line for line in (Path(folder) / "log.txt").read_text().split("\n") if not line.startswith("[Gloo] ")]
    assert sorted(lines) == [
        "",
        *(f"rank {n} prints" for n in range(ranks)),
    ]


def test_waiting_for_imports_is_told_of_the_first_run_that_they_served(compared: Compared) -> None:
    """A prepared process serves one round: of its two runs the first has waited, and no start-up figure holds that."""
    for repeat in range(2):
        waited = {ranks: compared.launched(ranks, repeat).prepared_seconds for ranks in (1, 2)}
        assert sorted(seconds is None for seconds in waited.values()) == [False, True]
        for ranks, seconds in waited.items():
            assert compared.launched(ranks, repeat).cold is None
            for rank in compared.runs[ranks, repeat].ranks:
                phases = {phase.name: phase.seconds for phase in rank.phases}
                assert phases.pop("prepare", None) == seconds
                assert [*phases] == ["launch", "imports", "data", "model", "engine", "first_step"]


def test_no_trial_is_served_twice_by_one_process(compared: Compared) -> None:
    """What a process draws for its life, and its forks share, differs between the runs of a trial: its hashes' seed."""
    seeds = {run: {report["hash"] for report in compared.forked_reports(*run).values()} for run in compared.runs}
    assert seeds[1, 0] == seeds[2, 0] != seeds[1, 1] == seeds[2, 1]
    assert all(len(each) == 1 for each in seeds.values())


@pytest.mark.parametrize(
    ("threads", "opened", "said"),
    [
        (1, ["/dev/null", "socket:[1]"], None),
        (2, [], "importing started 1 thread, which a fork would lack"),
        (4, ["/dev/nvidia0"], "importing started 3 threads, which a fork would lack"),
        (1, ["/dev/null", "/dev/nvidiactl"], "importing opened /dev/nvidiactl, which a fork cannot use"),
        (1, ["/dev/nvidia-uvm"], "importing opened /dev/nvidia-uvm, which a fork cannot use"),
    ],
)
def test_what_must_not_be_forked_says_why(threads: int, opened: list[str], said: str | None) -> None:
    assert unforkable(threads, opened) == said
