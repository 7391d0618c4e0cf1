"""Logs with known truth, written as the programs write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from vitscale import analysis, store
from vitscale.analysis import Analysis
from vitscale.importers.contents import ImportOptions, LogFormat
from vitscale.importers.importing import import_logs

EPOCH_COLUMNS = "cluster,gpu,layout,dataset,fraction,micro_batch,run,gpus,epoch,rank,epoch_seconds,loss,accuracy"
_BEGAN = datetime(2024, 5, 1, 12, 0, 0, tzinfo=UTC)


def epoch_rows(
    gpus: int,
    seconds: Sequence[Sequence[float]],
    *,
    cluster: str = "north",
    gpu: str = "Tesla T4",
    layout: str = "single-node",
    dataset: str = "cifar10",
    fraction: float = 1.0,
    micro_batch: int = 64,
    run: int = 1,
) -> list[str]:
    """Rows of one run: `seconds[epoch][rank]`."""
    before = f"{cluster},{gpu},{layout},{dataset},{fraction},{micro_batch},{run},{gpus}"
    return [
        f"{before},{epoch},{rank},{value},{2.0 / epoch if rank == 0 else ''},{0.1 * epoch if rank == 0 else ''}"
        for epoch, ranks in enumerate(seconds, start=1)
        for rank, value in enumerate(ranks)
    ]


def epoch_table(path: Path, rows: Iterable[str]) -> Path:
    """A table of epochs."""
    path.write_text("\n".join([EPOCH_COLUMNS, *rows]) + "\n", encoding="utf-8")
    return path


def timers(
    rank: int,
    at: float,
    forward: float,
    inner: float,
    allreduce: float,
    step: float,
    *,
    micro: bool = False,
    stamped: bool = True,
) -> str:
    """One line of timers as DeepSpeed prints it, its times in seconds; `at` is when."""
    moment = _BEGAN + timedelta(seconds=at)
    stamp = f"[{moment:%Y-%m-%d %H:%M:%S},{moment.microsecond // 1000:03d}] [INFO] [logging.py:128:log_dist] "
    end = "_microstep" if micro else ""
    parts = {"fwd": forward, "bwd": inner + allreduce, "bwd_inner": inner, "bwd_allreduce": allreduce, "step": step}
    values = "".join(f" | {name}{end}: {1000 * value:.2f}" for name, value in parts.items())
    return f"{stamp if stamped else ''}[Rank {rank}] time (ms){values}"


def configuration(world_size: int, micro_batch: int = 8, grad_accum: int = 1, stage: int = 0) -> list[str]:
    """The lines of DeepSpeed's configuration that say what a run is."""
    stamp = "[2024-05-01 11:59:59,000] [INFO] [config.py:1003:print]   "
    facts = {
        "world_size": world_size,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": grad_accum,
        "train_batch_size": world_size * micro_batch * grad_accum,
        "zero_optimization_stage": stage,
        "fp16_enabled": False,
        "bfloat16_enabled": False,
        "wall_clock_breakdown": True,
    }
    return [f"{stamp}{name} {'.' * max(1, 30 - len(name))} {value}" for name, value in facts.items()]


def deepspeed_log(path: Path, lines: Iterable[str], world_size: int = 2, **facts: int) -> Path:
    """A log of these timers."""
    path.write_text("\n".join([*configuration(world_size, **facts), *lines]) + "\n", encoding="utf-8")
    return path


def steady(rank: int, steps: int, period: float = 0.5, allreduce: float = 0.04) -> list[str]:
    """Lines of `steps` like steps of `period` seconds, of which 10 ms lie between the timers."""
    inner = period - 0.01 - 0.1 - allreduce - 0.05
    return [timers(rank, (k + 1) * period, 0.1, inner, allreduce, 0.05) for k in range(steps)]


def imported(tmp_path: Path, paths: Sequence[Path], log_format: LogFormat, **options: object) -> Analysis:
    """The analysis of an import."""
    results = tmp_path / "results"
    import_logs(paths, log_format, ImportOptions(**options), results)  # type: ignore[arg-type]  # options of a log
    return analysis.analyse(store.load(results))
