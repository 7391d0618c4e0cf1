"""DeepSpeed's logs: what a step's seconds are, whose they are, and where the time went."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

from importers.logs import configuration, deepspeed_log, imported, steady, timers
from vitscale.analysis import Analysis
from vitscale.analysis.trials import TrialResult
from vitscale.errors import RequestError, StoreError
from vitscale.importers.contents import ImportOptions
from vitscale.importers.importing import guess, import_logs


def only(found: Analysis) -> TrialResult:
    ((_, trial),) = found.trials.items()
    return trial


def rate_lines(rates: dict[int, float]) -> list[str]:
    """Lines of the throughput timer, step to samples/s, as DeepSpeed prints them without wall_clock_breakdown."""
    return [
        f"[2024-05-01 12:00:00,000] [INFO] [timer.py:264:stop] epoch=0/micro_step={4 * step}/global_step={step}, "
        f"RunningAvgSamplesPerSec=7000.1, CurrSamplesPerSec={rate}, MemAllocated=1.2GB, MaxMemAllocated=3.4GB"
        for step, rate in rates.items()
    ]


def test_samples_a_second_without_timers_are_steps_of_the_batch_of_all(tmp_path: Path) -> None:
    """4,096 images of 16 GPUs at 8,192 a second take 0.5 s."""
    lines = rate_lines({10: 8192.0, 20: 8192.0, 30: 8192.0})
    lines.append(rate_lines({40: 81.0})[0].partition("1.0")[0])  # cut off
    path = deepspeed_log(tmp_path / "a.log", lines, world_size=16, micro_batch=64, grad_accum=4)
    assert guess([path]) == "deepspeed"
    found = imported(tmp_path, [path], "deepspeed")
    trial = only(found)
    assert [trial.run_figures[0].step_seconds, trial.run_figures[0].images_per_second] == pytest.approx([0.5, 8192])
    assert trial.run_figures[0].timed_steps == 3
    assert found.study.imported is not None
    assert any("leave out what lies between two steps" in note for note in found.study.imported.notes)
    assert not any("cannot be told apart" in note for note in found.study.imported.notes)


@pytest.mark.parametrize("breakdown", ["True", "False", ""])
def test_of_samples_a_second_alone_nothing_says_that_steps_waited_for_the_device(
    tmp_path: Path, breakdown: str
) -> None:
    """Most such runs never had wall_clock_breakdown, whose removal the report would advise."""
    path = deepspeed_log(tmp_path / "a.log", rate_lines({10: 8192.0, 20: 8192.0}))
    lines = [line for line in path.read_text().splitlines() if breakdown or "wall_clock_breakdown" not in line]
    path.write_text("\n".join(re.sub(r"(wall_clock_breakdown .*)True", rf"\g<1>{breakdown}", line) for line in lines))
    found = imported(tmp_path, [path], "deepspeed")
    assert any(finding.kind == "synchronised-timing" for finding in found.findings) == (breakdown == "True")
    model = only(found).run_figures[0].model
    assert model is not None
    assert model.synchronised_timing is (True if breakdown == "True" else None)


def test_logs_of_samples_a_second_are_a_curve(tmp_path: Path) -> None:
    paths = []
    for gpus, rate in ((8, 4000.0), (16, 7600.0)):
        paths.append(deepspeed_log(tmp_path / f"{gpus}.log", rate_lines({10: rate}), world_size=gpus))
    (curve,) = imported(tmp_path, paths, "deepspeed").curves
    assert [point.speedup.value for point in curve.points if point.speedup] == pytest.approx([1.0, 1.9])


def test_timers_count_where_samples_a_second_stand_beside_them(tmp_path: Path) -> None:
    lines = [*steady(0, 30, period=0.5), *rate_lines({10: 1.0})]
    trial = only(imported(tmp_path, [deepspeed_log(tmp_path / "a.log", lines)], "deepspeed"))
    assert trial.run_figures[0].step_seconds == pytest.approx(0.5, abs=1e-9)


def test_a_step_lasts_from_line_to_line(tmp_path: Path) -> None:
    trial = only(imported(tmp_path, [deepspeed_log(tmp_path / "a.log", steady(0, 30, period=0.5))], "deepspeed"))
    assert trial.step_seconds is not None
    assert trial.step_seconds.value == pytest.approx(0.5, abs=1e-9)
    assert trial.trial.world.size == 2
    assert trial.trial.train.engine == "deepspeed"
    assert trial.trial.train.precision == "fp32"
    assert trial.trial.train.zero_stage == 0
    # 2 ranks x 8 images, of which one rank alone is in the log.
    assert trial.images_per_second is not None
    assert trial.images_per_second.value == pytest.approx(16 / 0.5)


def test_without_times_of_day_a_step_is_the_sum_of_its_timers(tmp_path: Path) -> None:
    lines = [timers(0, 0, 0.1, 0.3, 0.04, 0.05, stamped=False) for _ in range(30)]
    trial = only(imported(tmp_path, [deepspeed_log(tmp_path / "a.log", lines)], "deepspeed"))
    assert trial.step_seconds is not None
    assert trial.step_seconds.value == pytest.approx(0.49)


def test_older_names_and_prefixes(tmp_path: Path) -> None:
    times = "forward: 100.00 | backward: 340.00 | backward_inner: 300.00 | backward_allreduce: 40.00 | step: 50.00"
    line = f"rank={{}} time (ms) | {times}"
    path = deepspeed_log(tmp_path / "a.log", [line.format(rank) for _ in range(20) for rank in (0, 1)])
    trial = only(imported(tmp_path, [path], "deepspeed"))
    assert trial.step_seconds is not None
    assert trial.step_seconds.value == pytest.approx(0.49)
    assert [rank.rank for rank in trial.recorded_runs[0].ranks] == [0, 1]


def test_the_parts_of_a_step(tmp_path: Path) -> None:
    trial = only(imported(tmp_path, [deepspeed_log(tmp_path / "a.log", steady(0, 30))], "deepspeed"))
    assert trial.breakdown is not None
    parts = trial.breakdown.typical.parts
    assert parts["forward"] == pytest.approx(0.1)
    assert parts["backward"] == pytest.approx(0.3)
    assert parts["optimizer"] == pytest.approx(0.05)
    assert parts["other"] == pytest.approx(0.01)
    assert trial.breakdown.typical.exposed_seconds == pytest.approx(0.04)
    assert parts["wait"] is None
    assert parts["wire"] is None
    assert parts["data_wait"] is None
    assert "rank 0" in trial.breakdown.reasons["wire"]
    assert "cannot be told apart" in trial.breakdown.reasons["wire"]


def _two_ranks(steps: int) -> tuple[list[str], list[str]]:
    """Rank 0 computes 60 ms longer, so that rank 1 waits 60 ms; the transfer is 20 ms on both."""
    slow = [timers(0, (k + 1) * 0.5, 0.1, 0.31, 0.02, 0.05) for k in range(steps)]
    fast = [timers(1, (k + 1) * 0.5, 0.1, 0.25, 0.08, 0.05) for k in range(steps)]
    return slow, fast


@pytest.mark.parametrize("files", [1, 2], ids=["both ranks in one log", "a log for each rank"])
def test_with_the_logs_of_all_ranks_waiting_and_transfer_are_told_apart(tmp_path: Path, files: int) -> None:
    slow, fast = _two_ranks(30)
    if files == 1:
        mixed = [line for pair in zip(slow, fast, strict=True) for line in pair]
        paths = [deepspeed_log(tmp_path / "all.log", mixed)]
    else:
        paths = [deepspeed_log(tmp_path / "r0.log", slow), deepspeed_log(tmp_path / "r1.log", fast)]
    trial = only(imported(tmp_path, paths, "deepspeed"))
    assert trial.breakdown is not None
    assert len(trial.breakdown.ranks) == 2
    first, second = trial.breakdown.ranks
    assert first.parts["wire"] == pytest.approx(0.02)
    assert first.parts["wait"] == pytest.approx(0.0, abs=1e-9)
    assert second.parts["wire"] == pytest.approx(0.02)
    assert second.parts["wait"] == pytest.approx(0.06)
    assert trial.breakdown.straggler is None or trial.breakdown.straggler.rank == 0


def test_accumulation_one_global_line_is_one_step(tmp_path: Path) -> None:
    lines = []
    for k in range(20):
        end = (k + 1) * 1.0
        lines += [
            timers(0, end - 0.5, 0.1, 0.3, 0.0, 0.0, micro=True),
            timers(0, end, 0.1, 0.25, 0.05, 0.05, micro=True),
        ]
        lines.append(timers(0, end, 0.2, 0.55, 0.05, 0.05))
    path = deepspeed_log(tmp_path / "a.log", lines, grad_accum=2)
    trial = only(imported(tmp_path, [path], "deepspeed"))
    assert trial.trial.train.grad_accum == 2
    assert trial.trial.global_batch == 32
    assert trial.step_seconds is not None
    assert trial.step_seconds.value == pytest.approx(1.0)
    names = [name for name, _, _ in trial.recorded_runs[0].ranks[0].explained[5].phases]
    assert names == ["forward", "backward", "forward", "backward", "optimizer"]
    assert trial.breakdown is not None
    assert trial.breakdown.typical.parts["forward"] == pytest.approx(0.2)


def test_a_pause_is_kept_and_is_in_no_figure(tmp_path: Path) -> None:
    lines = steady(0, 20) + [timers(0, 10.0 + 60.0 + (k + 1) * 0.5, 0.1, 0.3, 0.04, 0.05) for k in range(20)]
    trial = only(imported(tmp_path, [deepspeed_log(tmp_path / "a.log", lines)], "deepspeed"))
    steps = trial.recorded_runs[0].ranks[0].steps
    assert max(step.seconds for step in steps) == pytest.approx(60.5)
    assert len(steps) == 40
    assert [step.step for step in steps if step.window == "settling"] == [20]
    assert trial.images_per_second is not None
    assert trial.images_per_second.value == pytest.approx(32.0)


def test_interleaved_coloured_and_cut_off_lines(tmp_path: Path) -> None:
    lines = steady(0, 12) + [f"\x1b[32m{line}\x1b[0m" for line in steady(0, 24)[12:]]
    lines[3] = f"Loading ... {lines[3]}"
    lines[5] = f"{lines[5]}[2024-05-01 12:00:03,100] [INFO] [x.py:1:y] something else"
    slow, fast = lines, [timers(1, (k + 1) * 0.5, 0.1, 0.3, 0.04, 0.05) for k in range(24)]
    mixed = [
        f"{one}{other}" if k % 3 == 0 else f"{one}\n{other}"
        for k, (one, other) in enumerate(zip(slow, fast, strict=True))
    ]
    path = deepspeed_log(tmp_path / "a.log", mixed)
    whole = path.read_text()
    path.write_text(whole[: whole.rindex("| step:") + 12])  # in the middle of the last number
    found = imported(tmp_path, [path], "deepspeed")
    trial = only(found)
    assert [len(rank.steps) for rank in trial.recorded_runs[0].ranks] == [24, 23]
    assert any("1 cut-off line" in problem for problem in found.problems)
    assert any("ranks disagree in their steps" in problem for problem in found.problems)


def test_a_broken_line_does_not_shift_the_steps_after_it(tmp_path: Path) -> None:
    slow, fast = _two_ranks(30)
    fast[10] = fast[10].replace("| step: 50.00", "| step: 50.0")
    mixed = [line for pair in zip(slow, fast, strict=True) for line in pair]
    found = imported(tmp_path, [deepspeed_log(tmp_path / "a.log", mixed)], "deepspeed")
    trial = only(found)
    assert 10 not in [step.step for step in trial.recorded_runs[0].ranks[1].steps]
    assert trial.recorded_runs[0].ranks[1].steps[-1].step == 29
    assert trial.breakdown is not None
    assert trial.breakdown.ranks[1].parts["wait"] == pytest.approx(0.06)
    assert any("1 broken line" in problem and "step" in problem for problem in found.problems)


def test_logs_of_two_sizes_are_one_curve(tmp_path: Path) -> None:
    paths = [
        deepspeed_log(tmp_path / "two.log", steady(0, 30, 0.5), 2),
        deepspeed_log(tmp_path / "four.log", steady(0, 30, 0.6), 4),
    ]
    found = imported(tmp_path, paths, "deepspeed", train_samples=16_000)
    (curve,) = found.curves
    assert [point.gpus for point in curve.points] == [2, 4]
    assert curve.points[1].efficiency is not None
    assert curve.points[1].efficiency.value == pytest.approx(0.5 / 0.6)  # 1,000 and 500 steps


@pytest.mark.parametrize(
    "telling",
    [
        "[2024-05-01 11:59:59,000] [INFO] [config.py:733:__init__] Config mesh_device None world_size = 4",
        "[2024-05-01 11:59:59,000] [INFO] [launch.py:253:main] dist_world_size=4",
        "node7:12:34 [1] NCCL INFO ncclCommInitRank comm 0x55 rank 1 nranks 4 cudaDev 1 nvmlDev 1 busId 30 - Init",
        "node7:12:34 [1] NCCL INFO comm 0x55 rank 1 nRanks 4 nNodes 2 localRanks 2 localRank 1 MNNVL 0",
    ],
)
def test_the_world_size_is_told_in_several_ways(tmp_path: Path, telling: str) -> None:
    path = tmp_path / "a.log"
    path.write_text("\n".join([telling, *steady(0, 20)]) + "\n")
    trial = only(imported(tmp_path, [path], "deepspeed", micro_batch=8))
    assert trial.trial.world.size == 4
    assert trial.trial.world.nodes == (2 if "nNodes" in telling else 1)


def test_nobody_tells_the_world_size(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("\n".join(steady(0, 20)) + "\n")
    with pytest.raises(RequestError, match="--gpus"):
        import_logs([path], "deepspeed", ImportOptions(micro_batch=8), tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_without_a_micro_batch_steps_stand_and_rates_are_unknown(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("\n".join(["world_size ................... 2", *steady(0, 20)]) + "\n")
    found = imported(tmp_path, [path], "deepspeed", train_samples=1000)
    trial = only(found)
    assert trial.step_seconds is not None
    assert trial.step_seconds.value == pytest.approx(0.5)
    assert trial.images_per_second is None
    assert trial.epoch_seconds is None
    assert found.study.imported is not None
    assert any("--micro-batch" in note for note in found.study.imported.notes)


def test_another_number_of_gpus_than_the_log_tells_is_refused(tmp_path: Path) -> None:
    path = deepspeed_log(tmp_path / "a.log", steady(0, 20), 2)
    with pytest.raises(RequestError, match="--gpus is 8"):
        import_logs([path], "deepspeed", ImportOptions(gpus=8), tmp_path / "results")


def test_a_log_that_was_appended_to_is_two_runs(tmp_path: Path) -> None:
    begin = "[2024-05-01 11:59:59,000] [INFO] [logging.py:128:log_dist] [Rank 0] DeepSpeed info: version=0.15.4, git"
    lines = [begin, *steady(0, 20, 0.5), begin, *configuration(2), *steady(0, 20, 0.6)]
    trial = only(imported(tmp_path, [deepspeed_log(tmp_path / "a.log", lines)], "deepspeed"))
    assert sorted(run.step_seconds or 0 for run in trial.run_figures) == pytest.approx([0.5, 0.6])


def test_a_try_that_ended_before_its_first_step_tells_nothing_of_the_next(tmp_path: Path) -> None:
    begin = "[2024-05-01 11:59:59,000] [INFO] [logging.py:128:log_dist] [Rank 0] DeepSpeed info: version=0.15.4, git"
    failed = [begin, *configuration(4, micro_batch=32), "torch.OutOfMemoryError: CUDA out of memory."]
    lines = [*failed, begin, *configuration(2, micro_batch=8), *steady(0, 20)]
    path = tmp_path / "a.log"
    path.write_text("\n".join(lines) + "\n")
    trial = only(imported(tmp_path, [path], "deepspeed"))
    assert (trial.trial.world.size, trial.trial.train.micro_batch) == (2, 8)


def test_a_log_without_timers_is_refused(tmp_path: Path) -> None:
    path = deepspeed_log(tmp_path / "a.log", ["nothing", "time (ms) | optimizer_step: 3.00", "time (ms)"])
    with pytest.raises(StoreError, match="no timers in it"):
        import_logs([path], "deepspeed", ImportOptions(), tmp_path / "results")


def test_16_bit_training_is_recognised(tmp_path: Path) -> None:
    path = deepspeed_log(tmp_path / "a.log", steady(0, 20))
    path.write_text(
        path.read_text().replace("bfloat16_enabled .............. False", "bfloat16_enabled .............. True")
    )
    assert only(imported(tmp_path, [path], "deepspeed")).trial.train.precision == "bf16-params"


def test_many_steps_are_explained_in_part(tmp_path: Path) -> None:
    path = deepspeed_log(tmp_path / "a.log", steady(0, 2500))
    rank = only(imported(tmp_path, [path], "deepspeed")).recorded_runs[0].ranks[0]
    assert len(rank.steps) == 2500
    assert 1000 < len(rank.explained) <= 2000
    assert statistics.median(line.seconds for line in rank.explained) == pytest.approx(0.5, abs=1e-6)


def test_a_rank_that_the_world_does_not_have_is_left_out(tmp_path: Path) -> None:
    lines = [*steady(0, 20), timers(777, 11.0, 0.1, 0.3, 0.04, 0.05)]
    found = imported(tmp_path, [deepspeed_log(tmp_path / "a.log", lines)], "deepspeed")
    assert [rank.rank for rank in only(found).recorded_runs[0].ranks] == [0]
    assert found.study.imported is not None
    assert any("rank 777" in note for note in found.study.imported.notes)


def test_timers_of_a_pipeline_lead_to_the_lines_that_tell_its_steps(tmp_path: Path) -> None:
    lines = [
        "steps: 10 loss: 2.3000 iter time (s): 2.012 samples/sec: 256.000",
        "[Rank 0] time (ms) | pipe_send_output: 10.11 | pipe_recv_grad: 200.32",
        timers(0, 1.0, 0.1, 0.3, 0.04, 0.05, micro=True),
    ]
    with pytest.raises(StoreError, match=r"a.log: its timers are a pipeline's: say --format train-log, which reads"):
        import_logs([deepspeed_log(tmp_path / "a.log", lines)], "deepspeed", ImportOptions(), tmp_path / "results")


def test_rates_of_logs_that_tell_no_world_size_are_a_curve_of_the_gpus_given(tmp_path: Path) -> None:
    paths = [tmp_path / "two-rank0.log", tmp_path / "eight-rank1.log"]
    for path, rate in zip(paths, (1000.0, 3800.0), strict=True):
        path.write_text("\n".join(rate_lines({10: rate})) + "\n")
    (curve,) = imported(tmp_path, paths, "deepspeed", each_gpus=(2, 8)).curves
    speedups = {point.gpus: point.speedup.value for point in curve.points if point.speedup}
    assert speedups == pytest.approx({2: 1.0, 8: 3.8})
