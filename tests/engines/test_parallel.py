"""Real ranks: models that several ranks share train as a single process does, and their checkpoints go anywhere."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engines.curves import (
    GLOBAL_BATCH,
    MANY_HEADS,
    SEGMENTED_BATCH,
    SEGMENTERS,
    SHAPES,
    Curve,
    Job,
    largest_difference,
    train,
)
from engines.jobs import ADAMW, CLIPPED, ENGINE_FIELDS, FINE_TUNED, GROWN, SEGMENTED, SGD, Train
from forks import Starts, prepared_here
from vitscale.prediction.step.messages import messages, norm_messages
from vitscale.trial.model_cost import parameters
from vitscale.trial.parallel import ParallelSpec
from vitscale.trial.trial import DataSpec, TrainSpec, Trial, WindowSpec, World

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1500)]

EQUAL = 1e-5
"""Of a step's loss, and of the last step's whole gradient in the L2 norm, over `STEPS` steps in fp32."""
FOLLOWED = 1e-4
"""Of a norm's running mean or variance, of which its channels are added up."""
STEPS, SAVED_BEFORE, STEPS_AT_NIGHT = 3, 2, 20
"""Every third step of an epoch has 7 of 36 images."""
SETTINGS: dict[str, Train] = {"adamw-clipped": ADAMW | CLIPPED, "sgd-clipped-3": SGD | CLIPPED | {"grad_accum": 3}}
IN_SIX = {"grad_accum": 6}
"""Of "adamw-clipped" in a pipeline: the micro-batches that flow through it. With data parallelism some are padding."""
SLOWER = {"swinv2": 10, "swinv2-4": 100, "swinv2-odd": 100, "shared-swin": 10}
"""Of Swin V2, which at the others' rates carries a single process's rounding in three micro-batches within 20 steps to
1.7e-3 of the gradient; of its four blocks at a tenth of them to 9.5e-5, at a hundredth to 5.2e-6."""
SEGMENTING: dict[str, Train] = {"adamw-clipped": FINE_TUNED, "sgd-clipped-3": SEGMENTED}
"""Of models that label pixels: synchronised norms, and rates that do not carry rounding further. Weights are as large
as fine-tuned ones."""
BLOCKS = 4
"""Of what is trained in a pipeline."""
BY_DAY = {
    2: ("fsdp2 tensor=2", "fsdp2 tensor=2 shard_norms=1", "ddp sequence=2", "fsdp2 sequence=2"),
    4: ("fsdp2 tensor=2", "fsdp2 tensor=4 shard_norms=1", "ddp sequence=2", "fsdp2 sequence=2 tensor=2 shard_norms=1"),
}
PIPELINED = {
    2: ("ddp pipeline=2", "fsdp2 pipeline=2 schedule=interleaved", "ddp pipeline=2 schedule=gpipe"),
    4: ("fsdp2 pipeline=2 tensor=2", "ddp pipeline=2", "ddp pipeline=2 gradient_as_bucket_view=1"),
}
IN_FP16 = "ddp pipeline=2 gradient_dtype=fp16"
"""Gradients travel in fp16, among the ranks that hold the same stage."""
OWN_BY_DAY = ("hsvit:tiny ddp pipeline=2", "sparse_vit:tiny fsdp2 tensor=2", "swinv2:tiny fsdp2 tensor=2")
SWIN_BY_DAY = "swinv2-4:tiny fsdp2 pipeline=2 schedule=interleaved"
ROWS_BY_DAY = "swinv2-odd:tiny ddp sequence=2"
OWN_AT_NIGHT = (
    "hsvit:tiny fsdp2 tensor=2", "hsvit:tiny fsdp2 pipeline=2 schedule=interleaved", "sparse_vit:tiny ddp pipeline=2",
    "clip_sequence:tiny ddp sequence=2", "clip_sequence:tiny zero-1 sequence=2", "clip_sequence:tiny fsdp2 tensor=2",
    "swinv2:tiny fsdp2 tensor=2", "swinv2-4:tiny ddp pipeline=2", "swinv2-4:tiny fsdp2 pipeline=2 schedule=gpipe",
    "swinv2-4:tiny ddp pipeline=2 schedule=interleaved", "swinv2-4:tiny ddp pipeline=2 activation_checkpointing=1",
    "swinv2-odd:tiny fsdp2 sequence=2", "swinv2-odd:tiny ddp sequence=2 activation_checkpointing=1",
    "vit-24:tiny fsdp2 tensor=2",
)  # fmt: skip
"""Of examples/own_models: what factories offer to be split; Swin V2; and a vision transformer of more heads."""
SEGMENTED_BY_DAY = {
    "shared-vit:tiny ddp sequence=2": "adamw-clipped",
    "shared-vit:tiny fsdp2 sequence=2 batch_norm=local": "sgd-clipped-3",
    "shared-vit:tiny fsdp2 tensor=2 shard_norms=1": "adamw-clipped",
    "shared-swin:tiny fsdp2 tensor=2 batch_norm=local": "adamw-clipped",
    "shared-vit:tiny ddp pipeline=2 schedule=gpipe": "adamw-clipped",
    "shared-swin:tiny fsdp2 pipeline=2 schedule=interleaved batch_norm=local": "sgd-clipped-3",
    "shared-swin:tiny ddp sequence=2": "adamw-clipped",
}
"""Every third step has 4 of 12 images, in three micro-steps two, two and none; one data-parallel rank has all of them,
so that local norms are over the same as one process's."""
LABELS_NONE = "shared-vit:tiny ddp sequence=4 batch_norm=local"
"""Of two images two of four ranks label none."""
STAGED = "shared-swin:tiny ddp pipeline=2 schedule=gpipe"
"""On four ranks, from the checkpoint of tensor ranks, of norms' statistics too."""
LABELLING_STEPS, LABELLED_BEFORE = 3, 2
"""By day; the third step is the short one."""
IN_BF16 = "swinv2-4:tiny ddp pipeline=2 precision=bf16"
"""Against one process in as many micro-batches of bf16: a first step is equal to the bit."""
OWN_IN_BF16 = "hsvit:tiny ddp pipeline=2 precision=bf16"
"""A factory's model, whose modules make bf16 under autocast; the next stage gets that as fp32, and rounds less."""
COUNTED = (
    "swinv2:tiny fsdp2 tensor=2 activation_checkpointing=1", "fsdp2 tensor=2 shard_norms=1 activation_checkpointing=1",
    "ddp sequence=2 activation_checkpointing=1", "swinv2:tiny fsdp2 tensor=2 precision=bf16",
    "swinv2-odd:tiny fsdp2 sequence=2 activation_checkpointing=1 precision=bf16", IN_BF16,
)  # fmt: skip
"""Trained for a step, for what they send."""
ZERO_BY_DAY = ("zero-2 sequence=2", "zero-3 sequence=2")
AT_NIGHT = {
    2: ("zero-0 sequence=2", "zero-1 sequence=2", "zero-2 sequence=2", "zero-3 sequence=2",
        "shared-vit:tiny zero-1 sequence=2", "shared-vit:tiny zero-3 sequence=2 batch_norm=local",
        "shared-vit:tiny fsdp2 tensor=2", "shared-vit:tiny fsdp2 sequence=2", "shared-swin:tiny fsdp2 tensor=2",
        "shared-vit:tiny fsdp2 pipeline=2 schedule=gpipe", "shared-swin:tiny ddp pipeline=2 schedule=gpipe",
        "shared-swin:tiny ddp pipeline=2 schedule=interleaved activation_checkpointing=1",
        "swinv2-odd:tiny zero-0 sequence=2", "swinv2-odd:tiny zero-1 sequence=2", "swinv2-odd:tiny zero-2 sequence=2",
        "swinv2-odd:tiny zero-3 sequence=2", "shared-swin:tiny fsdp2 sequence=2 batch_norm=local",
        "shared-swin:tiny zero-3 sequence=2"),
    3: ("shared-vit:tiny ddp pipeline=3 schedule=gpipe", "shared-swin:tiny fsdp2 pipeline=3 schedule=gpipe",
        "ddp pipeline=3", "fsdp2 pipeline=3 schedule=gpipe", "fsdp2 tensor=3", "fsdp2 tensor=3 shard_norms=1",
        "ddp sequence=3", "fsdp2 sequence=3", "swinv2-4:tiny ddp pipeline=3"),
    4: ("shared-vit:tiny ddp pipeline=2 schedule=gpipe", "shared-vit:tiny fsdp2 pipeline=2 sequence=2",
        "shared-vit:tiny fsdp2 pipeline=2 tensor=2 schedule=gpipe", "shared-swin:tiny fsdp2 pipeline=2 tensor=2",
        "shared-swin:tiny ddp pipeline=2 schedule=gpipe", "shared-swin:tiny ddp pipeline=4 schedule=gpipe",
        "fsdp2 tensor=4", "fsdp2 tensor=2 shard_norms=1", "ddp sequence=4", "fsdp2 sequence=2",
        "fsdp2 sequence=2 tensor=2", "ddp pipeline=4 schedule=gpipe", "fsdp2 pipeline=2",
        "ddp pipeline=2 sequence=2", "swinv2:tiny fsdp2 tensor=2", "swinv2:tiny fsdp2 tensor=4",
        "swinv2-4:tiny ddp pipeline=2", "swinv2-4:tiny fsdp2 pipeline=2 tensor=2",
        "swinv2-4:tiny fsdp2 pipeline=2 schedule=interleaved", "swinv2-4:tiny ddp pipeline=4 schedule=gpipe",
        "shared-vit:tiny fsdp2 sequence=2 tensor=2 shard_norms=1", "shared-vit:tiny fsdp2 tensor=2",
        "shared-vit:tiny fsdp2 sequence=2", "shared-vit:tiny ddp sequence=4", "shared-swin:tiny fsdp2 tensor=2",
        "shared-swin:tiny fsdp2 tensor=4 batch_norm=local", "swinv2-odd:tiny ddp sequence=2",
        "swinv2-odd:tiny ddp sequence=4", "swinv2-odd:tiny fsdp2 sequence=2 tensor=2",
        "swinv2-odd:tiny ddp pipeline=2 sequence=2",
        "swinv2-odd:tiny fsdp2 pipeline=2 sequence=2 schedule=interleaved",
        "shared-swin:tiny fsdp2 sequence=2 tensor=2", "shared-swin:tiny ddp sequence=2"),
    6: ("ddp pipeline=3", "fsdp2 pipeline=3 tensor=2", "fsdp2 tensor=3", "fsdp2 sequence=3 tensor=2",
        "fsdp2 sequence=2 tensor=3 shard_norms=1", "ddp sequence=3", "ddp pipeline=3 sequence=2",
        "fsdp2 pipeline=2 sequence=3", "fsdp2 pipeline=2 tensor=3"),
    8: ("shared-vit:tiny fsdp2 sequence=2 tensor=2",
        "fsdp2 pipeline=2 sequence=2 tensor=2", "fsdp2 tensor=4 shard_norms=1", "fsdp2 sequence=2 tensor=2",
        "ddp sequence=4", "ddp pipeline=4 schedule=gpipe", "fsdp2 pipeline=4 tensor=2 schedule=gpipe",
        "ddp pipeline=2 sequence=2", "ddp pipeline=4 sequence=2 schedule=gpipe", "fsdp2 pipeline=2 sequence=4",
        "fsdp2 pipeline=2 tensor=2", "fsdp2 pipeline=2 tensor=4", "vit-24:tiny fsdp2 sequence=4 tensor=2",
        "vit-24:tiny fsdp2 sequence=2 tensor=4 shard_norms=1",
        "swinv2-odd:tiny fsdp2 sequence=2 tensor=2", "swinv2-odd:tiny fsdp2 pipeline=2 sequence=2 tensor=2"),
}  # fmt: skip
"""Ranks -> engine and split; what is left of the ranks is data parallel."""


def job_of(name: str, setting: str, steps: int = STEPS) -> Job:
    factory, _, known = name.rpartition(":tiny ")
    engine, *split = known.split()
    given: dict[str, Any] = dict(s.split("=") for s in split)
    given = {key: int(value) if value.isdigit() else value for key, value in given.items()}
    fields = {key: given.pop(key) for key in tuple(given) if key in ParallelSpec.model_fields}
    own = ENGINE_FIELDS.get(engine, {"engine": engine}) | SETTINGS[setting] | given
    job: Job = {
        "name": f"{name} {setting}", "train": own, "steps": steps, "parallel": fields, "many_heads": True,
        "gradients": own["engine"] != "deepspeed",
    }  # fmt: skip
    if "shard_norms" in fields:
        fields["shard_norms"] = True
    if "pipeline" in fields and factory not in SEGMENTERS:
        job["layers"], job["evaluate"], job["train"] = BLOCKS, True, IN_SIX | own
    if factory in SEGMENTERS:
        job["segments"], job["grown"] = factory, GROWN
        job["train"] = own | SEGMENTING[setting] | given
    elif factory:
        job["factory"] = f"{factory}:tiny"
    if slower := SLOWER.get(factory):
        job["train"] = job["train"] | {"learning_rate": job["train"]["learning_rate"] / slower}
    return job


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Curve]:
    return in_one_piece(folder / "1", STEPS, prepared_here())


def in_one_piece(
    world: Path, steps: int, starts: Starts | None = None, needed: Collection[str] | None = None
) -> dict[str, Curve]:
    """The single process; `starts` as `curves.train` takes it, `needed` the names of jobs, all by default."""
    jobs = [job_of("none", setting, steps) for setting in SETTINGS]
    for deep in [job_of("none", setting, steps) for setting in SETTINGS]:
        deep["name"], deep["layers"], deep["evaluate"] = f"pipeline {deep['name']}", BLOCKS, True
        jobs.append(deep)
    own = dict.fromkeys(
        name.partition(" ")[0]
        for name in (*OWN_BY_DAY, SWIN_BY_DAY, ROWS_BY_DAY) + (OWN_AT_NIGHT if steps > STEPS else ())
    )
    jobs += [job_of(f"{factory} none", setting, steps) for factory in own for setting in SETTINGS]
    for job in jobs:
        job["evaluate"] = job.get("evaluate", False) or "factory" in job
    for job in jobs:
        job["train"] = job["train"] | {"grad_accum": 1}
    for name in (IN_BF16, OWN_IN_BF16):
        jobs.append(job_of(name.replace("ddp pipeline=2", "none"), "adamw-clipped", 1))
        jobs[-1] |= {"train": IN_SIX | jobs[-1]["train"], "evaluate": True}
    # In as many micro-steps as on ranks, for norms are over one of them.
    labelling = SEGMENTED_BY_DAY.items()
    segmented = dict.fromkeys((name.partition(" ")[0], setting) for name, setting in labelling)
    labelling_steps = LABELLING_STEPS if steps == STEPS else steps
    jobs += [job_of(f"{model} none", setting, labelling_steps) for model, setting in segmented]
    return train([job for job in jobs if needed is None or job["name"] in needed], 1, world, starts)


@pytest.fixture(scope="module")
def two(folder: Path, alone: dict[str, Curve]) -> dict[str, Curve]:
    """Two ranks; they leave a checkpoint of each split, and break one norm on purpose."""
    jobs = [job_of(name, "adamw-clipped") for name in BY_DAY[2]]
    jobs += [job_of(name, "sgd-clipped-3") for name in (BY_DAY[2][1], *ZERO_BY_DAY)]
    jobs += [job_of(name, list(SETTINGS)[place > 1]) for place, name in enumerate(PIPELINED[2])]
    own = [job_of(name, setting) for name, setting in zip(OWN_BY_DAY, cycle(SETTINGS), strict=False)]
    jobs += [job_of(name, "adamw-clipped") for name in (SWIN_BY_DAY, ROWS_BY_DAY)]
    jobs += [job_of(name, setting, LABELLING_STEPS) for name, setting in SEGMENTED_BY_DAY.items()]
    for job in jobs:
        if job["name"].endswith("adamw-clipped"):
            job["save_before"], job["traffic"] = LABELLED_BEFORE if "segments" in job else SAVED_BEFORE, True
        if "pipeline" in job["name"] and "segments" in job:
            job["traffic"] = True
    own[-1]["traffic"] = True  # Swin V2
    for job in (counted := [job_of(name, "adamw-clipped", 1) for name in COUNTED]):
        job["gradients"], job["traffic"] = IN_BF16 in job["name"], True
    staged = job_of(OWN_IN_BF16, "adamw-clipped", 1)
    wrong = job_of("fsdp2 tensor=2", "sgd-clipped-3")
    wrong["name"], wrong["wrong"] = "local norm", "local-norm"
    of_a_stage = job_of("ddp pipeline=2", "sgd-clipped-3")
    of_a_stage["name"], of_a_stage["wrong"] = "stage norm", "stage-norm"
    return train([*jobs, *own, *counted, staged, wrong, of_a_stage], 2, folder / "2", prepared_here())


@pytest.fixture(scope="module")
def four(folder: Path, two: dict[str, Curve]) -> dict[str, Curve]:
    """Four ranks that go on with checkpoints of two in other splits."""
    jobs = []
    for saved, resumed in zip(BY_DAY[2], BY_DAY[4][::-1], strict=True):
        job = job_of(resumed, "adamw-clipped")
        job["name"], job["load"] = f"{resumed} from {saved}", str(folder / "2" / f"{saved} adamw-clipped")
        job["traffic"] = "tensor=4" in resumed  # neither classes nor tokens divide
        jobs.append(job)
    jobs += [job_of(name, list(SETTINGS)[place % 2]) for place, name in enumerate(PIPELINED[4])]
    for saved, resumed in zip(PIPELINED[2][:2], ("fsdp2 pipeline=2", "fsdp2 tensor=2"), strict=True):
        job = job_of(resumed, "adamw-clipped")
        job["name"], job["load"] = f"{resumed} from {saved}", str(folder / "2" / f"{saved} adamw-clipped")
        jobs.append(job | {"layers": BLOCKS, "traffic": True})
    jobs.append(job_of(IN_FP16, "sgd-clipped-3"))
    for saved, resumed in (
        (SWIN_BY_DAY, "swinv2-4:tiny fsdp2 pipeline=2"), (ROWS_BY_DAY, "swinv2-odd:tiny fsdp2 sequence=2 tensor=2"),
        (ROWS_BY_DAY, "swinv2-odd:tiny ddp pipeline=2 sequence=2"),
    ):  # fmt: skip
        swin = job_of(resumed, "adamw-clipped")
        swin["name"], swin["load"] = f"{resumed} from two", str(folder / "2" / f"{saved} adamw-clipped")
        jobs.append(swin | {"traffic": True})
    jobs.append(job_of(LABELS_NONE, "sgd-clipped-3", LABELLING_STEPS))
    jobs.append(job_of(STAGED, "adamw-clipped", LABELLING_STEPS))
    saved = next(name for name in SEGMENTED_BY_DAY if name.startswith("shared-swin:tiny fsdp2 tensor"))
    jobs[-1] |= {"name": f"{STAGED} from two", "load": str(folder / "2" / f"{saved} adamw-clipped")}
    saved, resumed = "shared-vit:tiny ddp sequence=2", "shared-vit:tiny fsdp2 tensor=2"
    jobs.append(job_of(resumed, "adamw-clipped", LABELLING_STEPS))
    jobs[-1] |= {"name": f"{resumed} from two", "load": str(folder / "2" / f"{saved} adamw-clipped")}
    jobs[-1]["traffic"] = True
    return train(jobs, 4, folder / "4", prepared_here())


def gradient_difference(world: Path, name: str, setting: str, known: str | None = None) -> float:
    """Of the last step's whole gradient from the single process's, as a share of it, in the L2 norm; 0 of DeepSpeed,
    which keeps it in parts of its own. `known`: the single process's job, by default that of `reference_of`."""
    if "zero-" in name:
        return 0.0
    own = load_file(world / f"{name}.safetensors")
    reference = load_file(world.parent / "1" / f"{known or reference_of(name, setting)}.safetensors")
    assert own.keys() == reference.keys()
    apart = torch.cat([(own[key] - whole).flatten() for key, whole in reference.items()])
    return float(apart.norm() / torch.cat([whole.flatten() for whole in reference.values()]).norm())


def reference_of(name: str, setting: str) -> str:
    factory, own, _ = name.rpartition(":tiny ")
    return f"{factory}{own}none {setting}" if own else f"{'pipeline ' * ('pipeline' in name)}none {setting}"


def check(world: Path, curves: dict[str, Curve], alone: dict[str, Curve]) -> None:
    differences = {}
    for name, curve in curves.items():
        setting = next((setting for setting in SETTINGS if name.endswith(setting)), "adamw-clipped")
        reference = alone[reference_of(name, setting)]
        holds_scores(name, curve, reference)
        assert curve.ids == reference.ids[curve.first :], name
        if "pipeline" in name and curve.scores and not curve.statistics:
            assert {accuracy for _, accuracy in curve.scores} == {reference.scores[0][1]}
            assert [loss for loss, _ in curve.scores] == pytest.approx([reference.scores[0][0]] * len(curve.scores))
        differences[name] = (
            largest_difference(curve.losses, reference.losses[curve.first :]),
            gradient_difference(world, name, setting),
        )
    print(world.name, {name: [f"{value:.1e}" for value in both] for name, both in differences.items()})
    assert max(max(both) for both in differences.values()) < EQUAL, differences


def holds_scores(name: str, curve: Curve, reference: Curve) -> None:
    """Of pixels labelled before the first step, each counted once; and what norms have followed."""
    if not curve.statistics:
        return
    (loss, accuracy, mean_iou), *_ = reference.scores
    assert 0 < mean_iou < accuracy < 1
    for scores in curve.scores if " from " not in name else ():
        assert scores == [pytest.approx(loss, rel=EQUAL), *(pytest.approx(s, abs=1e-3) for s in (accuracy, mean_iou))]
    assert any(curve.statistics)
    for followed in filter(None, curve.statistics):  # of stages the last has the norms
        assert followed == pytest.approx(reference.statistics[0], rel=EQUAL, abs=FOLLOWED), name


def test_two_ranks_that_share_a_model_train_as_one(
    folder: Path, two: dict[str, Curve], alone: dict[str, Curve]
) -> None:
    """Tensors, with whole and with shared norms, tokens, and stages; clipped, in one piece, three and six, padded."""
    others = ("local norm", "stage norm", *(f"{name} adamw-clipped" for name in (*COUNTED, OWN_IN_BF16)))
    check(folder / "2", {name: curve for name, curve in two.items() if name not in others}, alone)


def test_stages_of_a_swin_make_the_gradient_of_one_process_to_the_bit(folder: Path, two: dict[str, Curve]) -> None:
    """Of six micro-batches under autocast, whose maps cross from rank to rank in 16 bits, as they are made."""
    alone = IN_BF16.replace("ddp pipeline=2", "none")
    own, one = (load_file(folder / f"{at} adamw-clipped.safetensors") for at in (f"2/{IN_BF16}", f"1/{alone}"))
    assert f"{IN_BF16} adamw-clipped" in two
    assert own.keys() == one.keys()
    assert all(torch.equal(own[name], whole) for name, whole in one.items())


def test_stages_of_an_own_model_train_under_autocast(
    folder: Path, two: dict[str, Curve], alone: dict[str, Curve]
) -> None:
    """As near to one process in as many micro-batches as that is to itself in fp32: 6e-3 of the gradient."""
    name = f"{OWN_IN_BF16} adamw-clipped"
    known = name.replace("ddp pipeline=2", "none")
    own, one = two[name], alone[known]
    assert own.losses == pytest.approx(one.losses, rel=1e-3)
    assert [loss for loss, _ in own.scores] == pytest.approx([one.scores[0][0]] * 2, rel=1e-3)
    assert gradient_difference(folder / "2", name, "adamw-clipped", known) < 1e-2


def test_four_ranks_share_models_and_images(folder: Path, four: dict[str, Curve], alone: dict[str, Curve]) -> None:
    """Two models of two ranks, one of four, tensors and tokens at once; checkpoints of other splits go on."""
    assert len(four) == len(BY_DAY[4]) + len(PIPELINED[4]) + 4 + 5
    rounded = f"{IN_FP16} sgd-clipped-3"
    check(folder / "4", {name: curve for name, curve in four.items() if name != rounded}, alone)
    assert EQUAL / 100 < largest_difference(four[rounded].losses, alone["pipeline none sgd-clipped-3"].losses) < 1e-3


def sent(curve: Curve) -> Counter[tuple[str, int]]:
    """(operation, elements of what a rank gave; of a gather of what all gave) of one step's exchanges on rank 0."""
    first, second = (line["collectives"] for line in curve.traffic[0])
    assert first == second
    return Counter(
        (call["operation"], call["input_elements"] * (call["ranks"] if call["operation"] == "all_gather" else 1))
        for call in first
    )


def test_what_two_ranks_that_share_a_model_send(two: dict[str, Curve]) -> None:
    """By hand, of 36 images of 10 tokens, 48 wide, through 2 blocks, with 10 classes.

    Tensors (Megatron-LM, section 3): an all-reduce of all activations after attention and after the MLP, in forward and
    in backward. With shared norms an all-gather and a reduce-scatter instead of each, which gloo carries out as an
    all-reduce; one gather more at each end, and the gradients of five norms. Tokens (DeepSpeed Ulysses, section 3.2):
    each rank's queries, keys and values in one exchange, and what attention makes of them in another.
    """
    images, tokens, width, blocks, classes = 36, 10, 48, 2, 10
    activations, row = images * tokens * width, images * width
    ends = {("all_gather", images * classes): 1, ("all_reduce", row): 1, ("all_reduce", 1): 1}
    of_norms = {("all_reduce", width): 2 * (2 * blocks + 1)}
    assert sent(two["fsdp2 tensor=2 adamw-clipped"]) == {("all_reduce", activations): 4 * blocks} | ends
    assert sent(two["fsdp2 tensor=2 shard_norms=1 adamw-clipped"]) == (
        {("all_reduce", activations): 4 * blocks, ("all_gather", activations): 4 * blocks + 2} | ends | of_norms
    )
    half = activations // 2
    tokens_sent = {("all_to_all", 3 * half): 2 * blocks, ("all_to_all", half): 2 * blocks}
    # The class token goes from the first rank to both, and its gradient comes back.
    class_token = {("all_to_all", 2 * row): 1, ("all_to_all", row): 1}
    whole = {("all_reduce", parameters(MANY_HEADS)): 1}
    assert sent(two["ddp sequence=2 adamw-clipped"]) == tokens_sent | class_token | whole


def test_a_norm_of_the_own_shards_alone_would_be_seen(two: dict[str, Curve], alone: dict[str, Curve]) -> None:
    """Clipping by what one rank holds trains something else."""
    for wrong, reference in (("local norm", "none"), ("stage norm", "pipeline none")):
        apart = largest_difference(two[wrong].losses, alone[f"{reference} sgd-clipped-3"].losses)
        assert apart > 100 * EQUAL, wrong


def test_what_stages_send(two: dict[str, Curve]) -> None:
    """By hand: the activations of six micro-batches of 6 images, 10 tokens and 48 wide, and as many gradients back; of
    them rank 0 sends the former and rank 1 the latter. Interleaved, all of it thrice; and each stage its parameters."""
    for name, boundaries in (("ddp pipeline=2", 1), ("fsdp2 pipeline=2 schedule=interleaved", 3)):
        activations = ("float32", 6 * 10 * 48)
        for rank, lines in enumerate(two[f"{name} adamw-clipped"].traffic):
            first, second = (line["collectives"] for line in lines)
            assert first == second
            sent = Counter((c["dtype"], c["input_elements"]) for c in first if c["operation"] == "send")
            received = Counter((c["dtype"], c["output_elements"]) for c in first if c["operation"] == "recv")
            # Of three boundaries rank 0 sends forward over two and backward over one, rank 1 the other way round.
            assert sent == received == {activations: 6 * boundaries}, rank
    blocks = [c["input_elements"] for c in two["ddp pipeline=2 adamw-clipped"].traffic[0][0]["collectives"]]
    assert max(blocks) < (parameters(MANY_HEADS.model_copy(update={"layers": BLOCKS})) or 0) * 0.6


def test_stages_of_a_swin_send_maps_of_their_own_sizes(two: dict[str, Curve]) -> None:
    """By hand: of six micro-batches of 6 images, 8 x 8 tokens of 32 between the first two blocks, and behind the
    merging 4 x 4 of 64 over both other boundaries. Either rank sends a map or its gradient over each."""
    first, merged = ("float32", 6 * 8 * 8 * 32), ("float32", 6 * 4 * 4 * 64)
    for lines in two[f"{SWIN_BY_DAY} adamw-clipped"].traffic:
        calls = lines[0]["collectives"]
        sent = Counter((c["dtype"], c["input_elements"]) for c in calls if c["operation"] == "send")
        received = Counter((c["dtype"], c["output_elements"]) for c in calls if c["operation"] == "recv")
        assert sent == received == {first: 6, merged: 12}


def test_maps_for_a_head_go_on_beside_hidden_states(two: dict[str, Curve]) -> None:
    """By hand: three micro-batches of 4 images through four stages of one block each and a last one of UperNet alone;
    behind the first 4 x 4 of 64 and the map of 8 x 8 of 32 that was merged; behind the others 2 x 2 of 128, and both
    maps. A vision transformer hands on 17 tokens of 48 of all 12 images."""
    maps = Counter({("float32", 4 * 8 * 8 * 32): 3, ("float32", 4 * 4 * 4 * 64): 3})
    merged = maps + Counter({("float32", 4 * 2 * 2 * 128): 3})
    swin = "shared-swin:tiny fsdp2 pipeline=2 schedule=interleaved batch_norm=local sgd-clipped-3"
    vit = "shared-vit:tiny ddp pipeline=2 schedule=gpipe adamw-clipped"
    hidden = Counter({("float32", 12 * 17 * 48): 1})
    for name, expected in ((swin, maps + merged + merged), (vit, hidden)):
        for lines in two[name].traffic:
            for operation, side in (("send", "input_elements"), ("recv", "output_elements")):
                calls = [call for call in lines[0]["collectives"] if call["operation"] == operation]
                assert Counter((call["dtype"], call[side]) for call in calls) == expected


def test_rows_of_a_swin_send_what_attention_needs(two: dict[str, Curve]) -> None:
    """By hand, of 36 images: rank 0 has 6 of 10 rows of 10 tokens, 32 wide, and 3 of 5 of 5, 64 wide; in attention half
    of the heads of all of them. Two blocks of each; at the end what each rank's tokens have in the mean."""
    wide, narrow = (Counter(_around_attention(36 * width, own, tokens)) for own, tokens, width in SWINS_ROWS)
    ends = Counter({("all_to_all", 2 * 36 * 64): 2, ("all_reduce", parameters(SHAPES["swinv2-odd:tiny"])): 1})
    assert sent(two[f"{ROWS_BY_DAY} adamw-clipped"]) == wide + narrow + ends


SWINS_ROWS = ((60, 100, 32), (15, 25, 64))


def _around_attention(row: int, own: int, tokens: int) -> dict[tuple[str, int], int]:
    """Of two blocks on two ranks: tokens to heads and back, and their gradients."""
    of_tokens, of_heads = row * own, row * tokens // 2
    return {("all_to_all", size): 2 for part in (of_tokens, of_heads) for size in (3 * part, part)}


def test_what_ranks_that_label_pixels_together_send(two: dict[str, Curve]) -> None:
    """By hand, of 12 images of 17 tokens, 48 wide, through 2 blocks, with 12 norms of 8 channels and one of 4.

    Of tokens rank 0 has 9 before attention and its half of the heads of all of them inside. Behind the last norm it
    gives the tokens of 12 images for all tokens of 6. Tensor ranks exchange as they do for classes, without logits.
    """
    images, tokens, own, width, blocks = 12, 17, 9, 48, 2
    of_tokens, of_heads = images * own * width, images * tokens * width // 2
    norms = Counter({("all_reduce", size): 12 for size in (2 * 8 + 1, 2 * 8)})
    norms += Counter({("all_reduce", size): 1 for size in (2 * 4 + 1, 2 * 4)})
    pixels = clipped = Counter({("all_reduce", 1): 1})
    assert sent(two["shared-vit:tiny ddp sequence=2 adamw-clipped"]) == norms + pixels + Counter(
        {
            ("all_to_all", 3 * of_tokens): blocks, ("all_to_all", 3 * of_heads): blocks,
            ("all_to_all", of_tokens): blocks + 1, ("all_to_all", of_heads): blocks + 1,
            ("all_reduce", parameters(SEGMENTERS["shared-vit"])): 1,
        }
    )  # fmt: skip
    padded = images * (tokens + 1) * width  # to equal shards
    by_tensors = sent(two["shared-vit:tiny fsdp2 tensor=2 shard_norms=1 adamw-clipped"])
    assert by_tensors == norms + pixels + clipped + Counter(
        {
            ("all_reduce", padded): 4 * blocks, ("all_gather", padded): 4 * blocks + 2,
            ("all_reduce", width): 2 * (2 * blocks + 1),
        }
    )  # fmt: skip
    trial = trial_of(job_of("shared-vit:tiny ddp sequence=2", "adamw-clipped"), 2)
    assert {message.group for message in norm_messages(trial) or ()} == {"replicas"}
    assert sum(message.calls for message in norm_messages(trial) or ()) == norms.total()
    local = trial.model_copy(update={"train": trial.train.model_copy(update={"batch_norm": "local"})})
    assert {message.group for message in norm_messages(local) or ()} == {"sequence"}
    assert sum(one.tensor_bytes * one.calls for one in norm_messages(local) or ()) == 8 * sum(
        size * calls for (_, size), calls in norms.items()
    )


def test_what_is_predicted_to_be_sent_is_sent(two: dict[str, Curve], four: dict[str, Curve]) -> None:
    """Bytes and calls of a step by operation, of the rank that sends most, but for norms and the like (`SMALL`); gloo
    carries out DTensor's reduce-scatter as an all-reduce, which is what is counted."""
    compared = 0
    for ranks, curves in ((2, two), (4, four)):
        for name, curve in curves.items():
            if not any(curve.traffic):
                continue
            split, _, origin = name.partition(" from ")
            split, setting = (split, "adamw-clipped") if origin else split.rsplit(" ", 1)
            trial = trial_of(job_of(split, setting) | ({"layers": BLOCKS} if "pipeline" in origin else {}), ranks)
            is_sent_as_planned(name, curve, trial)
            compared += 1
    assert compared == 28


def is_sent_as_planned(name: str, curve: Curve, trial: Trial) -> None:
    """Of the rank that sends most; evaluation leaves FSDP2's root gathered, so that the last step is a usual one."""
    planned, of_ranks = planned_of(trial), [counted_of(lines[-1]) for lines in curve.traffic]
    assert planned in of_ranks, (name, planned, of_ranks)


def planned_of(trial: Trial) -> Counter[str]:
    """Bytes and calls of a step's large messages by operation, as they are predicted."""
    planned: Counter[str] = Counter()
    for message in messages(trial) or ():
        if message.tensor_bytes >= 4 * SMALL and (message.group != "replicas" or trial.layout.replicas > 1):
            kind = "all_reduce" if message.operation == "reduce_scatter" else message.operation
            planned[kind] += round(message.tensor_bytes * message.times(trial.train.grad_accum))
            planned[f"{kind}, calls"] += round(message.times(trial.train.grad_accum))
    return planned


def trial_of(job: Job, ranks: int) -> Trial:
    """As `curve_ranks` makes it."""
    parallel = ParallelSpec.model_validate(job.get("parallel", {}))
    parts = ranks // parallel.ranks_per_model * job["train"].get("grad_accum", 1)
    batch = SEGMENTED_BATCH if "segments" in job else GLOBAL_BATCH
    fields = {"precision": "fp32", "device": "cpu", "micro_batch": batch // parts} | job["train"]
    own = MANY_HEADS.model_copy(update={"layers": job.get("layers", MANY_HEADS.layers)})
    model = SHAPES[job["factory"]] if "factory" in job else SEGMENTERS[job["segments"]] if "segments" in job else own
    return Trial(
        model=model,
        data=DataSpec(name="synthetic"),
        train=TrainSpec.model_validate(fields),
        world=World(ranks_per_node=ranks, threads_per_rank=1),
        window=WindowSpec(),
        launcher="torchrun",
        parallel=parallel,
    )


SMALL = 100
"""Elements of fp32: fewer are a norm, or what stages agree on."""


def counted_of(line: dict[str, Any]) -> Counter[str]:
    """As `planned_of` has it, of a counted step."""
    counted: Counter[str] = Counter()
    for call in line["collectives"]:
        kind = "all_reduce" if call["operation"] == "reduce_scatter" else call["operation"]
        whole = call["ranks"] if kind == "all_gather" else 1
        elements = max(whole * call["input_elements"], call["output_elements"])
        size = {"float32": 4, "bfloat16": 2, "float64": 8, "int64": 8}[call["dtype"]] * elements
        if kind != "recv" and call["ranks"] > 1 and size >= 4 * SMALL:
            counted[kind] += size
            counted[f"{kind}, calls"] += 1
    return counted


def test_every_split_of_up_to_eight_ranks_is_trained_by_day_or_at_night() -> None:
    """Of the vision transformer, over 1 to 4 ranks along each axis, with one and with two models."""
    known: set[tuple[int, ...]] = set()
    for table in (BY_DAY, PIPELINED, AT_NIGHT):
        for ranks, names in table.items():
            of_vit = [name for name in names if ":tiny" not in name or name.startswith("vit")]
            trials = [trial_of(job_of(name, "adamw-clipped"), ranks) for name in of_vit]
            known |= {(one.layout.tensor, one.layout.sequence, one.layout.pipeline, one.layout.data) for one in trials}
    splits = product(range(1, 5), range(1, 5), range(1, 5), (1, 2))
    assert known >= {split for split in splits if math.prod(split) <= 8 and math.prod(split[:3]) > 1}


def in_each_setting(names: Sequence[str], ranks: int) -> list[Job]:
    """What is trained at night. Pixels are not labelled in three micro-steps by several data-parallel ranks, for batch
    norms see a micro-step, and each number of these ranks cuts a short last step into its own; nor in one by stages
    that take turns."""
    jobs = [job_of(name, setting, STEPS_AT_NIGHT) for name in names for setting in SETTINGS]
    labelling = [job for job in jobs if "segments" in job]
    accumulated = [job for job in labelling if job["train"].get("grad_accum", 1) > 1]
    several = [job for job in accumulated if trial_of(job, ranks).layout.data > 1]
    at_once = [job for job in labelling if job not in accumulated and "pipeline" in job["name"]]
    in_turns = [job for job in at_once if "gpipe" not in job["name"]]
    return [job for job in jobs if job not in several and job not in in_turns]


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", AT_NIGHT)
def test_every_split(tmp_path: Path, ranks: int) -> None:
    names = (*dict.fromkeys(AT_NIGHT[ranks] + BY_DAY.get(ranks, ())), *(OWN_AT_NIGHT if ranks == 2 else ()))
    jobs = in_each_setting(names, ranks)
    alone = in_one_piece(tmp_path / "1", STEPS_AT_NIGHT, prepared_here())
    check(tmp_path / "many", train(jobs, ranks, tmp_path / "many", prepared_here()), alone)
