"""Real ranks: ZeRO-3 with a second shard of its weights (hpZ) trains as one process does, and sends what arithmetic
says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engines.curves import GLOBAL_BATCH, MODEL, Curve, Job, largest_difference, train
from engines.jobs import ADAMW, CLIPPED, SGD, Train
from forks import prepared_here
from vitscale.engines.checks import exchanges_in_groups
from vitscale.engines.deepspeed.facts import FACTS
from vitscale.prediction.step.messages import messages
from vitscale.trial.model_cost import parameters
from vitscale.trial.trial import DataSpec, TrainSpec, Trial, WindowSpec, World

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

RANKS = 4
STEPS, SAVED_BEFORE = 3, 2
"""The third step has 7 of 36 images."""
EQUAL = 1e-6
"""Of a step's loss, in fp32."""
SETTINGS: dict[str, Train] = {"adamw-clipped": ADAMW | CLIPPED, "sgd-clipped-3": SGD | CLIPPED | {"grad_accum": 3}}


def of_file(**zero: int) -> Train:
    return {"deepspeed_config": {"zero_optimization": {f"stage3_{key}": value for key, value in zero.items()}}}


RELEASED = of_file(max_live_parameters=0, max_reuse_distance=0, param_persistence_threshold=0)
"""Each weight is gathered twice in a micro-step, and none is kept."""
KEPT = of_file(param_persistence_threshold=1500)
"""Small weights stay, and large ones from forward to backward. Large are the MLPs' matrices and the patches'."""
TRAINED: dict[str, Train] = {
    "hpz 2 released adamw-clipped": {"hpz": 2} | RELEASED,
    "hpz 2 released sgd-clipped-3": {"hpz": 2} | RELEASED,
    "hpz 2 kept sgd-clipped-3": {"hpz": 2} | KEPT,
    "hpz 8 kept sgd-clipped-3": {"hpz": 8} | KEPT,
    "plain released adamw-clipped": RELEASED,
}
"""In this order, so that the last one, in the process of the others, shows that their group is forgotten."""
BF16 = "hpz 2 kept, bf16 sgd-clipped-3"
RESUMED = {"hpz 2": "plain", "plain": "hpz 2"}
"""What goes on -> whose checkpoint it loads."""
_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


def setting_of(name: str) -> str:
    return name.rpartition(" ")[2]


def train_of(name: str, fields: Train) -> Train:
    return {"engine": "deepspeed", "zero_stage": 3} | SETTINGS[setting_of(name)] | fields


def jobs_on_four_ranks(folder: Path) -> list[Job]:
    jobs: list[Job] = [
        {"name": name, "train": train_of(name, fields), "steps": STEPS, "traffic": True, "save_before": SAVED_BEFORE}
        for name, fields in TRAINED.items()
    ]
    bf16 = TRAINED["hpz 2 kept sgd-clipped-3"] | {"precision": "bf16"}
    jobs.append({"name": BF16, "train": train_of(BF16, bf16), "steps": STEPS, "traffic": True})
    for name, origin in RESUMED.items():
        trained, saved = (f"{each} released adamw-clipped" for each in (name, origin))
        resumed: Job = {
            "name": f"{name} from {origin} adamw-clipped", "train": train_of(trained, TRAINED[trained]),
            "steps": STEPS, "load": str(folder / saved),
        }  # fmt: skip
        jobs.append(resumed)
    return jobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("second-shards")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Curve]:
    """One process, in one piece."""
    jobs: list[Job] = [
        {"name": setting, "train": {"engine": "none"} | fields | {"grad_accum": 1}, "steps": STEPS}
        for setting, fields in SETTINGS.items()
    ]
    return train(jobs, 1, folder / "1", prepared_here())


@pytest.fixture(scope="module")
def four(folder: Path) -> dict[str, Curve]:
    return train(jobs_on_four_ranks(folder / "4"), RANKS, folder / "4", prepared_here())


def trial_of(fields: Train, ranks: int = RANKS) -> Trial:
    """As `curve_ranks` makes it."""
    parts = ranks * fields.get("grad_accum", 1)
    of_train = {"precision": "fp32", "device": "cpu", "micro_batch": GLOBAL_BATCH // parts} | fields
    return Trial(
        model=MODEL,
        data=DataSpec(name="synthetic"),
        train=TrainSpec.model_validate(of_train),
        world=World(ranks_per_node=ranks, threads_per_rank=1),
        window=WindowSpec(),
        launcher="torchrun",
    )


def test_second_shards_train_as_one_process_does(four: dict[str, Curve], alone: dict[str, Curve]) -> None:
    """Clipped by the norm, in one piece and in three, and from checkpoints of ZeRO-3 without them, and the reverse."""
    differences = {}
    for name, curve in four.items():
        reference = alone[setting_of(name)]
        assert curve.ids == reference.ids[curve.first :], name
        if name != BF16:
            differences[name] = largest_difference(curve.losses, reference.losses[curve.first :])
    print({name: f"{difference:.1e}" for name, difference in differences.items()})
    assert len(differences) == len(TRAINED) + len(RESUMED)
    assert max(differences.values()) < EQUAL


Sent = Counter[tuple[str, int, str]]
"""(operation, ranks of its group, "calls" or "bytes" of whole tensors) -> their number in an optimizer step."""


def counted(curve: Curve) -> Sent:
    """What each rank counted in each of two steps."""
    by_step = [_counted(line) for lines in curve.traffic for line in lines]
    assert len(by_step) == 2 * RANKS
    assert all(step == by_step[0] for step in by_step)
    return by_step[0]


def _counted(line: dict[str, Any]) -> Sent:
    sent: Sent = Counter()
    for call in line["collectives"]:
        gathered_parts = call["ranks"] if call["operation"] == "all_gather" else 1
        elements = max(gathered_parts * call["input_elements"], call["output_elements"])
        sent[call["operation"], call["ranks"], "calls"] += 1
        sent[call["operation"], call["ranks"], "bytes"] += elements * _BYTES[call["dtype"]]
    return sent


def planned(trial: Trial) -> Sent:
    """The same by arithmetic."""
    ranks_by_group = {"replicas": RANKS, "second shard": min(RANKS, FACTS.second_shard_ranks(trial.train))}
    sent: Sent = Counter()
    for message in messages(trial) or ():
        calls = message.times(trial.train.grad_accum)
        if calls:
            ranks = ranks_by_group[message.group]
            sent[message.operation, ranks, "calls"] += round(calls)
            sent[message.operation, ranks, "bytes"] += round(calls * message.tensor_bytes)
    return sent


PSI = parameters(MODEL) or 0
PADDED = PSI + 2
"""The classifier's bias of 10 is 12 to be cut into four."""


def gathered(curve: Curve, ranks: int) -> int:
    """Elements in fp32 that are gathered in an optimizer step by groups of so many ranks."""
    return counted(curve)["all_gather", ranks, "bytes"] // 4


def test_only_the_first_gather_of_a_step_goes_over_all_ranks(four: dict[str, Curve]) -> None:
    """Twice in each micro-step: of one micro-step's two once in the pair, of three micro-steps' six five times. Of
    weights that stay until backward once in each micro-step, so two times of three; those that always stay are gathered
    over all ranks, once, after the step."""
    once = four["hpz 2 released adamw-clipped"]
    assert (gathered(once, 4), gathered(once, 2)) == (PADDED, PADDED)
    thrice = four["hpz 2 released sgd-clipped-3"]
    assert (gathered(thrice, 4), gathered(thrice, 2)) == (PADDED, 5 * PADDED)
    large = 2 * 2 * 32 * 64 + 3 * 8 * 8 * 32
    kept = four["hpz 2 kept sgd-clipped-3"]
    assert (gathered(kept, 4), gathered(kept, 2)) == (PADDED, 2 * large)
    for curve in (four["plain released adamw-clipped"], four["hpz 8 kept sgd-clipped-3"]):
        assert gathered(curve, 2) == 0
    assert gathered(four["plain released adamw-clipped"], 4) == 2 * PADDED


@pytest.mark.parametrize("name", [*TRAINED, BF16])
def test_arithmetic_says_what_second_shards_send(four: dict[str, Curve], name: str) -> None:
    fields = TRAINED[name] if name in TRAINED else TRAINED["hpz 2 kept sgd-clipped-3"] | {"precision": "bf16"}
    assert counted(four[name]) == planned(trial_of(train_of(name, fields)))


@pytest.mark.parametrize("prefetch_bucket", [0, 1000, 3000, 6000, 50_000])
@pytest.mark.parametrize("grad_accum", [1, 3])
def test_a_step_gathers_as_much_as_without_and_each_weight_once_over_all(prefetch_bucket: int, grad_accum: int) -> None:
    """With weights of forward and of backward in one fetch too."""
    released = of_file(max_reuse_distance=0, param_persistence_threshold=0, prefetch_bucket_size=prefetch_bucket)
    fields = {"engine": "deepspeed", "zero_stage": 3, "grad_accum": grad_accum} | released
    plain, own = planned(trial_of(fields)), planned(trial_of(fields | {"hpz": 2}))
    assert own["all_gather", 4, "bytes"] == 4 * PADDED
    assert own["all_gather", 4, "bytes"] + own["all_gather", 2, "bytes"] == plain["all_gather", 4, "bytes"]
    assert {kind: own[kind] for kind in own if kind[0] != "all_gather"} == {
        kind: plain[kind] for kind in plain if kind[0] != "all_gather"
    }


@pytest.mark.parametrize(("hpz", "in_groups"), [(1, False), (2, True), (4, False), (8, False)])
def test_waiting_is_told_from_transfer_where_all_ranks_exchange_together(hpz: int, in_groups: bool) -> None:
    assert exchanges_in_groups(trial_of({"engine": "deepspeed", "zero_stage": 3, "hpz": hpz})) is in_groups


def test_a_file_of_deepspeeds_own_sends_the_same() -> None:
    fields = train_of("hpz 2 kept sgd-clipped-3", {"hpz": 2} | KEPT)
    zero = KEPT["deepspeed_config"]["zero_optimization"] | {"zero_hpz_partition_size": 2}
    in_file = fields | {"hpz": 1, "deepspeed_config": {"zero_optimization": zero}}
    assert messages(trial_of(in_file)) == messages(trial_of(fields)) != messages(trial_of(fields | {"hpz": 1}))
