"""Real ranks, one study: every engine and rank count trains the same, twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from driving import TINY_MODEL, vitscale
from vitscale import store
from vitscale.analysis import analyse
from vitscale.store.results import Results, Run

pytestmark = [pytest.mark.long(16), pytest.mark.ranks]

STUDY = f"""
name = "equal"
{TINY_MODEL}
[data]
name = "digits"
fraction = 0.1

[train]
precision = "fp32"
micro_batch = 16
grad_accum = 2
epochs = 2
learning_rate = 0.002
gradient_clipping = 0.5

[scaling]
mode = "strong-global"
gpus = [1, 2]

[sweep]
"train.engine" = ["none", "ddp", "deepspeed"]

[measure]
repeats = 2
warmup_steps = 1
"""
IMAGES = 144  # ceil(0.1 * 1438)
GLOBAL_BATCH = 32
STEPS = 5  # ceil(144 / 32): the last one holds 16 images


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("equal")
    (where / "study.toml").write_text(STUDY)
    answer = vitscale("run", "study.toml", "-o", "results", cwd=where)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return where / "results"


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return store.load(folder)


def loss_curve(run: Run) -> list[float]:
    """The mean over ranks of each step's loss."""
    per_rank = [[step.loss for step in rank.steps] for rank in run.ranks]
    return [sum(losses) / len(losses) for losses in zip(*per_rank, strict=True)]


def label(run: Run) -> tuple[str, int]:
    return run.header.trial.train.engine, run.header.trial.world.size


def test_every_run_completed_and_none_is_missing(results: Results) -> None:
    assert [run.outcome.kind for run in results.runs] == ["completed"] * 10
    assert results.problems == ()
    assert {label(run) for run in results.runs} == {
        ("none", 1), ("ddp", 1), ("ddp", 2), ("deepspeed", 1), ("deepspeed", 2),
    }  # fmt: skip


def test_what_ranks_say_of_their_surroundings_takes_part_of_a_phase(folder: Path) -> None:
    files = sorted(folder.rglob("rank-*.jsonl"))
    assert len(files) == 14
    for path in files:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        order = [line.get("name", line["kind"]) for line in lines]
        assert order.index("model") < order.index("start") < order.index("engine")
        assert path.name == "rank-0.jsonl" or lines[order.index("start")]["environment"]["git_revision"] is None


def test_what_two_further_steps_send_is_recorded_and_nothing_else_of_them(results: Results) -> None:
    """10 steps, of 2 micro-steps each, and one after the evaluation: under DDP and ZeRO-0 every parameter once."""
    for run in results.runs:
        engine, _ = label(run)
        for rank in run.ranks:
            assert len(rank.steps) == 2 * STEPS
            assert rank.model is not None
            sizes = [sum(one.input_elements for one in line.collectives or ()) for line in rank.traffic]
            if engine == "none":
                assert [(line.step, line.backend, line.reason) for line in rank.traffic] == [(10, "none", None)]
                assert sizes == [0]
                continue
            assert [(line.step, line.backend, line.reason) for line in rank.traffic] == [
                (11, "gloo", None), (12, "gloo", None),
            ]  # fmt: skip
            assert rank.model.parameters is not None
            # DeepSpeed asks for its norm too, to clip.
            assert sizes == [rank.model.parameters + (engine == "deepspeed")] * 2


def test_engines_and_rank_counts_give_the_same_losses(results: Results) -> None:
    """fp32, clipping on, accumulation 2 at one rank against none at two, an incomplete last step: all one curve."""
    curves = {label(run): loss_curve(run) for run in results.runs}
    reference = curves["none", 1]
    assert len(reference) == 2 * STEPS
    assert len(set(reference)) == len(reference)
    for where, curve in curves.items():
        assert curve == pytest.approx(reference, rel=1e-5), where


def test_the_same_trial_twice_gives_the_same_loss_curve_to_the_bit(results: Results) -> None:
    repeats: dict[str, list[list[float]]] = {}
    for run in results.runs:
        repeats.setdefault(run.header.trial_id, []).append(loss_curve(run))
    for first, second in repeats.values():
        assert first == second


def test_padding_is_never_counted_as_images(results: Results) -> None:
    for run in results.runs:
        for epoch in (0, 1):
            counted = sum(step.images for rank in run.ranks for step in rank.steps if step.epoch == epoch)
            assert counted == IMAGES, label(run)
        assert [line.images for line in run.ranks[0].epochs] == [IMAGES, IMAGES]
        full = [sum(rank.steps[step].images for rank in run.ranks) for step in range(STEPS)]
        assert full == [GLOBAL_BATCH] * 4 + [IMAGES - 4 * GLOBAL_BATCH]


def test_epoch_figures_are_reduced_over_ranks(results: Results) -> None:
    """All ranks write the same figures, equal to those of one rank."""
    finals = {label(run): [rank.epochs[-1] for rank in run.ranks] for run in results.runs}
    reference = finals["none", 1][0]
    for where, lines in finals.items():
        for line in lines:
            assert line.train_loss == pytest.approx(reference.train_loss, rel=1e-5), where
            assert line.held_out_loss == pytest.approx(reference.held_out_loss, rel=1e-4), where
            assert line.train_accuracy == pytest.approx(reference.train_accuracy, abs=1.5 / IMAGES), where


def test_training_learns(results: Results) -> None:
    for run in results.runs:
        first, last = run.ranks[0].epochs
        assert first.train_loss is not None
        assert last.train_loss is not None
        assert last.train_loss < first.train_loss, label(run)


def test_start_up_is_told_apart_phase_by_phase(results: Results) -> None:
    for run in results.runs:
        for rank in run.ranks:
            own = [phase for phase in rank.phases if phase.name != "prepare"]  # the first run's wait for imports
            assert [phase.name for phase in own] == ["launch", "imports", "data", "model", "engine", "first_step"]
            start_up = sum(phase.seconds for phase in own)
            assert 0 < start_up < run.outcome.wall_seconds


def test_ranks_are_pinned_to_cores_of_their_own_with_equal_threads(results: Results) -> None:
    for run in results.runs:
        environments = [rank.start.environment for rank in run.ranks if rank.start]
        assert {environment.threads for environment in environments} == {run.header.trial.world.threads_per_rank}
        cores = [set(environment.cores_allowed) for environment in environments]
        assert all(len(c) >= run.header.trial.world.threads_per_rank for c in cores)  # with their siblings
        assert sum(map(len, cores)) == len(set().union(*cores))


def test_every_rank_tells_what_it_used_in_every_epoch(results: Results) -> None:
    for run in results.runs:
        for rank in run.ranks:
            assert [line.epoch for line in rank.resources] == [0, 1]
            assert rank.start is not None
            environment = rank.start.environment
            assert environment.numa_nodes
            for line, epoch in zip(rank.resources, rank.epochs, strict=True):
                assert line.seconds is not None
                assert 0 < line.seconds <= epoch.seconds
                assert environment.threads is not None
                # No rank can use more than its cores; it is pinned to those of its threads.
                assert 0 < line.cpu_seconds < 1.1 * environment.threads * line.seconds + 0.02, label(run)
                assert line.rss_bytes is not None
                assert line.peak_rss_bytes is not None
                assert 50 * 2**20 < line.rss_bytes <= line.peak_rss_bytes
                assert (line.cpu_throttled_seconds is None) == (environment.cpu_quota_cores is None)
                assert (line.gpu, line.gpu_reason) == (None, "the rank computes on the host")
                assert line.energy is not None
                assert (line.energy.joules is None) == bool(line.energy.reason)
            if rank.rank > 0:
                assert {line.energy.reason for line in rank.resources if line.energy} == {"measured by local rank 0"}


def test_every_rank_measures_its_own_matrix_multiply_rate(results: Results) -> None:
    """And trains at less than that rate: the share is of the real device."""
    for run in results.runs:
        assert [rank.matmul.dtype for rank in run.ranks if rank.matmul] == ["fp32"] * len(run.ranks)
    for trial in analyse(results).trials.values():
        assert trial.resources is not None
        assert trial.resources.share_of_matmul is not None
        assert 0 < trial.resources.share_of_matmul.value < 1
        assert all(0 < (rank.share_of_matmul or 0) < 1 for rank in trial.resources.by_rank)
        assert (trial.resources.mfu, trial.resources.mfu_reason) == (None, "a CPU has no published peak")


def test_deepspeed_was_told_the_clipping(folder: Path, results: Results) -> None:
    from vitscale.engines.deepspeed.wrap import configuration

    trial = next(run.header.trial for run in results.runs if label(run) == ("deepspeed", 2))
    assert configuration(trial)["gradient_clipping"] == 0.5
    plain = trial.model_copy(update={"train": trial.train.model_copy(update={"gradient_clipping": 0.0})})
    assert configuration(plain)["gradient_clipping"] == 0.0


def test_the_gradient_dtype_is_recorded(results: Results) -> None:
    seen = {label(run): run.ranks[0].model.gradient_dtype for run in results.runs if run.ranks[0].model}
    assert seen == {
        ("none", 1): None,
        ("ddp", 1): "float32", ("ddp", 2): "float32",
        ("deepspeed", 1): "float32", ("deepspeed", 2): "float32",
    }  # fmt: skip


def test_the_same_command_again_does_nothing(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*")}
    answer = vitscale("run", "study.toml", "-o", "results", cwd=folder.parent)
    assert answer.returncode == 0
    assert "Nothing to do" in answer.stdout
    assert {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*")} == before


def test_the_report_speaks_of_all_trials(folder: Path) -> None:
    answer = vitscale("report", folder, "--format", "json")
    assert answer.returncode == 0, answer.stderr
    trials = json.loads(answer.stdout)["trials"]
    assert {(t["engine"], t["gpus"], t["global_batch"]) for t in trials} == {
        ("none", 1, 32), ("ddp", 1, 32), ("ddp", 2, 32), ("deepspeed", 1, 32), ("deepspeed", 2, 32),
    }  # fmt: skip
    for trial in trials:
        assert trial["outcome"] == "completed"
        assert trial["repeats"] == 2
        assert trial["images_per_second"] > 0
        assert trial["startup_seconds"] > 0
