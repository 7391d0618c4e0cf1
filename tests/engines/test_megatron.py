"""Megatron-Core's tensor parallelism on real ranks, its calls for CUDA answered by the CPU, against one process.

The layers, process groups, wrapper and optimizer are Megatron-Core's as they come, and the engine is as the product has
it. What is not tried here are CUDA's kernels and streams (tests/gpu).
"""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from engines.curves import Curve, Job, largest_difference, train
from engines.jobs import MICRO_BATCHES
from engines.test_parallel import (
    LABELLED_BEFORE,
    LABELLING_STEPS,
    SAVED_BEFORE,
    check,
    is_sent_as_planned,
    job_of,
    sent,
    trial_of,
)
from forks import prepared_here

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core (pip install 'vitscale[megatron]')"),
]
ON_CPU = Path(__file__).with_name("megatron_on_cpu.py")
SETTING = "adamw-clipped"
MODELS = ("", "swinv2:tiny ", "shared-vit:tiny ")
"""The last labels pixels, with synchronised norms."""
SAVED = "megatron tensor=2"
PURE = f"{SAVED} precision=bf16-params"
UNCLIPPED = "precision=bf16 gradient_clipping=0"
COUNTED = (
    f"{SAVED} {UNCLIPPED}", f"{SAVED} overlap_comm=1 bucket_mib=1 activation_checkpointing=1",
    f"swinv2:tiny {SAVED} activation_checkpointing=1",
)  # fmt: skip
ACCUMULATED = f"{SAVED} grad_accum=3"
FOUR = (SAVED, "megatron tensor=4", ACCUMULATED, f"shared-vit:tiny {SAVED}")
"""On four ranks; each but the second has two models, whose ranks take half of the images each."""


def of(name: str, saved_by: Path | None = None, *, saves: bool = False) -> Job:
    """`saved_by`: the checkpoint with which it begins; `saves`: whether it leaves one."""
    labels = name.startswith("shared")
    job = job_of(name, SETTING, LABELLING_STEPS) if labels else job_of(name, SETTING)
    if saved_by is not None:
        job["name"], job["load"] = f"{name} from {saved_by.parent.name}", str(saved_by)
    if saves:
        job["save_before"] = LABELLED_BEFORE if labels else SAVED_BEFORE
    job["traffic"] = "megatron" in name and saved_by is None
    return job


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


@pytest.fixture(scope="module")
def two(folder: Path) -> dict[str, Curve]:
    jobs = [of(f"{model}{SAVED}", saves=True) for model in MODELS]
    jobs += [of(name) for name in (*COUNTED, ACCUMULATED, "megatron")]
    jobs += [of(PURE, saves=True), of(PURE, folder / "2" / f"{PURE} {SETTING}")]
    return train(jobs, 2, folder / "2", prepared_here(), script=ON_CPU)


@pytest.fixture(scope="module")
def alone(folder: Path, two: dict[str, Curve]) -> dict[str, Curve]:
    """The single process, which also goes on from what tensor ranks have saved."""
    del two
    jobs = [of(f"{model}none", saves=True) for model in MODELS]
    jobs += [of(f"{model}none", folder / "2" / f"{model}{SAVED} {SETTING}") for model in MODELS]
    jobs += [of(f"none {UNCLIPPED} grad_accum={parts}") for parts in MICRO_BATCHES]
    return train(jobs, 1, folder / "1", prepared_here())


@pytest.fixture(scope="module")
def four(folder: Path, alone: dict[str, Curve]) -> dict[str, Curve]:
    del alone
    saved, by_one = folder / "2" / f"{SAVED} {SETTING}", folder / "1" / f"none {SETTING}"
    jobs = [*map(of, FOUR), of(SAVED, by_one), of("megatron tensor=4", saved), of("megatron", saved)]
    return train(jobs, 4, folder / "4", prepared_here(), script=ON_CPU)


def test_two_tensor_ranks_train_as_one_process(folder: Path, two: dict[str, Curve], alone: dict[str, Curve]) -> None:
    """A vision transformer, Swin V2 and one that labels pixels; clipped, in one piece and in three micro-steps."""
    rounded = [name for name in two if "precision" in name]
    check(folder / "2", {name: curve for name, curve in two.items() if name not in rounded}, alone)


@pytest.mark.nightly
def test_four_ranks_share_models_and_images(folder: Path, four: dict[str, Curve], alone: dict[str, Curve]) -> None:
    """Two models of two ranks and one of four; and each from a checkpoint of fewer ranks."""
    assert len(four) == len(FOUR) + 3
    check(folder / "4", four, alone)


def test_one_process_goes_on_from_what_tensor_ranks_have_saved(folder: Path, alone: dict[str, Curve]) -> None:
    resumed = {name: curve for name, curve in alone.items() if " from " in name}
    assert len(resumed) == len(MODELS)
    check(folder / "1", resumed, alone)


def test_bf16_is_as_near_as_one_process_is_to_itself(two: dict[str, Curve], alone: dict[str, Curve]) -> None:
    runs = [alone[f"none {UNCLIPPED} grad_accum={parts} {SETTING}"].losses for parts in MICRO_BATCHES]
    bound = 2 * max(largest_difference(left, right) for left in runs for right in runs)
    assert 0 < largest_difference(two[f"{SAVED} {UNCLIPPED} {SETTING}"].losses, runs[0]) < bound < 1e-2


def test_fp32_weights_beside_those_in_bf16_are_restored(two: dict[str, Curve]) -> None:
    """Without them, or with states of the optimizer that are not theirs, the resumed curve would leave by 1e-4."""
    whole, resumed = two[f"{PURE} {SETTING}"], two[f"{PURE} from 2"]
    assert resumed.first == SAVED_BEFORE
    assert resumed.losses == whole.losses[SAVED_BEFORE:]


def test_what_tensor_ranks_send(two: dict[str, Curve]) -> None:
    """By hand, of 36 images of 10 tokens, 48 wide, through 2 blocks: four all-reduces of all activations in each; the
    gradients and weights of a rank's part, and the norm."""
    whole = two[f"{SAVED} {SETTING}"]
    part = next(size for operation, size in sent(whole) if operation == "reduce_scatter")
    assert sent(whole) == Counter(
        {("all_reduce", 36 * 10 * 48): 8, ("reduce_scatter", part): 1, ("all_gather", part): 1, ("all_reduce", 1): 1}
    )


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_what_is_sent_is_planned(request: pytest.FixtureRequest, ranks: int) -> None:
    """By bytes and calls."""
    curves: dict[str, Curve] = request.getfixturevalue({2: "two", 4: "four"}[ranks])
    counted = [name for name, curve in curves.items() if any(curve.traffic)]
    assert len(counted) >= len(FOUR)
    for name in counted:
        is_sent_as_planned(name, curves[name], trial_of(of(name.removesuffix(f" {SETTING}")), ranks))
