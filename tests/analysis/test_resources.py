"""The resources of a trial: hand-computed from lines of known content, and unknown where the record does not tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from results_factory import make_curve, make_environment, make_rank, make_results, make_run, make_trial, steady_run
from vitscale.analysis import analyse
from vitscale.analysis.quality.placement import throttled_gpus
from vitscale.analysis.runs.figures import run_figures
from vitscale.analysis.runs.resources import RankResources, resource_figures, timed_spans
from vitscale.analysis.summaries import summarise
from vitscale.store.records import Device, EnergyReading, GpuSamples, MatmulLine, ResourcesLine
from vitscale.store.results import Run

MIB = 2**20
STEPS = 4
"""Of an epoch."""


def line(epoch: int, seconds: float = 10.0, cpu_seconds: float = 5.0, **fields: Any) -> ResourcesLine:
    return ResourcesLine.model_validate(
        {
            "epoch": epoch,
            "steps": (epoch * STEPS, (epoch + 1) * STEPS - 1),
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "cpu_throttled_seconds": None,
            "rss_bytes": 90 * MIB,
            "peak_rss_bytes": 100 * MIB,
        }
        | fields
    )


def gpu(samples: int = 10, **fields: Any) -> GpuSamples:
    return GpuSamples.model_validate(
        {
            "samples": samples,
            "utilisation": 0.9,
            "sm_clock_mhz_median": 1900.0,
            "sm_clock_mhz_min": 1800.0,
            "temperature_celsius_max": 60.0,
            "power_watts_mean": 500.0,
            "throttle_reasons": (),
            "throttled_share": 0.0,
        }
        | fields
    )


def run_of(
    *ranks: Sequence[ResourcesLine],
    warmup: int = 0,
    explained: Sequence[int] = (),
    device: str = "cpu",
    repeat: int = 0,
    environments: Sequence[dict[str, Any]] | None = None,
) -> Run:
    """A run with the given lines of each rank; `explained` steps lie where they are named."""
    trial = make_trial(gpus=len(ranks), device=device)
    records = []
    for number, lines in enumerate(ranks):
        record = make_rank(
            trial, number, [0.1] * STEPS * max(1, len(lines)), warmup=warmup, steps_in_epoch=STEPS,
            environment=make_environment(number, **(environments[number] if environments else {})),
        )  # fmt: skip
        steps = tuple(
            step.model_copy(update={"window": "explained"}) if step.step in explained else step for step in record.steps
        )
        records.append(record.model_copy(update={"resources": tuple(lines), "steps": steps}))
    return make_run(trial, records, repeat)


def figures_of(*runs: Run) -> Any:
    """`Any`: every test here knows what is not None."""
    return resource_figures(runs, [run_figures(run) for run in runs])


# --- which epochs --------------------------------------------------------------------------------------------------


def whole(*epochs: int) -> dict[int, range]:
    return {epoch: range(epoch * STEPS, (epoch + 1) * STEPS) for epoch in epochs}


def test_lines_that_tell_of_warm_up_or_explained_steps_are_left_out() -> None:
    lines = [line(epoch) for epoch in range(4)]
    assert timed_spans(run_of(lines)) == whole(0, 1, 2, 3)
    assert timed_spans(run_of(lines, warmup=2)) == whole(1, 2, 3)
    assert timed_spans(run_of(lines, warmup=2, explained=[2 * STEPS + 1])) == whole(1, 3)
    assert timed_spans(run_of(lines), steady_from=STEPS + 1) == whole(2, 3)


def test_a_line_of_timed_steps_alone_counts_whatever_else_its_epoch_holds() -> None:
    lines = [line(0, steps=(2, 3)), line(1, steps=(4, 5))]
    assert timed_spans(run_of(lines, warmup=2, explained=[6])) == {0: range(2, 4), 1: range(4, 6)}
    assert timed_spans(run_of(lines, warmup=3)) == {1: range(4, 6)}


def test_ranks_that_tell_of_unlike_steps_tell_nothing() -> None:
    assert timed_spans(run_of([line(0, steps=(0, 2))], [line(0, steps=(1, 3))])) == {}


def test_a_run_of_disturbed_epochs_alone_has_no_power_and_no_energy() -> None:
    """Its first step may have compiled for a minute, on all its images."""
    measured = EnergyReading(joules=900.0, source="NVML: the GPU, whoever uses it", reason=None, devices=("GPU-a",))
    run = run_of([line(0, gpu=gpu().model_dump(), energy=measured.model_dump())], warmup=1, device="cuda")
    found = figures_of(run)
    assert (found.joules_per_image, found.power_watts, found.cpu_utilisation) == (None, None, None)
    assert found.energy_reason == "it takes a stretch of timed steps of 10 s, and there is none"
    assert found.gpu_reason == "no sample lies among timed steps alone"


def test_shares_come_from_timed_steps_and_peaks_of_memory_from_all() -> None:
    found = figures_of(run_of([line(0, cpu_seconds=10.0, peak_rss_bytes=700), line(1, peak_rss_bytes=300)], warmup=1))
    assert found.cpu_utilisation == 0.5
    assert found.peak_rss_bytes == 700


# --- processor and memory ------------------------------------------------------------------------------------------


def test_cpu_utilisation_is_of_the_ranks_threads() -> None:
    """Rank 0: 12 of 20 s on 2 threads; rank 1: 10 of 10 s on 1 thread."""
    run = run_of([line(0, 10.0, 12.0)], [line(0, 10.0, 10.0)], environments=[{"threads": 2}, {"threads": 1}])
    found = figures_of(run)
    assert [rank.cpu_utilisation for rank in found.by_rank] == [pytest.approx(0.6), pytest.approx(1.0)]
    assert found.cpu_utilisation == pytest.approx(0.8)


def test_epochs_weigh_by_their_time() -> None:
    assert figures_of(run_of([line(0, 1.0, 1.0), line(1, 9.0, 0.0)])).cpu_utilisation == pytest.approx(0.1)


def test_use_of_the_quota_is_that_of_all_ranks_of_a_host() -> None:
    """Two ranks use 0.9 and 0.6 of a core where 2 are granted; a third on its own host 0.5 of 1."""
    run = run_of(
        [line(0, 10.0, 9.0)], [line(0, 10.0, 6.0)], [line(0, 10.0, 5.0)],
        environments=[
            {"cpu_quota_cores": 2.0}, {"cpu_quota_cores": 2.0}, {"cpu_quota_cores": 1.0, "host": "node2"},
        ],
    )  # fmt: skip
    assert figures_of(run).cpu_utilisation_of_quota == pytest.approx((0.75 + 0.5) / 2)


def test_without_a_quota_its_figures_are_unknown_and_not_zero() -> None:
    found = figures_of(run_of([line(0)]))
    assert (found.cpu_utilisation_of_quota, found.cpu_throttled_share) == (None, None)


def test_a_quota_holds_threads_back_for_a_share_of_the_time_in_which_they_would_compute() -> None:
    """Busy threads of which each is held back for 3 of 10 s; the kernel adds up over all of a host."""
    one = [line(0, 10.0, cpu_seconds=14.0, cpu_throttled_seconds=6.0)]  # two threads under 1.4 cores
    assert figures_of(run_of(one)).cpu_throttled_share == pytest.approx(0.3)
    both = [line(0, 10.0, cpu_seconds=14.0, cpu_throttled_seconds=12.0)]
    assert figures_of(run_of(both, both)).cpu_throttled_share == pytest.approx(0.3)
    apart = run_of(both, one, environments=[{"host": "a"}, {"host": "b"}])
    assert figures_of(apart).cpu_throttled_share == pytest.approx(12 / 26)  # the worst host's
    free = [line(0, 10.0, cpu_seconds=0.0, cpu_throttled_seconds=0.0)]
    assert figures_of(run_of(free)).cpu_throttled_share == 0.0


def test_one_throttled_run_of_three_is_not_hidden_by_the_others() -> None:
    hot: dict[str, Any] = {"throttle_reasons": ("thermal (hardware)",), "throttled_share": 0.6}
    runs = [run_of([line(0, gpu=gpu(**(hot if k == 2 else {})))], device="cuda", repeat=k) for k in range(3)]
    assert figures_of(*runs).throttled_share == pytest.approx(0.2)
    trial = runs[0].header.trial
    study = make_results([(make_curve([trial]), [trial])], runs)
    (found,) = throttled_gpus([*analyse(study).trials.values()])
    assert "GPUs slowed their clocks in 1 trial (thermal (hardware) in 20 % of the samples)" in found.message


def test_memory_is_that_of_the_rank_that_needed_most() -> None:
    fields = [
        {"cuda_allocated_bytes": 5, "cuda_reserved_bytes": 8, "cuda_device_bytes": 20, "peak_rss_bytes": 3},
        {"cuda_allocated_bytes": 7, "cuda_reserved_bytes": 7, "cuda_device_bytes": 19, "peak_rss_bytes": 4},
    ]
    found = figures_of(run_of(*([line(0, **one)] for one in fields), device="cuda"))
    assert (found.cuda_allocated_bytes, found.cuda_reserved_bytes, found.cuda_device_bytes) == (7, 8, 20)
    assert found.peak_rss_bytes == 4
    assert [rank.peak_bytes for rank in found.by_rank] == [5, 7]


def test_on_a_host_the_peak_of_a_rank_is_its_resident_memory() -> None:
    found = figures_of(run_of([line(0, peak_rss_bytes=3)], [line(0, peak_rss_bytes=4)]))
    assert [rank.peak_bytes for rank in found.by_rank] == [3, 4]
    assert (found.cuda_allocated_bytes, found.cuda_reserved_bytes, found.cuda_device_bytes) == (None, None, None)


# --- GPUs ----------------------------------------------------------------------------------------------------------


def test_gpus() -> None:
    """Epochs weigh by their samples: rank 0 was busy for (30 x 1.0 + 10 x 0.6) / 40 = 0.9 of the time."""
    first = [
        line(0, gpu=gpu(30, utilisation=1.0, power_watts_mean=600.0, sm_clock_mhz_median=1980.0)),
        line(1, gpu=gpu(10, utilisation=0.6, power_watts_mean=400.0, sm_clock_mhz_median=1900.0)),
    ]
    second = [
        line(0, gpu=gpu(20, utilisation=0.5, sm_clock_mhz_min=900.0, temperature_celsius_max=88.0,
                        throttle_reasons=("thermal (driver)", "power brake"), throttled_share=0.25)),
        line(1, gpu=gpu(20, utilisation=0.5, limits=("power cap",), limited_share=0.75)),
    ]  # fmt: skip
    found = figures_of(run_of(first, second, device="cuda"))
    assert [rank.gpu_utilisation for rank in found.by_rank] == [pytest.approx(0.9), pytest.approx(0.5)]
    assert found.gpu_utilisation == pytest.approx(0.7)
    assert found.sm_clock_mhz == pytest.approx((1960 + 1900) / 2)
    assert found.sm_clock_mhz_min == 900
    assert found.temperature_celsius_max == 88
    assert found.power_watts == pytest.approx((550 + 500) / 2)
    assert found.throttle_reasons == ("power brake", "thermal (driver)")
    # The second epoch of rank 1 was at its power limit alone, which is no throttling: 20 x 0.25 of 40 samples are.
    assert found.throttled_share == pytest.approx(0.125)
    assert (found.limits, found.limited_share) == (("power cap",), pytest.approx(0.75))
    assert found.gpu_reason == ""


def test_a_gpu_that_tells_only_some_things() -> None:
    told = [line(0, gpu=gpu(utilisation=None, throttled_share=None))]
    found = figures_of(run_of(told, [line(0, gpu=gpu())], device="cuda"))
    assert found.gpu_utilisation is None
    assert [rank.gpu_utilisation for rank in found.by_rank] == [None, pytest.approx(0.9)]
    assert found.power_watts == 500


def test_without_gpu_figures_there_is_a_reason() -> None:
    found = figures_of(run_of([line(0, gpu_reason="NVML: Driver Not Loaded")], device="cuda"))
    assert (found.gpu_utilisation, found.throttled_share, found.throttle_reasons) == (None, None, ())
    assert found.gpu_reason == "NVML: Driver Not Loaded"


def test_a_figure_that_one_rank_lacks_has_that_ranks_reason() -> None:
    lost = line(0, gpu_reason="NVML: GPU is lost")
    found = figures_of(run_of([line(0, gpu=gpu())], [lost], device="cuda"))
    assert (found.gpu_utilisation, found.gpu_reason) == (None, "NVML: GPU is lost")
    part = figures_of(run_of([line(0, gpu=gpu(utilisation=None))], device="cuda"))
    assert (part.gpu_utilisation, part.sm_clock_mhz) == (None, 1900.0)
    assert part.gpu_reason == "NVML does not tell the utilisation of this GPU, or slice of one"


# --- over runs -----------------------------------------------------------------------------------------------------


def test_figures_over_runs_are_medians_energy_a_geometric_mean_and_memory_the_highest() -> None:
    runs = [
        run_of([line(0, cpu_seconds=used, peak_rss_bytes=peak, energy=energy)], repeat=repeat)
        for repeat, (used, peak, energy) in enumerate(
            [(2.0, 5, joules(32)), (9.0, 9, EnergyReading(joules=None, source=None, reason="?")), (4.0, 7, joules(96))]
        )
    ]
    found = figures_of(*runs)
    assert found.cpu_utilisation == pytest.approx(0.4)
    assert found.by_rank == (RankResources(0, pytest.approx(0.4), 9, None, None, (0,)),)  # type: ignore[arg-type]  # nearly 0.4
    assert found.peak_rss_bytes == 9
    assert found.joules_per_image is not None
    assert found.joules_per_image.value == pytest.approx(math.sqrt(32 * 96) / 32)
    assert found.joules_per_image.low is None  # of two runs that know it
    assert (found.energy_source, found.energy_reason) == ("NVML", "")


def joules(value: float) -> EnergyReading:
    return EnergyReading(joules=value, source="NVML", reason=None, devices=("GPU-a",))


def test_rates_and_peak() -> None:
    device = Device(type="cuda", name="NVIDIA L4")
    run = run_of([line(0)], device="cuda", environments=[{"device": device}])
    rate = MatmulLine(dtype="fp32", size=4096, flops_per_second=20e12)
    run = run.model_copy(update={"ranks": (run.ranks[0].model_copy(update={"matmul": rate}),)})
    found = figures_of(run)
    assert found.matmul_flops_per_second == 20e12
    assert found.mfu_reason == "the model's shape was not recorded"
    assert found.peak_name == "L4, fp32 dense, 30.3 TFLOP/s"


def test_records_of_the_first_format_say_why_nothing_is_known() -> None:
    trial = make_trial(gpus=2)
    found = summarise(trial.identity(), trial, [steady_run(trial, 0.1)], combine_unlike=False).resources
    assert found is not None
    assert found.by_rank == tuple(RankResources(rank, None, None, None, None, (rank,)) for rank in (0, 1))
    unknown = {
        name: value
        for name, value in vars(found).items()
        if name not in ("by_rank", "throttle_reasons", "limits", "power_limit_watts") and not name.endswith("_reason")
    }
    assert set(unknown.values()) == {None}
    assert found.throttle_reasons == ()
    assert found.gpu_reason == "this run recorded no use of its GPUs"
    assert found.energy_reason == "this run recorded no energy"


def test_a_trial_without_a_completed_run_has_no_figures() -> None:
    trial = make_trial()
    assert summarise(trial.identity(), trial, [], combine_unlike=False).resources is None


def test_a_trial_s_use_is_the_mean_of_its_ranks() -> None:
    """Of each rank's median over runs; the median of the runs' means would lie beyond both ranks."""
    runs = [
        run_of([line(0, cpu_seconds=a)], [line(0, cpu_seconds=b)], repeat=n)
        for n, (a, b) in enumerate([(7.0, 9.0), (9.0, 7.0), (7.0, 7.0)])
    ]
    found = figures_of(*runs)
    assert [rank.cpu_utilisation for rank in found.by_rank] == pytest.approx([0.7, 0.7])
    assert found.cpu_utilisation == pytest.approx(0.7)
