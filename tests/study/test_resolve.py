from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from study_factory import EIGHT_CORES, expanded, gpus
from vitscale.errors import RequestError
from vitscale.machine.hardware import Machine
from vitscale.study.resolve import world_of
from vitscale.trial.trial import Trial

FOUR_GPUS = Machine(cores=16, cpu_quota_cores=None, gpus=gpus(4), cpu_has_fast_bf16=False)
OLD_GPUS = replace(FOUR_GPUS, gpus=gpus(2, (7, 5)))
UNKNOWN_GPUS = replace(FOUR_GPUS, gpus=gpus(2, None))
MIXED_GPUS = replace(FOUR_GPUS, gpus=gpus(1) + gpus(1, (7, 5)))
FAST_CPU = replace(EIGHT_CORES, cpu_has_fast_bf16=True)
QUOTA = Machine(cores=2, cpu_quota_cores=2.5, gpus=(), cpu_has_fast_bf16=False)


def trials(folder: Path, machine: Machine, changes: dict[str, dict[str, Any]] | None = None) -> list[Trial]:
    return list(expanded(folder, changes, machine).trials.values())


@pytest.mark.parametrize(
    ("machine", "asked", "device", "precision"),
    [
        (EIGHT_CORES, {}, "cpu", "fp32"),
        (FAST_CPU, {}, "cpu", "bf16"),
        (FOUR_GPUS, {}, "cuda", "bf16"),
        (OLD_GPUS, {}, "cuda", "fp32"),
        (UNKNOWN_GPUS, {}, "cuda", "fp32"),
        (MIXED_GPUS, {}, "cuda", "fp32"),
        (FOUR_GPUS, {"device": "cpu"}, "cpu", "fp32"),
        (EIGHT_CORES, {"precision": "bf16"}, "cpu", "bf16"),
        (FOUR_GPUS, {"precision": "fp32"}, "cuda", "fp32"),
        (FOUR_GPUS, {"device": "cuda", "precision": "auto"}, "cuda", "bf16"),
    ],
)
def test_device_and_precision(
    tmp_path: Path, machine: Machine, asked: dict[str, Any], device: str, precision: str
) -> None:
    for trial in trials(tmp_path, machine, {"train": asked}):
        assert (trial.train.device, trial.train.precision) == (device, precision)


@pytest.mark.parametrize(
    ("machine", "counts", "threads"),
    [(EIGHT_CORES, [1, 2, 4], 2), (EIGHT_CORES, [1, 3], 2), (EIGHT_CORES, [8], 1), (EIGHT_CORES, [1], 8),
     (FOUR_GPUS, [1, 4], 4), (QUOTA, [1, 2], 1)],
)  # fmt: skip
def test_threads_are_equal_along_a_curve_and_set_by_its_largest_world(
    tmp_path: Path, machine: Machine, counts: list[int], threads: int
) -> None:
    found = trials(tmp_path, machine, {"scaling": {"gpus": counts}})
    assert [trial.world.threads_per_rank for trial in found] == [threads] * len(counts)


@pytest.mark.parametrize(
    ("machine", "changes", "said"),
    [
        (
            EIGHT_CORES, {"scaling": {"gpus": [1, 9]}},
            "9 ranks need 9 cores, and this machine offers 8. Valid: scaling.gpus up to 8",
        ),
        (
            EIGHT_CORES, {"launch": {"threads_per_rank": 5}},
            "2 ranks of 5 threads need 10 cores, and this machine offers 8. Valid: scaling.gpus up to 1",
        ),
        (EIGHT_CORES, {"launch": {"threads_per_rank": 9}}, "Valid: fewer launch.threads_per_rank"),
        (QUOTA, {"scaling": {"gpus": [4]}}, "this machine offers 2 (a cgroup quota of 2.5 cores counts)"),
        (
            FOUR_GPUS, {"scaling": {"gpus": [1, 8]}},
            "8 ranks need 8 GPUs, and this machine offers 4. Valid: scaling.gpus up to 4",
        ),
        (replace(FOUR_GPUS, cores=2), {"scaling": {"gpus": [4]}}, "4 ranks need 4 cores, and this machine offers 2"),
        (
            EIGHT_CORES, {"train": {"engine": "none"}, "launch": {"threads_per_rank": 9}},
            "1 rank of 9 threads need 9 cores",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_unless_sharing_is_asked_for(
    tmp_path: Path, machine: Machine, changes: dict[str, dict[str, Any]], said: str
) -> None:
    with pytest.raises(RequestError) as caught:
        trials(tmp_path, machine, changes)
    assert said in str(caught.value)
    assert "launch.oversubscribe = true" in str(caught.value)
    shared = changes | {"launch": changes.get("launch", {}) | {"oversubscribe": True}}
    assert trials(tmp_path, machine, shared)


def test_the_plain_engine_needs_room_for_its_one_rank_alone(tmp_path: Path) -> None:
    (trial,) = trials(tmp_path, EIGHT_CORES, {"train": {"engine": "none"}, "scaling": {"gpus": [1, 16]}})
    assert trial.world.threads_per_rank == 1


@pytest.mark.parametrize("oversubscribe", [False, True])
def test_a_gpu_that_does_not_exist_cannot_be_shared_either(tmp_path: Path, oversubscribe: bool) -> None:
    changes: dict[str, dict[str, Any]] = {"train": {"device": "cuda"}, "launch": {"oversubscribe": oversubscribe}}
    with pytest.raises(RequestError, match=r"train.device is 'cuda', but this machine offers no GPU. Valid: cpu, auto"):
        trials(tmp_path, EIGHT_CORES, changes)


@pytest.mark.parametrize("engine", ["none", "ddp", "fsdp2", "deepspeed", "accelerate"])
@pytest.mark.parametrize("precision", ["fp16", "bf16-params"])
def test_a_precision_needs_no_deepspeed_file(tmp_path: Path, precision: str, engine: str) -> None:
    found = trials(tmp_path, FOUR_GPUS, {"train": {"precision": precision, "engine": engine}})
    assert {trial.train.precision for trial in found} == {precision}


def test_fp16_by_file_is_for_gpus(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"fp16": {"enabled": true}}')
    changes = {"train": {"engine": "deepspeed", "deepspeed_config": "ds.json"}}
    assert {trial.train.precision for trial in trials(tmp_path, FOUR_GPUS, changes)} == {"fp16"}
    changes["train"]["precision"] = "fp16"
    assert {trial.train.precision for trial in trials(tmp_path, FOUR_GPUS, changes)} == {"fp16"}
    with pytest.raises(RequestError, match="fp16 training needs a GPU"):
        trials(tmp_path, EIGHT_CORES, changes)


@pytest.mark.parametrize(
    ("ranks", "per_node", "shape"),
    [
        (1, None, (1, 1)), (8, None, (1, 8)), (1, 4, (1, 1)), (3, 4, (1, 3)), (4, 4, (1, 4)), (8, 4, (2, 4)),
        (8, 1, (8, 1)), (1_000_000, 4096, None), (12, 6, (2, 6)), (5, 4, None), (3, 2, None),
    ],
)  # fmt: skip
def test_a_world_takes_one_host_or_full_ones(ranks: int, per_node: int | None, shape: tuple[int, int] | None) -> None:
    if shape is None:
        with pytest.raises(RequestError) as caught:
            world_of(ranks, per_node, 2)
        assert str(caught.value) == (
            f"{ranks} ranks do not fill hosts of {per_node}. Valid: scaling.gpus in multiples of {per_node}, or below "
            "it. Or set scaling.gpus_per_node to a number that divides them all."
        )
    else:
        world = world_of(ranks, per_node, 2)
        assert (world.nodes, world.ranks_per_node, world.threads_per_rank) == (*shape, 2)


@pytest.mark.parametrize(
    ("machine", "changes", "threads"),
    [
        (EIGHT_CORES, {"scaling": {"gpus": [1, 16], "gpus_per_node": 4}}, 2),
        (EIGHT_CORES, {"scaling": {"gpus": [1, 32], "gpus_per_node": 8}}, 1),
        (EIGHT_CORES, {"scaling": {"gpus": [1, 2], "gpus_per_node": 8}}, 4),
        (FOUR_GPUS, {"scaling": {"gpus": [1, 4, 32], "gpus_per_node": 4}}, 4),
        (QUOTA, {"scaling": {"gpus": [1, 4], "gpus_per_node": 1}}, 2),
    ],
)
def test_threads_are_those_of_the_fullest_host(
    tmp_path: Path, machine: Machine, changes: dict[str, dict[str, Any]], threads: int
) -> None:
    assert {trial.world.threads_per_rank for trial in trials(tmp_path, machine, changes)} == {threads}


@pytest.mark.parametrize(
    ("machine", "changes", "said"),
    [
        (
            EIGHT_CORES, {"scaling": {"gpus": [32], "gpus_per_node": 16}},
            "16 ranks on one host need 16 cores, and this machine offers 8",
        ),
        (
            FOUR_GPUS, {"scaling": {"gpus": [16], "gpus_per_node": 8}},
            "8 ranks on one host need 8 GPUs, and this machine offers 4",
        ),
        (
            EIGHT_CORES, {"scaling": {"gpus": [4], "gpus_per_node": 2}, "launch": {"threads_per_rank": 5}},
            "2 ranks on one host of 5 threads need 10 cores",
        ),
    ],
)  # fmt: skip
def test_a_host_that_is_too_small_for_its_share_is_refused(
    tmp_path: Path, machine: Machine, changes: dict[str, dict[str, Any]], said: str
) -> None:
    with pytest.raises(RequestError) as caught:
        trials(tmp_path, machine, changes)
    assert said in str(caught.value)
