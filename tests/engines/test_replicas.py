"""Real ranks: FSDP2 over replicas (HSDP) trains as DDP and as one process do, and sends what arithmetic says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from engines.curves import GLOBAL_BATCH, MODEL, Curve, Job, largest_difference, train
from engines.jobs import ADAMW, CLIPPED, SGD, Train
from engines.test_parallel import gradient_difference
from forks import prepared_here
from vitscale.engines.shared.splits import REPLICATION, SHARDING, split
from vitscale.prediction.step.messages import messages
from vitscale.trial.model_cost import parameters
from vitscale.trial.parallel import ParallelSpec
from vitscale.trial.trial import DataSpec, TrainSpec, Trial, WindowSpec, World

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

RANKS = 4
STEPS, SAVED_BEFORE = 3, 2
"""The third step has 7 of 36 images."""
EQUAL = 1e-6
"""Of a step's loss, in fp32; the largest seen is 1.3e-7."""
SETTINGS: dict[str, Train] = {"adamw-clipped": ADAMW | CLIPPED, "sgd-clipped-3": SGD | CLIPPED | {"grad_accum": 3}}
TRAINED = (
    ("1 replicas", "adamw-clipped"), ("2 replicas", "adamw-clipped"), ("2 replicas", "sgd-clipped-3"),
    ("4 replicas", "sgd-clipped-3"),
)  # fmt: skip
ROUNDED = "2 replicas, bf16 gradients sgd-clipped-3"
KEPT = "2 replicas, kept after forward adamw-clipped"
RESUMED = {"4 replicas": "2 replicas", "2 replicas": "ddp"}
"""What goes on -> whose checkpoint it loads."""


def job_of(name: str, setting: str, replicas: int = 1, **fields: Any) -> Job:
    return {
        "name": f"{name} {setting}", "train": {"engine": "fsdp2"} | SETTINGS[setting] | fields, "steps": STEPS,
        "parallel": {"replicate": replicas}, "gradients": True,
    }  # fmt: skip


def jobs_on_four_ranks(folder: Path) -> list[Job]:
    jobs = [job_of(name, setting, int(name[0])) for name, setting in TRAINED]
    jobs.append(job_of("ddp", "adamw-clipped", engine="ddp"))
    for job in jobs:
        job["traffic"], job["save_before"] = True, SAVED_BEFORE
    jobs.append(job_of("2 replicas, bf16 gradients", "sgd-clipped-3", 2, gradient_dtype="bf16"))
    jobs.append(job_of("2 replicas, kept after forward", "adamw-clipped", 2, reshard_after_forward=False))
    jobs[-1]["traffic"] = True
    for name, origin in RESUMED.items():
        resumed = job_of(f"{name} from {origin}", "adamw-clipped", int(name[0]))
        jobs.append(resumed | {"load": str(folder / f"{origin} adamw-clipped")})
    return jobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replicas")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Curve]:
    """One process, in one piece."""
    jobs = [job_of("none", setting, engine="none", grad_accum=1) for setting in SETTINGS]
    return train(jobs, 1, folder / "1", prepared_here())


@pytest.fixture(scope="module")
def four(folder: Path) -> dict[str, Curve]:
    return train(jobs_on_four_ranks(folder / "4"), RANKS, folder / "4", prepared_here())


def trial_of(replicas: int, engine: str = "fsdp2", **fields: Any) -> Trial:
    """As `curve_ranks` makes it."""
    parts = RANKS * fields.get("grad_accum", 1)
    of_train = {"engine": engine, "precision": "fp32", "device": "cpu", "micro_batch": GLOBAL_BATCH // parts} | fields
    return Trial(
        model=MODEL,
        data=DataSpec(name="synthetic"),
        train=TrainSpec.model_validate(of_train),
        world=World(ranks_per_node=RANKS, threads_per_rank=1),
        window=WindowSpec(),
        launcher="torchrun",
        parallel=ParallelSpec(replicate=replicas),
    )


def test_replicas_train_as_one_process_does(folder: Path, four: dict[str, Curve], alone: dict[str, Curve]) -> None:
    """Losses and whole gradients of 1, 2 and 4 replicas and of DDP, clipped by the norm, in one piece and in three, and
    from each other's checkpoints."""
    differences = {}
    for name, curve in four.items():
        setting = name.rpartition(" ")[2]
        reference = alone[f"none {setting}"]
        assert curve.ids == reference.ids[curve.first :], name
        if name != ROUNDED:
            loss_difference = largest_difference(curve.losses, reference.losses[curve.first :])
            differences[name] = (loss_difference, gradient_difference(folder / "4", name, setting))
    print({name: [f"{value:.1e}" for value in both] for name, both in differences.items()})
    assert len(differences) == len(TRAINED) + len(("ddp", KEPT)) + len(RESUMED)
    assert max(losses for losses, _ in differences.values()) < EQUAL
    assert max(gradients for _, gradients in differences.values()) < 10 * EQUAL


Sent = Counter[tuple[str, str]]
"""(operation, "calls" or "elements" of whole tensors) -> their number in an optimizer step."""
SMALL = 40
"""Elements of what is left out: the norms of 40 tensors by which gradients are clipped, which FSDP2 adds up."""
BLOCK = 4 * (32 * 32 + 32) + (32 * 64 + 64) + (64 * 32 + 32) + 2 * 2 * 32
LEADING_ONE = 32 + 5 * 32
"""The class token and the positions: tensors whose first dimension is 1, which is padded to the ranks that shard it."""
ROOT = 3 * 8 * 8 * 32 + 32 + LEADING_ONE + 2 * 32 + 10 * 32 + 10
PSI = 2 * BLOCK + ROOT


def counted(curve: Curve) -> Sent:
    """What each rank counted in each of two steps, in groups of several ranks."""
    by_step = [_counted(line) for lines in curve.traffic for line in lines]
    assert len(by_step) == 2 * RANKS
    assert all(step == by_step[0] for step in by_step)
    return by_step[0]


def _counted(line: dict[str, Any]) -> Sent:
    sent: Sent = Counter()
    for call in line["collectives"]:
        gathered_parts = call["ranks"] if call["operation"] == "all_gather" else 1
        elements = max(gathered_parts * call["input_elements"], call["output_elements"])
        if call["ranks"] > 1 and elements > SMALL:
            assert call["dtype"] == "float32"
            sent[call["operation"], "calls"] += 1
            sent[call["operation"], "elements"] += elements
    return sent


def planned(trial: Trial) -> Sent:
    """The same by arithmetic."""
    layout = trial.layout
    ranks_by_group = {"replicas": layout.replicas, "sharding": layout.sharding_ranks, "replication": layout.replicate}
    sent: Sent = Counter()
    for message in messages(trial) or ():
        if ranks_by_group[message.group] > 1:
            calls = message.times(trial.train.grad_accum)
            sent[message.operation, "calls"] += round(calls)
            sent[message.operation, "elements"] += round(calls * message.tensor_bytes / 4)
    return sent


def sent_of(**calls_and_elements: tuple[int, int]) -> Sent:
    sent: Sent = Counter()
    for operation, (calls, elements) in calls_and_elements.items():
        sent[operation, "calls"] = calls
        sent[operation, "elements"] = elements
    return sent


def test_the_model_is_as_counted_by_hand() -> None:
    assert parameters(MODEL) == PSI


def test_what_replicas_send_is_counted_by_hand(four: dict[str, Curve]) -> None:
    """Two replicas of two ranks: both blocks are gathered twice, and the root once, padded to an even first dimension;
    everything is scattered once, and each rank's half all-reduced. With one replica, of four ranks, nothing is
    all-reduced; with four, of one rank each, all of it, and nothing else is sent. Three micro-steps send thrice."""
    of_two = PSI + LEADING_ONE
    of_four = PSI + 3 * LEADING_ONE + 2 * (32 + 1)  # the classifier's 10 rows are 12
    whole = sent_of(all_gather=(5, of_four + 2 * BLOCK), reduce_scatter=(3, of_four))
    assert counted(four["1 replicas adamw-clipped"]) == whole
    halves = sent_of(all_gather=(5, of_two + 2 * BLOCK), reduce_scatter=(3, of_two), all_reduce=(3, of_two // 2))
    assert counted(four["2 replicas adamw-clipped"]) == halves
    assert counted(four["2 replicas sgd-clipped-3"]) == Counter({kind: 3 * number for kind, number in halves.items()})
    assert counted(four["4 replicas sgd-clipped-3"]) == sent_of(all_reduce=(3 * 3, 3 * PSI))
    kept = sent_of(all_gather=(3, of_two), reduce_scatter=(3, of_two), all_reduce=(3, of_two // 2))
    assert counted(four[KEPT]) == kept
    # As many elements as DDP sends once; FSDP2 sends them in every micro-step, and in a call for each block.
    assert counted(four["ddp adamw-clipped"])["all_reduce", "elements"] == PSI


@pytest.mark.parametrize(("name", "setting"), TRAINED)
def test_arithmetic_says_what_replicas_send(four: dict[str, Curve], name: str, setting: str) -> None:
    grad_accum = SETTINGS[setting].get("grad_accum", 1)
    assert counted(four[f"{name} {setting}"]) == planned(trial_of(int(name[0]), grad_accum=grad_accum))


def test_the_ranks_of_a_replica_are_neighbours() -> None:
    """In a world that exchanges nothing, as rank 5 of 8 in two replicas: those of one host shard a replica."""
    trial = trial_of(2).model_copy(update={"world": World(nodes=2, ranks_per_node=4, threads_per_rank=1)})
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    try:
        mesh = split(nn.Linear(2, 2), trial, torch.device("cpu"))
        assert mesh.mesh_dim_names == (REPLICATION, SHARDING)  # the first replicates, for `fully_shard`
        groups = [dist.get_process_group_ranks(mesh[name].get_group()) for name in (SHARDING, REPLICATION)]
    finally:
        dist.destroy_process_group()
    assert groups == [[4, 5, 6, 7], [1, 5]]
    assert groups == [[*trial.layout.sharding_group(5)], [*trial.layout.replication_group(5)]]


def test_gradients_among_replicas_travel_rounded_where_asked(four: dict[str, Curve], alone: dict[str, Curve]) -> None:
    assert four[ROUNDED].gradient_dtype == "bfloat16"
    assert 2e-6 < largest_difference(four[ROUNDED].losses, alone["none sgd-clipped-3"].losses) < 1.5e-4
