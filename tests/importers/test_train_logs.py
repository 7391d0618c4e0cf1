"""Logs of loops that others train with: lines as each program words them, with known times."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from importers.logs import imported
from vitscale.analysis.trials import TrialResult
from vitscale.errors import RequestError, StoreError
from vitscale.importers import contents
from vitscale.importers.contents import ImportOptions
from vitscale.importers.importing import guess, import_logs
from vitscale.importers.train_logs import _Log, _look_for_facts, is_line

STEPS, OF_EPOCH = (0.25, 0.26, 0.24, 0.25, 0.252, 0.248), 1251
"""Seconds of every 50th step, after a first line of `BEGINNING`."""
BEGINNING = 9.0


def timm(gpus: int = 8) -> list[str]:
    batch, of = 128 * gpus, OF_EPOCH * 8 // gpus
    return [
        "Training in distributed mode with multiple processes, 1 device per process."
        f"Process 0, total {gpus}, device cuda:0.",
        "Model vit_base_patch16_224 created, param count:86567656",
        *(
            f"Train: 0 [{50 * n:>4d}/{of} ({4 * n:>3.0f}%)]  Loss: 6.94 (6.95)  "
            f"Time: {own:.3f}s, {batch / own:>7.2f}/s  ({own:.3f}s, {batch / own:>7.2f}/s)  LR: 1e-06  "
            f"Data: {own / 50:.3f} (0.100)"
            for n, own in enumerate((BEGINNING, *STEPS))
        ),
        "Test: [   0/48]  Time: 2.000 (2.000)  Loss:  6.9 ( 6.9)  Acc@1:  0.1 ( 0.1)  Acc@5:  0.5 ( 0.5)",
    ]


def swin() -> list[str]:
    at = "[2023-04-01 12:00:00 swin_tiny](main.py 211): INFO"
    return [
        "RANK and WORLD_SIZE in environ: 0/8",
        "DATA:",
        "  BATCH_SIZE: 128",
        f"{at} number of params: 28288354",
        *(
            f"{at} Train: [0/300][{50 * n}/{OF_EPOCH}]\teta 0:05:12 lr 0.000001\t wd 0.0500\ttime {own:.4f} (0.3000)\t"
            "data time 0.0050 (0.0100)\tloss 6.9 (6.9)\tgrad_norm 1.2 (inf)\tloss_scale 65536.0 (65536.0)\tmem 9000MB"
            for n, own in enumerate((BEGINNING, *STEPS))
        ),
    ]


def references(name: str = "Epoch: [0]") -> list[str]:
    """In its 20 first steps the mean holds the first one."""
    places = (0, 10, *(50 * n for n in range(1, len(STEPS) + 1)))
    return [
        "Namespace(amp=True, batch_size=128, device='cuda', distributed=True, gpu=0, model='vit_b_16', world_size=8)",
        *(
            f"{name}  [{place:>4d}/{OF_EPOCH}]  eta: 0:05:12  lr: 0.1  img/s: 512.0  loss: 6.9 (6.9)  time: {own:.4f}  "
            "data: 0.0050  max mem: 9000"
            for place, own in zip(places, (BEGINNING, 1.1, *STEPS), strict=True)
        ),
        "Test:   [  0/391]  eta: 0:01:00  loss: 6.9  time: 3.0000  data: 2.0000  max mem: 9000",
    ]


def dinov2() -> list[str]:
    return [
        "batch_size_per_gpu: 128",
        *(
            f"I20230701 10:00:00 123 dinov2 helpers.py:103] Training  [{10 * n:6d}/125000]  eta: 1 day, 3:00:00  "
            f"lr: 0.0000 (0.0000)  total_loss: 11.0 (11.2)  time: {own:.6f}  data: 0.001000  max mem: 30000"
            for n, own in enumerate((BEGINNING, 1.1, *STEPS))
        ),
    ]


def mmengine() -> list[str]:
    at = "2023/04/01 12:00:00 - mmengine - INFO -"
    return [
        "    Distributed training: True",
        "    GPU number: 8",
        "val_dataloader = dict(",
        "    batch_size=1,",
        "train_dataloader = dict(",
        "    batch_size=128,",
        *(
            f"{at} Epoch(train)   [1][{50 * n:>4d}/{OF_EPOCH}]  lr: 1.0e-04  eta: 1 day, 2:00:00  time: {own:.4f}  "
            "data_time: 0.0050  memory: 9000  loss: 6.9"
            for n, own in enumerate((BEGINNING, *STEPS), start=1)
        ),
        f"{at} Epoch(val) [1][391/391]  accuracy/top1: 0.1000  data_time: 0.2000  time: 3.0000",
    ]


def mmcv() -> list[str]:
    return [
        "data = dict(samples_per_gpu=128, workers_per_gpu=4)",
        *(
            f"2021-03-03 17:50:17,582 - mmseg - INFO - Iter [{50 * n}/160000]\tlr: 1.000e-02, eta: 17:27:26, "
            f"time: {own:.3f}, data_time: 0.005, memory: 3569, decode.loss_seg: 1.3139, loss: 1.3139"
            for n, own in enumerate((BEGINNING, *STEPS), start=1)
        ),
    ]


def megatron() -> list[str]:
    return [
        "using world size: 8, data-parallel size: 8, context-parallel size: 1, tensor-model-parallel size: 1",
        *(
            f" [2024-03-04 11:22:33] iteration {10 * n:8d}/  500000 | consumed samples: {10240 * n:12d} | "
            f"elapsed time per iteration (ms): {1000 * own:.1f} | learning rate: 1.0E-04 | "
            "global batch size:  1024 | loss: 6.9E+00 |"
            for n, own in enumerate((BEGINNING, *STEPS), start=1)
        ),
        "    time (ms) | forward-compute: 100.0 | backward-compute: 140.0",
    ]


TOPOLOGY = "Using topology: {" + ", ".join(
    f"ProcessCoord(pipe={rank // 8}, data={rank % 8}): {rank}" for rank in range(16)
) + "}"  # fmt: skip
"""Of 8 copies of a model, each on 2 GPUs."""


def pipeline(losses: str = "", before: Sequence[str] = ()) -> list[str]:
    """8 copies x 64 images x 2 micro-steps = 1,024."""
    at = "[2024-05-01 10:00:00,000] [INFO] [config.py:997:print]  "
    return [
        *before,
        f"{at} bfloat16_enabled ............. True",
        f"{at} gradient_accumulation_steps .. 2",
        f"{at} train_micro_batch_size_per_gpu  64",
        f"{at} world_size ................... 8",
        f"{at} zero_optimization_stage ...... 1",
        *(
            f"steps: {10 * n} loss: 2.3000 {losses}iter time (s): {own:.3f} samples/sec: {1024 / own:.3f}\n"
            f"[2024-05-01 10:00:20,000] [INFO] [logging.py:96:log_dist] [Rank 0] time (ms) | pipe_send_output: {n}.11"
            for n, own in enumerate((BEGINNING, *STEPS), start=1)
        ),
    ]


def log(folder: Path, lines: Sequence[str], name: str = "train.log") -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_log_of_one_process_beside_eight_copies_takes_the_copies(tmp_path: Path) -> None:
    """DeiT prints "Not using distributed mode" under DeepSpeed's launcher, whose configuration tells the ranks."""
    path = tmp_path / "deit.log"
    lines = "".join(f"Epoch: [0]  [{n}/100]  eta: 0:10  time: 0.5000  data: 0.0100\n" for n in range(3))
    path.write_text(
        f"Not using distributed mode\n[INFO] [config.py:1000:print]   world_size ................... 8\n{lines}"
    )
    ((_, trial),) = imported(tmp_path, [path], "train-log").trials.items()
    assert trial.trial.world.size == 8


@pytest.mark.parametrize(
    "lines", [timm(), swin(), references(), references("Epoch: [0/100]"), dinov2(), mmengine(), mmcv(), megatron()],
    ids=["timm", "Swin", "torchvision", "DINO", "DINOv2", "MMEngine", "MMCV", "Megatron-LM"],
)  # fmt: skip
def test_each_loops_lines_are_its_steps(tmp_path: Path, lines: list[str]) -> None:
    path = log(tmp_path, lines)
    assert guess([path]) == "train-log"
    found = imported(tmp_path, [path], "train-log", gpus=8)
    ((_, trial),) = found.trials.items()
    assert (trial.trial.world.size, trial.trial.train.micro_batch) == (8, 128)
    assert trial.run_figures[0].timed_steps == len(STEPS)
    assert trial.step_seconds is not None
    assert trial.step_seconds.value == pytest.approx(sum(STEPS) / len(STEPS), rel=1e-3)
    assert trial.images_per_second is not None
    assert trial.images_per_second.value == pytest.approx(1024 * len(STEPS) / sum(STEPS), rel=1e-3)
    assert found.study.imported is not None
    assert not found.study.imported.problems


def notes(folder: Path, lines: list[str], **options: object) -> str:
    found = imported(folder, [log(folder, lines)], "train-log", **options)
    assert found.study.imported is not None
    return "\n".join(found.study.imported.notes)


def test_what_a_log_tells_beside_times(tmp_path: Path) -> None:
    said = notes(tmp_path, timm())
    assert "train.log: 7 lines of timm, each taken for a step" in said
    assert "about 128 images on each GPU, from its images/s" in said
    assert f"about {1251 * 1024:,} training images, from the steps of an epoch" in said
    assert "waited for data in 2 % of a step" in said
    found = imported(tmp_path / "again", [log(tmp_path, timm())], "train-log")
    ((_, trial),) = found.trials.items()
    assert "vit_base_patch16_224 has 86,567,656 parameters, as vit-b16 has" in said
    assert trial.trial.model.name == "vit-b16"
    other = [line.replace("param count:86567656", "param count:86567657") for line in timm()]
    ((_, trial),) = imported(tmp_path / "other", [log(tmp_path, other)], "train-log").trials.items()
    assert (trial.trial.model.parameter_count, trial.trial.origin) == (86_567_657, "vit_base_patch16_224")
    assert trial.epoch_seconds is not None
    assert trial.epoch_seconds.value == pytest.approx(1251 * 0.25, rel=1e-3)


def test_logs_of_several_gpu_counts_are_a_curve(tmp_path: Path) -> None:
    paths = [log(tmp_path, timm(gpus), f"{gpus}.log") for gpus in (1, 2, 8)]
    (curve,) = imported(tmp_path, paths, "train-log").curves
    efficiencies = {point.gpus: point.efficiency.value for point in curve.points if point.efficiency}
    assert efficiencies == pytest.approx({1: 1.0, 2: 1.0, 8: 1.0}, rel=1e-3)


def test_one_dataset_has_one_size_though_batches_that_are_not_full_are_left_out(tmp_path: Path) -> None:
    """1,281,167 images: 1,251 steps of 1,024, and 156 of 8,192, which are 0.24 % fewer."""
    large = [line.replace(f"/{OF_EPOCH * 8 // 64} ", "/156 ") for line in timm(64)]
    paths = [log(tmp_path, timm(), "8.log"), log(tmp_path, large, "64.log")]
    found = imported(tmp_path, paths, "train-log")
    assert {run.model.train_samples for trial in found.trials.values() for run in trial.run_figures if run.model} == {
        1_281_024
    }
    unlike = imported(tmp_path / "unlike", [paths[0], log(tmp_path, mmengine(), "other.log"), log(
        tmp_path, [line.replace("/1251]", "/500]") for line in mmengine()], "half.log")], "train-log")  # fmt: skip
    assert unlike.study.imported is not None
    assert any("about 512,000 or 1,281,024 training images" in note for note in unlike.study.imported.notes)


def test_the_gpus_must_be_told_by_somebody(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"'train.log' does not tell the GPUs. Give them: --gpus 8"):
        import_logs([log(tmp_path, mmcv())], "train-log", ImportOptions(), tmp_path / "results")
    alone = ["Training with a single process on 1 device (cuda:0).", *timm()[2:]]
    found = imported(tmp_path, [log(tmp_path, alone)], "train-log")
    trials: list[TrialResult] = list(found.trials.values())
    assert [trial.trial.world.size for trial in trials] == [1]


def test_numbers_that_cannot_be_are_left_out_and_named(tmp_path: Path) -> None:
    lines = [*timm(), timm()[-2].replace("Time: 0.248s", "Time: 0.000s"), timm()[-2].replace("1251", "9" * 30)]
    lines[0] = lines[0].replace("total 8", "total " + "9" * 400)
    found = imported(tmp_path, [log(tmp_path, lines)], "train-log", gpus=4)
    ((_, trial),) = found.trials.items()
    assert trial.trial.world.size == 4
    assert found.study.imported is not None
    (problem,) = found.study.imported.problems
    assert problem.startswith("train.log: 2 broken lines left out: line 11 ('0.000' is no time), line 12 ")
    with pytest.raises(StoreError, match=r"nothing in 'none.log' can be used as train-log"):
        import_logs([log(tmp_path, ["Epoch 1"], "none.log")], "train-log", ImportOptions(gpus=1), tmp_path / "none")


def test_a_training_that_goes_on_with_other_gpus_is_another_run(tmp_path: Path) -> None:
    first, second = references(), references("Epoch: [1]")
    second[0] = second[0].replace("world_size=8", "world_size=2")
    found = imported(tmp_path, [log(tmp_path, [*first, *second])], "train-log")
    (trial,) = found.trials.values()
    assert (trial.trial.world.size, trial.trial.train.micro_batch) == (8, 128)
    assert trial.run_figures[0].timed_steps == len(STEPS)
    told = f"from line {len(first) + 1} on it is another run (2 GPUs where it had 8)"
    assert any(told in problem for problem in found.problems)


@pytest.mark.parametrize("gpus", [8, 4])
def test_a_try_that_ended_before_its_first_step_tells_nothing_of_the_next(tmp_path: Path, gpus: int) -> None:
    failed = [
        references()[0].replace("batch_size=128", "batch_size=256"),
        "torch.OutOfMemoryError: CUDA out of memory.",
    ]
    lines = [line.replace("world_size=8", f"world_size={gpus}") for line in references()]
    (trial,) = imported(tmp_path, [log(tmp_path, [*failed, *lines])], "train-log").trials.values()
    assert (trial.trial.world.size, trial.trial.train.micro_batch) == (gpus, 128)
    told_by_each = [*timm()[:1], *(line.replace("Process 0", "Process 1") for line in timm())]
    (trial,) = imported(tmp_path / "ranks", [log(tmp_path, [*timm(4)[:2], *told_by_each])], "train-log").trials.values()
    assert trial.trial.world.size == 8


def test_another_training_of_the_same_gpus_is_another_run(tmp_path: Path) -> None:
    again = [line.replace("Train: 0", "Train: 1") for line in timm()[2:-1]]
    shorter = [line.replace(f"/{OF_EPOCH} ", f"/{OF_EPOCH // 2} ") for line in again]
    smaller = [timm()[1].replace("base", "small").replace("86567656", "22050664"), *again]
    larger = [line.replace("batch_size=128", "batch_size=256") for line in references("Epoch: [1]")]
    for number, (first, second, why) in enumerate(
        (
            (timm(), shorter, f"epochs of {OF_EPOCH // 2} steps where it had 1,251"),
            (timm(), smaller, "vit_small_patch16_224 where it had vit_base_patch16_224"),
            (references(), larger, "256 images on each where it had 128"),
        )
    ):
        found = imported(tmp_path / f"{number}", [log(tmp_path, [*first, *second])], "train-log")
        (trial,) = found.trials.values()
        assert trial.run_figures[0].timed_steps == len(STEPS)
        assert any(f"it is another run ({why})" in problem for problem in found.problems), found.problems


def test_ranks_lines_are_read_behind_what_launchers_put_before_them(tmp_path: Path) -> None:
    for number, before in enumerate(("[default0]:", "0: ", " 0: ")):
        lines = [f"{before}{line}" for line in references()]
        (trial,) = imported(tmp_path / f"{number}", [log(tmp_path, lines)], "train-log").trials.values()
        assert (trial.trial.world.size, trial.trial.train.micro_batch) == (8, 128)


def test_gpus_that_a_log_tells_otherwise_are_not_taken_silently(tmp_path: Path) -> None:
    assert "it tells 8 GPUs itself: --gpus 4 is not taken for it" in notes(tmp_path, timm(), gpus=4)
    (tmp_path / "same").mkdir()
    assert "itself" not in notes(tmp_path / "same", timm(), gpus=8)


def test_coloured_lines_tell_their_format_too(tmp_path: Path) -> None:
    assert guess([log(tmp_path, [f"\x1b[34m{line}\x1b[0m" for line in references()])]) == "train-log"


def test_megatrons_seconds_stand_below_timers_of_setting_up(tmp_path: Path) -> None:
    setting_up = "time (ms) | model-and-optimizer-setup: 9144.87 | train/valid/test-data-iterators-setup: 3012.01"
    in_seconds = [
        re.sub(r"\(ms\): ([\d.]+)", lambda told: f"(s): {float(told[1]) / 1000:.3f}", line) for line in megatron()
    ]
    path = log(tmp_path, [setting_up, *in_seconds])
    assert guess([path]) == "train-log"
    (trial,), (same,) = (
        imported(tmp_path / name, [each], "train-log").trials.values()
        for name, each in (("s", path), ("ms", log(tmp_path, megatron(), "ms.log")))
    )
    assert trial.step_seconds is not None
    assert same.step_seconds is not None
    assert trial.step_seconds.value == pytest.approx(same.step_seconds.value)


def test_dinos_arguments_and_batches(tmp_path: Path) -> None:
    first = ["world_size: 8", "batch_size_per_gpu: 128", *references()[1:]]
    (trial,) = imported(tmp_path / "1", [log(tmp_path, first)], "train-log").trials.values()
    assert (trial.trial.world.size, trial.trial.train.micro_batch) == (8, 128)
    second = [
        line.replace("total_loss", "current_batch_size: 512.0000 (512.0000)  total_loss") for line in dinov2()[1:]
    ]
    (trial,) = imported(tmp_path / "2", [log(tmp_path, second)], "train-log", gpus=4).trials.values()
    assert trial.trial.train.micro_batch == 128


def test_mmengines_accumulation_makes_steps_of_its_iterations(tmp_path: Path) -> None:
    for number, told in enumerate(
        (
            "optim_wrapper = dict(accumulative_counts=4, type='OptimWrapper')",
            "optimizer_config = dict(type='GradientCumulativeOptimizerHook', cumulative_iters=4)",
        )
    ):
        (trial,) = imported(tmp_path / f"{number}", [log(tmp_path, [told, *mmengine()])], "train-log").trials.values()
        assert trial.trial.train.grad_accum == 4
        assert trial.step_seconds is not None
        assert trial.step_seconds.value == pytest.approx(4 * 0.25, rel=0.02)


def test_the_same_setting_again_is_the_same_run(tmp_path: Path) -> None:
    found = imported(tmp_path, [log(tmp_path, [*references(), *references("Epoch: [1]")])], "train-log")
    (trial,) = found.trials.values()
    assert trial.run_figures[0].timed_steps > len(STEPS)
    assert not found.problems


def test_of_mmcv_the_first_line_of_each_epoch_holds_the_loaders_start(tmp_path: Path) -> None:
    """Its time is the mean since the line before; MMEngine's is of ten steps."""
    mmcv_lines = [
        f"2021-03-03 17:50:17,582 - mmcls - INFO - Epoch [{epoch}][{step}/200]\tlr: 1.0e-02, eta: 17:27:26, "
        f"time: {0.4 if step == 100 else 0.2:.3f}, data_time: 0.005, memory: 3569, loss: 1.3139"
        for epoch in (1, 2, 3)
        for step in (100, 200)
    ]
    found = imported(tmp_path, [log(tmp_path, mmcv_lines)], "train-log", gpus=8, micro_batch=128)
    (trial,) = found.trials.values()
    assert trial.run_figures[0].timed_steps == 3
    assert trial.step_seconds is not None
    assert trial.step_seconds.value == pytest.approx(0.2)


def test_where_every_line_holds_its_epochs_beginning_only_the_first_is_set_aside(tmp_path: Path) -> None:
    """Else no step would be left."""
    lines = [
        f"2021-03-03 17:50:17,582 - mmcls - INFO - Epoch [{epoch}][50/98]\tlr: 1.0e-02, eta: 17:27:26, "
        "time: 0.200, data_time: 0.005, memory: 3569, loss: 1.3139"
        for epoch in range(1, 6)
    ]
    found = imported(tmp_path, [log(tmp_path, lines)], "train-log", gpus=8, micro_batch=128)
    (trial,) = found.trials.values()
    assert trial.run_figures[0].timed_steps == 4


def test_a_log_that_begins_with_a_progress_bar_keeps_its_lines(tmp_path: Path) -> None:
    """The bar's carriage returns fill more than what is looked at first, and end no line."""
    path = tmp_path / "log.txt"
    path.write_bytes(b"".join(b"\r%06d it/s" % number for number in range(10_000)) + b"\nfirst\nsecond\n")
    assert [text for _, text, _ in contents.lines(path)][-2:] == ["first", "second"]
    path.write_bytes(b"first\rsecond\r")
    assert [text for _, text, _ in contents.lines(path)] == ["first", "second"]


MAE = [
    "| distributed init (rank 0): env://, gpu 0",
    "[10:00:00.123456] job dir: /work",
    "[10:00:00.123456] Namespace(accum_iter=2,\nbatch_size=128,\nblr=0.0005,\neval_batch_size=5,\nworld_size=8)",
    *(f"[10:00:02.123456] {line}" for line in references()[1:]),
]
BEIT = [references()[0].replace("world_size", "update_freq=2, world_size"), *references()[1:]]
SWIN = [*swin()[:3], "TRAIN:", "  ACCUMULATION_STEPS: 2", *swin()[3:]]


@pytest.mark.parametrize("lines", [MAE, BEIT, SWIN], ids=["MAE", "BEiT", "Swin"])
def test_lines_of_micro_steps_are_parts_of_a_step(tmp_path: Path, lines: list[str]) -> None:
    """Two micro-steps of 0.25 s and 1,024 images are a step; the lines count micro-steps, 1,251 of an epoch."""
    found = imported(tmp_path, [log(tmp_path, lines)], "train-log")
    (trial,) = found.trials.values()
    train = trial.trial.train
    assert (trial.trial.world.size, train.micro_batch, train.grad_accum) == (8, 128, 2)
    assert trial.step_seconds is not None
    assert trial.step_seconds.value == pytest.approx(2 * sum(STEPS) / len(STEPS), rel=1e-3)
    assert trial.images_per_second is not None
    assert trial.images_per_second.value == pytest.approx(1024 / 0.25, rel=1e-3)
    assert {run.model.train_samples for run in trial.run_figures if run.model} == {1251 * 1024}
    assert found.study.imported is not None
    assert any("each taken for one of the 2 micro-steps of a step" in note for note in found.study.imported.notes)


@pytest.mark.parametrize(
    ("copies", "micro", "told", "gpus_a_model"),
    [
        (8, 32, (32, 4), 1),
        (2, 128, (32, 4), 4),  # each of 4 GPUs counts for 32 of its copy's 128 images
        (2, 2, (1, 128), 4),  # and for a quarter of its 256 micro-steps of 2 images
        (8, 96, (128, 1), 1),  # 1,024 are no multiple of 768: the batch grew
    ],
)
def test_megatrons_batch_accumulation_and_precision(
    tmp_path: Path, copies: int, micro: int, told: tuple[int, int], gpus_a_model: int
) -> None:
    lines = [
        f"using world size: 8, data-parallel size: {copies}, context-parallel size: 1, tensor-model-parallel size: 4",
        "  bf16 ............................................ True",
        "  fp16 ............................................ False",
        f"  micro_batch_size ................................ {micro}",
        *megatron()[1:],
    ]
    found = imported(tmp_path, [log(tmp_path, lines)], "train-log")
    (trial,) = found.trials.values()
    train = trial.trial.train
    assert (trial.trial.world.size, train.micro_batch, train.grad_accum, train.precision) == (8, *told, "bf16-params")
    assert trial.images_per_second is not None
    assert trial.images_per_second.value == pytest.approx(1024 / 0.25)
    assert found.study.imported is not None
    notes = [note for note in found.study.imported.notes if "share each copy of the model" in note]
    assert [note.split()[1] for note in notes] == ([f"{gpus_a_model}"] if gpus_a_model > 1 else [])


def test_arguments_are_read_in_time_however_they_repeat() -> None:
    start = time.perf_counter()
    for text in (
        "Namespace(" + "world_size=1" * 5000,
        "[1" * 30_000,
        "steps: 1 loss: " * 4000,
        "world_size=" + "1" * 60_000,
    ):
        assert not is_line(text)
        _look_for_facts(text, _Log())
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("before", "options", "gpus", "batch"),
    [
        ((), {}, 8, 64),
        ((), {"gpus": 16}, 16, 32),
        ((TOPOLOGY,), {}, 16, 32),
        ((TOPOLOGY[:-1],), {}, 8, 64),  # cut off: not of all ranks
    ],
    ids=["as data parallel", "--gpus", "topology", "cut topology"],
)
def test_a_pipelines_world_size_counts_copies_of_the_model(
    tmp_path: Path, before: Sequence[str], options: dict[str, int], gpus: int, batch: int
) -> None:
    path = log(tmp_path, pipeline("lm loss: 1.2000 ", before))
    assert guess([path]) == "train-log"
    found = imported(tmp_path, [path], "train-log", **options)
    (trial,) = found.trials.values()
    train = trial.trial.train
    assert (trial.trial.world.size, train.micro_batch, train.grad_accum) == (gpus, batch, 2)
    assert (train.engine, train.zero_stage, train.precision) == ("deepspeed", 1, "bf16-params")
    assert trial.run_figures[0].timed_steps == len(STEPS)
    assert trial.step_seconds is not None
    assert trial.step_seconds.value == pytest.approx(0.25)
    assert trial.images_per_second is not None
    assert trial.images_per_second.value == pytest.approx(1024 / 0.25)
    assert found.study.imported is not None
    shared = "train.log: 2 GPUs share each copy of the model"
    assert any(note.startswith(shared) for note in found.study.imported.notes) == (gpus == 16)
    assert any("its world_size 8 counts copies" in note for note in found.study.imported.notes) == (gpus == 8)


def test_images_that_gpus_cannot_share_in_whole_numbers_are_unknown(tmp_path: Path) -> None:
    """Each copy's 2 micro-steps x 64 images: 128 GPUs a copy have one each, 256 half of one."""
    for gpus, batch in ((8 * 128, 1), (8 * 256, 1)):
        found = imported(tmp_path / f"{gpus}", [log(tmp_path, pipeline())], "train-log", gpus=gpus)
        (trial,) = found.trials.values()
        assert (trial.trial.train.micro_batch, trial.trial.train.grad_accum) == (batch, 1)
        rate = trial.images_per_second.value if trial.images_per_second else None
        assert rate == (pytest.approx(1024 / 0.25) if gpus == 1024 else None)


def test_gpus_that_cannot_hold_the_copies_in_equal_parts_are_refused(tmp_path: Path) -> None:
    why = r"'train.log' tells 8 copies of the model, which 4 GPUs cannot hold.*--gpus 16, for 2 each"
    with pytest.raises(RequestError, match=why):
        import_logs([log(tmp_path, pipeline())], "train-log", ImportOptions(gpus=4), tmp_path / "results")


def test_gpus_of_each_log_make_a_curve(tmp_path: Path) -> None:
    """Swin tells no GPUs: 1,251 steps of 8 x 128 images, and 10,008 of 1 x 128."""
    eight = swin()[1:]
    one = [line.replace(f"/{OF_EPOCH}]", f"/{8 * OF_EPOCH}]") for line in eight]
    paths = [log(tmp_path, one, "one.log"), log(tmp_path, eight, "eight.log")]
    with pytest.raises(RequestError, match=r"'one.log' does not tell the GPUs. Give them: --gpus 1,8 \(one for each"):
        import_logs(paths, "train-log", ImportOptions(), tmp_path / "none")
    found = imported(tmp_path, paths, "train-log", each_gpus=(1, 8))
    (curve,) = found.curves
    efficiencies = {point.gpus: point.efficiency.value for point in curve.points if point.efficiency}
    assert efficiencies == pytest.approx({1: 1.0, 8: 1.0}, rel=1e-3)
    assert found.study.imported is not None
    assert found.study.imported.options == {"each_gpus": "1,8"}
    assert any(f"about {1251 * 1024:,} training images" in note for note in found.study.imported.notes)
    alike = imported(tmp_path / "alike", paths, "train-log", gpus=8).study.imported
    assert alike is not None
    assert any("--gpus 8 is not of all: say --gpus 1,8 (one for each file" in note for note in alike.notes)
    with pytest.raises(RequestError, match=r"--gpus has 4 for 'timm.log', which is of 8. Say --gpus 1,8"):
        import_logs(
            [paths[0], log(tmp_path, timm(), "timm.log")], "train-log", ImportOptions(each_gpus=(1, 4)), tmp_path / "4"
        )


@pytest.mark.parametrize(
    ("text", "files", "why"),
    [
        ("1,8,3", 2, "3 numbers for 2 files"),
        ("1,8", 1, "2 numbers for 1 file"),
        ("1,,8", 3, "'' is no number"),
        ("x", 1, "'x' is no number"),
        ("1,0", 2, "'0' is no whole number from 1 to 100,000"),
        ("1,1.5", 2, "'1.5' is no whole number"),
        ("9" * 400, 1, "no number"),
    ],
)
def test_other_numbers_than_one_for_each_file_are_refused(text: str, files: int, why: str) -> None:
    assert contents.gpus_of("1, 8", 2) == (1, 8)
    assert contents.gpus_of("8", 3) == (8,)
    with pytest.raises(RequestError, match="--gpus is ") as caught:
        contents.gpus_of(text, files)
    assert why in str(caught.value)
    assert "Valid: --gpus 1,8 (one for each file in their order), --gpus 8 (of all ranks together)" in str(caught.value)
