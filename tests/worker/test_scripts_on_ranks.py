"""Users' own training scripts on real ranks: the records of our own loop, and one true outcome whatever they do."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from driving import TINY_MODEL, processes_naming, tree, vitscale
from vitscale import store
from vitscale.analysis.runs.figures import run_figures
from vitscale.store.results import Outcome, Run

pytestmark = pytest.mark.ranks

HERE = Path(__file__).parent
COMMON = """
[train]
{train}
micro_batch = 4
precision = "fp32"
[scaling]
gpus = [2]
[measure]
repeats = 1
evaluate = false
hang_seconds = {hang}
{measure}
"""


def study(where: Path, data: str, train: str, measure: str = "", hang: int = 100, *arguments: str) -> Path:
    """Runs a study beside the scripts; returns its results."""
    where.mkdir()
    for script in HERE.glob("*_script*.py"):
        shutil.copy(script, where)
    shutil.copy(HERE / "scripted_loop.py", where)
    text = COMMON.format(train=train, measure=measure, hang=hang)
    (where / "study.toml").write_text(f'name = "scripts"\n{data}{text}')
    answer = vitscale("run", "study.toml", "-o", "results", *arguments, cwd=where)
    assert "Traceback" not in answer.stderr, answer.stderr
    (where / "answer").write_text(f"{answer.returncode}\n{answer.stdout}{answer.stderr}")
    return where / "results"


def scripts(where: Path, *faults: str, hang: int = 100, more: tuple[str, ...] = ()) -> dict[str, Run]:
    """Runs the faulty script once for each fault."""
    train = f'script = "faulty_script.py"\narguments = {json.dumps([faults[0], "{micro_batch}"])}'
    sweep = f'steps = 6\nwarmup_steps = 1\n[sweep]\n"train.arguments" = {json.dumps([[fault] for fault in faults])}'
    results = study(where, "[data]\nsamples = 80\n", train, sweep, hang, *more)
    return {run.header.trial.train.arguments[0]: run for run in store.load(results).runs}


# --- what goes well --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    train = 'script = "scripted_loop.py"\narguments = ["{micro_batch}", "10"]'
    return study(
        tmp_path_factory.mktemp("own") / "study", "[data]\nsamples = 80\n", train, "steps = 30\nwarmup_steps = 2"
    )


def steps_of(results: Path) -> dict[int, list[tuple[int, int, str, bool, int]]]:
    (run,) = store.load(results).runs
    assert run.outcome.kind == "completed", run.outcome
    return {rank.rank: [(s.step, s.epoch, s.window, s.warmup, s.images) for s in rank.steps] for rank in run.ranks}


def test_a_scripted_loop_leaves_the_steps_of_our_own(scripted: Path, tmp_path: Path) -> None:
    """Of an engine of which gradients are not looked at either: which steps are timed, their windows and images."""
    data = f'[data]\nname = "synthetic"\nsamples = 80\nsource_size = 16\n{TINY_MODEL}'
    ours = study(tmp_path / "study", data, 'engine = "fsdp2"', "steps = 30\nwarmup_steps = 2")
    assert steps_of(scripted) == steps_of(ours)
    explained = [
        [[line.step for line in rank.explained] for rank in store.load(results).runs[0].ranks]
        for results in (scripted, ours)
    ]
    assert explained[0] == explained[1]
    assert explained[0][0]
    # FSDP2's root is still gathered after an evaluation: the step behind it sends less, and is not one of the counted.
    for rank in store.load(ours).runs[0].ranks:
        first, second = ([(c.operation, c.input_elements) for c in line.collectives or ()] for line in rank.traffic)
        assert first == second
        assert first


def test_its_traffic_is_counted(scripted: Path) -> None:
    """DDP exchanges each of 12 x 10 + 10 gradients once a step."""
    (run,) = store.load(scripted).runs
    for rank in run.ranks:
        for line in rank.traffic:
            assert line.collectives is not None
            assert [(c.operation, c.input_elements, c.ranks) for c in line.collectives] == [("all_reduce", 130, 2)]
        assert [line.step for line in rank.traffic] == [32, 33]


def test_it_is_reported_as_our_own(scripted: Path) -> None:
    answer = vitscale("report", "results", "--json", cwd=scripted.parent)
    assert answer.returncode == 0, answer.stderr
    (trial,) = json.loads(answer.stdout)["trials"]
    assert trial["outcome"] == "completed"
    assert trial["epoch_seconds"] == pytest.approx(10 * trial["step_seconds"])
    assert trial["images_per_second"] == pytest.approx(8 / trial["step_seconds"])
    assert trial["engine"] == "script"


def test_it_is_not_done_again(scripted: Path) -> None:
    before = tree(scripted / "runs")
    answer = vitscale("run", "study.toml", "-o", "results", cwd=scripted.parent)
    assert answer.returncode == 0, answer.stderr
    assert tree(scripted / "runs") == before


def test_another_text_of_the_script_is_another_trial(scripted: Path, tmp_path: Path) -> None:
    shutil.copytree(scripted.parent, tmp_path / "study")
    script = tmp_path / "study" / "scripted_loop.py"
    script.write_text(script.read_text() + "# changed\n")
    answer = vitscale("run", "study.toml", "-o", "results", cwd=tmp_path / "study")
    assert answer.returncode == 2
    assert "another study" in answer.stderr


# --- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("faults")
    with ThreadPoolExecutor() as pool:
        several = pool.submit(
            scripts, folder / "several", "well", "raises", "leaves", "quits", "killed", "early", "images"
        )
        hanging = pool.submit(scripts, folder / "hanging", "hangs", hang=12)
        return several.result() | hanging.result()


@pytest.mark.parametrize(
    ("fault", "kind", "rank", "reason"),
    [
        ("raises", "failed", 1, "rank 1 raised ValueError: the sensor reads nonsense"),
        ("leaves", "failed", 1, "rank 1 ended with exit code 3 before its work was done"),
        ("quits", "failed", 1, "rank 1 raised SystemExit: 4"),
        ("killed", "failed", 1, "rank 1 was ended by SIGKILL without a word"),
        ("hangs", "hang", 1, "no rank recorded anything for 12 s"),
        (
            "images",
            "failed",
            1,
            "rank 1 raised ValueError: the script trains 5 images in this optimizer step of rank 1",
        ),
    ],
)
def test_each_fault_ends_in_its_one_outcome(
    faults: dict[str, Run], fault: str, kind: str, rank: int, reason: str
) -> None:
    outcome = faults[fault].outcome
    assert (outcome.kind, outcome.rank) == (kind, rank)
    assert outcome.reason.startswith(reason)


def test_an_early_end_is_a_failure_that_says_how_far_it_came(faults: dict[str, Run]) -> None:
    outcome = faults["early"].outcome
    assert outcome.kind == "failed"
    assert "the script ended after 3 of 7 optimizer steps" in outcome.reason


def test_the_traceback_is_kept(faults: dict[str, Run]) -> None:
    assert "faulty_script.py" in faults["raises"].outcome.detail


def test_a_script_without_a_probe_is_timed_as_a_whole(faults: dict[str, Run]) -> None:
    run = faults["well"]
    assert run.outcome.kind == "completed"
    for rank in run.ranks:
        (line,) = rank.epochs
        assert line.seconds >= 0.1
        assert (line.steps, line.images, len(rank.steps)) == (None, None, 0)
    figures = run_figures(run)
    assert figures.epoch_seconds == max(rank.epochs[0].seconds for rank in run.ranks)
    assert (figures.step_seconds, figures.images_per_second) == (None, None)


def test_under_torchrun_it_is_the_same(tmp_path: Path, faults: dict[str, Run]) -> None:
    found = scripts(tmp_path / "study", "raises", "killed", more=("--launcher", "torchrun"))

    def said(outcome: Outcome) -> tuple[str, int | None, str]:
        return outcome.kind, outcome.rank, outcome.reason

    assert {name: said(run.outcome) for name, run in found.items()} == {
        name: said(faults[name].outcome) for name in found
    }


def test_no_process_is_left(faults: dict[str, Run]) -> None:
    assert not processes_naming("faulty_script.py")
