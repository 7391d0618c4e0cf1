"""Energy per image: hand-computed, each device once, and unknown as soon as a part of it is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from results_factory import make_environment, make_rank, make_run, make_trial
from vitscale.analysis.runs.compute import Energy, energy_per_image
from vitscale.store.records import EnergyReading, ResourcesLine
from vitscale.store.results import Run
from vitscale.trial.parallel import ParallelSpec

IMAGES = 4 * 8
"""Of each rank and epoch: four steps of eight."""
ELSEWHERE = EnergyReading(joules=None, source=None, reason="measured by local rank 0")


def rapl(joules: float, *devices: str) -> EnergyReading:
    return EnergyReading(joules=joules, source="RAPL: package-0, whoever uses them", reason=None, devices=devices)


def nvml(joules: float, *devices: str) -> EnergyReading:
    return EnergyReading(joules=joules, source="NVML: the GPU, whoever uses it", reason=None, devices=devices)


def unknown(reason: str) -> EnergyReading:
    return EnergyReading(joules=None, source=None, reason=reason)


def run_of(*ranks: Sequence[EnergyReading | None], hosts: Sequence[str] | None = None, seconds: float = 10.0) -> Run:
    """A run with one reading per rank and epoch, each of which takes `seconds`."""
    trial = make_trial(gpus=len(ranks))
    records = []
    for number, readings in enumerate(ranks):
        host = hosts[number] if hosts else "node1"
        record = make_rank(
            trial, number, [0.1] * 4 * len(readings), steps_in_epoch=4, environment=make_environment(number, host=host)
        )
        lines = [
            ResourcesLine(
                epoch=epoch,
                seconds=seconds,
                cpu_seconds=0.4,
                cpu_throttled_seconds=None,
                rss_bytes=None,
                peak_rss_bytes=None,
                energy=reading,
            )
            for epoch, reading in enumerate(readings)
        ]
        records.append(record.model_copy(update={"resources": tuple(lines)}))
    return make_run(trial, records)


def energy_of(run: Run, *epochs: int) -> Energy:
    """Of epochs that hold timed steps alone."""
    return energy_per_image(run, {epoch: range(4 * epoch, 4 * epoch + 4) for epoch in epochs})


def test_one_rank() -> None:
    found = energy_of(run_of([rapl(64.0, "node1/package-0")]), 0)
    assert found == Energy(64 / IMAGES, "RAPL: package-0, whoever uses them", "")


def test_the_images_are_those_of_all_ranks() -> None:
    """Two GPUs of 96 and 160 J over 2 x 32 images: 4 J each."""
    found = energy_of(run_of([nvml(96, "GPU-a")], [nvml(160, "GPU-b")]), 0)
    assert found.joules_per_image == pytest.approx(4.0)


def test_epochs_are_added_up_and_only_those_asked_for() -> None:
    run = run_of([nvml(1000, "GPU-a"), nvml(32, "GPU-a"), nvml(96, "GPU-a")])
    assert energy_of(run, 1, 2).joules_per_image == pytest.approx((32 + 96) / (2 * IMAGES))


def test_ranks_that_share_a_device_are_not_added_up() -> None:
    """Each reads the whole GPU."""
    found = energy_of(run_of([nvml(128, "GPU-a")], [nvml(129, "GPU-a")]), 0)
    assert found.joules_per_image == pytest.approx(128 / (2 * IMAGES))


def test_two_containers_of_one_machine_are_one_machine() -> None:
    """Local rank 0 of each reads the same packages."""
    run = run_of([rapl(128, "boot-1/package-0")], [rapl(128, "boot-1/package-0")], hosts=("box-a", "box-b"))
    assert energy_of(run, 0).joules_per_image == pytest.approx(128 / (2 * IMAGES))


def test_the_first_rank_of_each_host_measures_for_the_others() -> None:
    run = run_of(
        [rapl(100, "boot-1/package-0")], [ELSEWHERE], [rapl(156, "boot-2/package-0")], [ELSEWHERE],
        hosts=("node1", "node1", "node2", "node2"),
    )  # fmt: skip
    assert energy_of(run, 0).joules_per_image == pytest.approx(256 / (4 * IMAGES))


def test_a_host_without_a_reading_leaves_the_whole_unknown() -> None:
    refused = unknown("PermissionError: denied")
    run = run_of(
        [rapl(100, "boot-1/package-0")], [ELSEWHERE], [refused], [ELSEWHERE],
        hosts=("node1", "node1", "node2", "node2"),
    )  # fmt: skip
    assert energy_of(run, 0) == Energy(None, None, "PermissionError: denied")


def test_a_gpu_measures_for_no_other_rank() -> None:
    run = run_of([nvml(100, "GPU-a")], [unknown("this GPU does not count its energy")])
    assert energy_of(run, 0) == Energy(None, None, "this GPU does not count its energy")


def test_the_reason_is_that_of_the_rank_that_should_have_measured() -> None:
    run = run_of([unknown("no RAPL on this host")], [ELSEWHERE])
    assert energy_of(run, 0) == Energy(None, None, "no RAPL on this host")


def test_one_epoch_that_is_unknown_leaves_the_whole_unknown() -> None:
    run = run_of([nvml(100, "GPU-a"), unknown("the counter went back")])
    assert energy_of(run, 0, 1).reason == "the counter went back"
    assert energy_of(run, 0).joules_per_image is not None


def test_devices_that_overlap_in_part_cannot_be_added_up() -> None:
    run = run_of([rapl(100, "b/package-0", "b/package-1")], [rapl(70, "b/package-1", "b/package-2")])
    assert energy_of(run, 0).reason == "rank 1 measured some of the devices of another rank, and others"


def test_records_of_the_first_format_hold_none() -> None:
    trial = make_trial()
    run = make_run(trial, [make_rank(trial, 0, [0.1] * 4)])
    assert energy_of(run) == Energy(None, None, "this run recorded no energy")
    assert energy_of(run_of([None]), 0) == Energy(None, None, "this run recorded no energy")


def test_a_rank_without_a_record_leaves_the_whole_unknown() -> None:
    run = run_of([nvml(100, "GPU-a")], [nvml(100, "GPU-b")])
    assert energy_of(run.model_copy(update={"ranks": run.ranks[:1]}), 0).reason == ("not every rank left a record")


def test_an_epoch_without_its_images_leaves_the_whole_unknown() -> None:
    run = run_of([nvml(100, "GPU-a"), nvml(100, "GPU-a")])
    rank = run.ranks[0].model_copy(update={"steps": run.ranks[0].steps[:-1]})
    run = run.model_copy(update={"ranks": (rank,)})
    assert energy_of(run, 0, 1).reason == "not all images of epoch 1 were recorded"
    assert energy_of(run, 0).joules_per_image is not None


def test_the_images_are_those_of_the_steps_that_were_measured() -> None:
    """Two of an epoch's four steps."""
    found = energy_per_image(run_of([nvml(64, "GPU-a")]), {0: range(2, 4)})
    assert found.joules_per_image == pytest.approx(64 / (IMAGES / 2))


def test_a_counter_that_jumps_is_not_read_over_a_short_stretch() -> None:
    run = run_of([nvml(100, "GPU-a"), nvml(100, "GPU-a")], seconds=9.5)
    assert energy_of(run, 0, 1) == Energy(
        None, None, "it takes a stretch of timed steps of 10 s, and the longest took 9.5 s"
    )
    assert energy_of(run).reason == "it takes a stretch of timed steps of 10 s, and there is none"


def test_a_short_stretch_beside_a_long_one_does_not_count() -> None:
    run = run_of([nvml(64, "GPU-a"), nvml(100, "GPU-a")])
    (rank,) = run.ranks
    short = rank.resources[1].model_copy(update={"seconds": 0.5})
    run = run.model_copy(update={"ranks": (rank.model_copy(update={"resources": (rank.resources[0], short)}),)})
    assert energy_of(run, 0, 1).joules_per_image == pytest.approx(64 / IMAGES)


def test_who_cannot_measure_at_all_is_not_told_to_train_longer() -> None:
    assert energy_of(run_of([unknown("no RAPL on this host")], seconds=0.5), 0).reason == "no RAPL on this host"


def test_ranks_that_share_a_model_take_the_same_images() -> None:
    """Two ranks, 96 + 160 J: 64 images of their own take 4 J each, the 32 that both take 8 J."""
    own = run_of([nvml(96.0, "GPU-a")], [nvml(160.0, "GPU-b")])
    assert energy_of(own, 0).joules_per_image == pytest.approx(4.0)
    trial = own.header.trial.model_copy(update={"parallel": ParallelSpec(tensor=2)})
    shared = own.model_copy(update={"header": own.header.model_copy(update={"trial": trial})})
    assert energy_of(shared, 0).joules_per_image == pytest.approx(8.0)
