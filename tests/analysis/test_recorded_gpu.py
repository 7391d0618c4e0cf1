"""What the product recorded on one NVIDIA H200 (ViT-B/16 at 224, one rank, torch 2.11), held against what does not
come from the profiler: the timed steps, NVML's looks, the allocator's peak. Redacted bundles: of
`benchmarks/gpu/vit_b16_one_gpu.toml`, and of the study of `tests/gpu/test_breakdown_on_a_gpu.py`."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from report_forms import terminal
from vitscale import store
from vitscale.analysis import Analysis, analyse
from vitscale.analysis.time.breakdown import Breakdown, breakdown
from vitscale.analysis.trials import TrialResult
from vitscale.prediction.memory.forecast import forecast
from vitscale.store.results import Run

FOLDER = Path(__file__).parent / "recorded"
FILES = ("h200-vit-b16-64.tar.gz", "h200-vit-b16-128.tar.gz")
ONE_CAST = "h200-vit-b16-one-cast.tar.gz"
"""Plain training with micro-batches of 64 to 256, since queries, keys and values read one cast (decision 0034)."""
WORKSPACES = 64 * 2**20
"""Bytes that cuBLAS takes from the allocator on such a GPU, in no forecast (pytorch/pytorch pull request 120925)."""
COMPUTED = ("forward", "backward", "optimizer")


@functools.cache
def analysed(name: str) -> Analysis:
    return analyse(store.load(FOLDER / name))


def every_run() -> list[tuple[Run, Breakdown]]:
    runs = [run for name in FILES for run in store.load(FOLDER / name).runs]
    return [(run, known) for run in runs if (known := breakdown(run)) is not None]


def trial_of(engine: str, precision: str) -> TrialResult:
    of_engine = [t for t in analysed(FILES[0]).trials.values() if t.trial.train.engine == engine]
    return next(t for t in of_engine if t.trial.train.precision == precision)


def test_kernels_last_as_long_however_much_explaining_costs() -> None:
    """Explained steps took 0 to 69 % longer than the timed ones beside them."""
    seconds: dict[tuple[str, str, int], list[float]] = {}
    overheads = []
    for run, known in every_run():
        train, (rank,) = run.header.trial.train, known.ranks
        seconds.setdefault((train.engine, train.precision, train.micro_batch), []).append(rank.sum_of(*COMPUTED))
        overheads.append(known.overhead or 0.0)
    assert min(overheads) < 0.01
    assert max(overheads) > 0.6
    assert len(seconds) == 8
    for config, of_runs in seconds.items():
        assert max(of_runs) / min(of_runs) < 1.01, config


def test_parts_add_up_to_the_timed_step_and_nvml_saw_as_much_of_it_busy() -> None:
    compared = 0
    for run, known in every_run():
        (rank,), (record,) = known.ranks, run.ranks
        timed = [step.seconds for step in record.steps if step.window == "light" and not step.warmup]
        assert rank.seconds == pytest.approx(float(np.mean(timed)), rel=0.01)
        assert rank.sum_of(*rank.parts) == pytest.approx(rank.seconds)
        gpu = record.resources[0].gpu
        if gpu is not None and gpu.samples > 1:
            compared += 1
            idle = rank.sum_of("launch_gaps", "other", "data_wait") / rank.seconds
            assert 1 - idle == pytest.approx(gpu.utilisation, abs=0.04), run.header.trial.train
    assert compared >= 8


@pytest.mark.parametrize("name", FILES)
def test_no_answer_tells_of_a_gpu_that_is_idle_for_a_third_of_a_step(name: str) -> None:
    """The profiles have launch gaps of up to 55 %; timed steps of 0.5 to 11 %."""
    analysis = analysed(name)
    for trial in analysis.trials.values():
        assert trial.breakdown is not None
        typical = trial.breakdown.typical
        assert typical.sum_of("launch_gaps") < 0.12 * typical.seconds
    assert not any("warning: explaining costs" in line for line in terminal(analysis))


@pytest.mark.parametrize(
    ("name", "precision", "trials"), [(FILES[0], "fp32", 3), (ONE_CAST, "bf16", 3), (ONE_CAST, "bf16-params", 1)]
)
def test_memory_is_forecast_to_2_percent_and_workspaces(name: str, precision: str, trials: int) -> None:
    """Not above what was taken. In bf16 the older runs kept two casts more of what attention reads."""
    known = [trial for trial in analysed(name).trials.values() if trial.trial.train.precision == precision]
    eager = [trial for trial in known if not trial.trial.train.compile]
    assert len(eager) == trials
    for trial in eager:
        foretold = forecast(trial.trial)
        assert foretold is not None
        assert 1.0 <= ((trial.peak_bytes or 0) - WORKSPACES) / foretold.peak_bytes < 1.02, trial.trial.train


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ddp_takes_its_buckets_twice(precision: str) -> None:
    plain, ddp = trial_of("none", precision), trial_of("ddp", precision)
    (parameters,) = {run.model.parameters for run in ddp.run_figures if run.model}
    assert (ddp.peak_bytes or 0) - (plain.peak_bytes or 0) == pytest.approx(2 * 4 * (parameters or 0), rel=0.005)
