"""Real ranks: what every engine sends in an optimizer step, in exact numbers. All engines share one pair of ranks."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from engines.many_engines import MODEL, MODELS, trial_of
from forks import prepared_here
from results_factory import make_rank, make_run
from vitscale.analysis.runs.figures import run_figures
from vitscale.analysis.time.traffic import Traffic, traffic
from vitscale.prediction.step.messages import messages
from vitscale.store.records import RankRecord, TrafficLine
from vitscale.trial.model_cost import parameters

pytestmark = [pytest.mark.long(4), pytest.mark.ranks]

SCRIPT = Path(__file__).with_name("many_engines.py")

BLOCK = 4 * (192 * 192 + 192) + (192 * 768 + 768) + (768 * 192 + 192) + 2 * 2 * 192
PATCHES = 3 * 16 * 16 * 192
TOKENS = 192 + 5 * 192
"""The class token and the positions; as tensors both are 1 long, which FSDP2 makes 2 to share among two ranks."""
NORMS = (2 * 2 + 1) * 2 * 192
PSI = 2 * BLOCK + PATCHES + 192 + TOKENS + 2 * 192 + 10 * 192 + 10
BIG = 2 * 2 * 192 * 768 + PATCHES
"""In tensors of more than 1e5 elements, which ZeRO-3 does not keep on every rank."""
FLOAT = NORMS + TOKENS
"""What autocast leaves in fp32."""
ALIGNED = PSI + 2
"""ZeRO-1 and 2 lay the weights out in two groups, with and without decay, each a multiple of 4 long at two ranks."""

Case = dict[str, Any]
Kinds = dict[str, tuple[int, int]]
"""Operation and dtype to calls and elements."""


def zero(stage: int, **fields: Any) -> Case:
    return {"engine": "deepspeed", "zero_stage": stage, **fields}


def fsdp2(**fields: Any) -> Case:
    return {"engine": "fsdp2", **fields}


def through_accelerate(backend: str, **fields: Any) -> Case:
    return {"engine": "accelerate", "accelerate_backend": backend, **fields}


NOTHING_KEPT = {
    "zero_optimization": {
        "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0,
    }
}  # fmt: skip
TO_OWNERS = {"zero_optimization": {"use_multi_rank_bucket_allreduce": False}}
BF16: Case = {"precision": "bf16"}
PURE: Case = {"precision": "bf16-params"}
MASTERED: Case = PURE | {"master_weights": True}
ASKED: Case = {"gradient_dtype": "bf16"}

DDP: Kinds = {"all_reduce float32": (2, PSI)}
FSDP2_GATHERED = 2 * 2 * BLOCK + (PSI - 2 * BLOCK) + TOKENS
NORM_AND_OVERFLOW = 2
"""Two all-reduces of one element in a step of ZeRO."""


def stage(width: int, heads: int, merges: bool) -> int:
    """A stage of one block of Swin V2, and what merges its tokens."""
    block = 12 * width**2 + 12 * width + (512 + 1) * heads + 3 * 512
    return block + merges * (8 * width**2 + 4 * width)


STAGES = stage(48, 3, True) + stage(96, 6, True) + stage(192, 12, False)
BODY = STAGES + 3 * 2 * 2 * 48 + 3 * 48
SWIN = BODY + 2 * 192 + 10 * 192 + 10
UPERNET = BODY + (
    (48 + 96) * 32 + 4 * 192 * 32 + (192 + 4 * 32) * 32 * 9 + 2 * 32 * 32 * 9 + 3 * 32 * 32 * 9 + 10 * 32 + 10
    + 10 * 2 * 32 + 192 * 16 * 9 + 2 * 16 + 10 * 16 + 10
)  # fmt: skip
"""Two laterals, four pooled, bottleneck, two behind, one that joins, classifier; ten norms; the auxiliary head."""
THREE_HEADS = 512 + 1
"""Of the first stage's biases and scales, which are 3 long: as much again fills them up to 4 at two ranks."""
LARGE = 2 * 4 * 192**2
"""The last stage's MLP; all others have fewer than 1e5 elements."""
FLOAT_OF_SWIN = 2 * (48 + 2 * (48 + 96 + 192) + 96 + 192 + 192) + 3 + 6 + 12
"""Norms of patches, blocks, merging and the last one, and scales: what autocast leaves in fp32."""

TWO_RANKS: list[tuple[Case, Kinds]] = [
    # DDP: 2 Psi once in an optimizer step, in fp32 under autocast too.
    ({"engine": "ddp"}, DDP),
    ({"engine": "ddp", "grad_accum": 3}, DDP),
    ({"engine": "ddp"} | BF16, DDP),
    ({"engine": "ddp"} | PURE, {"all_reduce bfloat16": (2, PSI)}),
    # What it is already need not be asked of a hook, which gloo would refuse.
    ({"engine": "ddp"} | PURE | ASKED, {"all_reduce bfloat16": (2, PSI)}),
    ({"engine": "ddp", "bucket_mib": 1}, {"all_reduce float32": (4, PSI)}),
    ({"engine": "ddp", "static_graph": True, "gradient_as_bucket_view": True}, DDP),
    ({"engine": "ddp", "activation_checkpointing": True}, DDP),
    ({"engine": "ddp", "gradient_clipping": 1.0}, DDP),
    # ZeRO-0: 2 Psi once, after backward, whatever its buckets are to be.
    (zero(0), {"all_reduce float32": (1, PSI)}),
    (zero(0, grad_accum=3), {"all_reduce float32": (1, PSI)}),
    (zero(0) | BF16, {"all_reduce float32": (1, PSI)}),
    (zero(0) | PURE, {"all_reduce bfloat16": (1, PSI)}),
    (zero(0) | ASKED, {"all_reduce bfloat16": (1, PSI)}),
    (zero(0, bucket_mib=1), {"all_reduce float32": (1, PSI)}),
    (zero(0, gradient_clipping=1.0), {"all_reduce float32": (2, PSI + 1)}),
    # ZeRO-1: 3 Psi, an all-reduce and an all-gather.
    (zero(1), {"all_reduce float32": (3, PSI + NORM_AND_OVERFLOW), "all_gather float32": (2, ALIGNED)}),
    (zero(1, grad_accum=3), {"all_reduce float32": (3, PSI + NORM_AND_OVERFLOW), "all_gather float32": (2, ALIGNED)}),
    (
        zero(1) | BF16,
        {
            "all_reduce bfloat16": (1, PSI - FLOAT),
            "all_reduce float32": (3, FLOAT + NORM_AND_OVERFLOW),
            "all_gather float32": (2, ALIGNED),
        },
    ),
    (
        zero(1) | PURE,
        {
            "all_reduce bfloat16": (1, PSI),
            "all_reduce float32": (2, 2),
            "all_reduce uint8": (1, 1),
            "all_gather bfloat16": (2, ALIGNED),
        },
    ),
    (
        zero(1) | ASKED,
        {
            "all_reduce bfloat16": (1, PSI),
            "all_reduce float32": (2, NORM_AND_OVERFLOW),
            "all_gather float32": (2, ALIGNED),
        },
    ),
    # Under autocast it does not ask what gradients are to travel in.
    (
        zero(1, gradient_dtype="fp32") | BF16,
        {
            "all_reduce bfloat16": (1, PSI - FLOAT),
            "all_reduce float32": (3, FLOAT + NORM_AND_OVERFLOW),
            "all_gather float32": (2, ALIGNED),
        },
    ),
    (zero(1, bucket_mib=1), {"all_reduce float32": (7, PSI + NORM_AND_OVERFLOW), "all_gather float32": (2, ALIGNED)}),
    # ZeRO-2: (2 A + 1) Psi, for it reduces in every micro-step.
    (zero(2), {"all_reduce float32": (3, PSI + NORM_AND_OVERFLOW), "all_gather float32": (2, ALIGNED)}),
    (
        zero(2, grad_accum=3),
        {"all_reduce float32": (5, 3 * PSI + NORM_AND_OVERFLOW), "all_gather float32": (2, ALIGNED)},
    ),
    (
        zero(2) | BF16,
        {
            "all_reduce bfloat16": (1, PSI - FLOAT),
            "all_reduce float32": (3, FLOAT + NORM_AND_OVERFLOW),
            "all_gather float32": (2, ALIGNED),
        },
    ),
    (
        zero(2) | ASKED,
        {
            "all_reduce bfloat16": (1, PSI),
            "all_reduce float32": (2, NORM_AND_OVERFLOW),
            "all_gather float32": (2, ALIGNED),
        },
    ),
    (
        zero(2, offload="optimizer"),
        {"all_reduce float32": (3, PSI + NORM_AND_OVERFLOW), "all_gather float32": (2, ALIGNED)},
    ),
    (
        zero(2, overlap_comm=True),
        {"all_reduce float32": (3, PSI + NORM_AND_OVERFLOW), "all_gather float32": (2, ALIGNED)},
    ),
    # As its paper has it: to each weight's owner alone.
    (
        zero(2, deepspeed_config=TO_OWNERS),
        {"reduce float32": (2, PSI), "all_reduce float32": (2, 2), "all_gather float32": (2, ALIGNED)},
    ),
    # ZeRO-3 gathers what it has let go, but keeps small weights for the step and all weights for backward.
    (
        zero(3),
        {"all_gather float32": (36, PSI), "reduce_scatter float32": (1, PSI), "all_reduce float64": (2, 2)},
    ),
    (
        zero(3, grad_accum=3),
        {
            "all_gather float32": (38, PSI - BIG + 3 * BIG),
            "reduce_scatter float32": (3, 3 * PSI),
            "all_reduce float64": (2, 2),
        },
    ),
    (
        zero(3) | BF16,
        {
            "all_gather bfloat16": (1, BIG),
            "all_gather float32": (35, PSI - BIG),
            "reduce_scatter bfloat16": (1, PSI - FLOAT),
            "reduce_scatter float32": (1, FLOAT),
            "all_reduce float64": (2, 2),
        },
    ),
    (
        zero(3) | PURE,
        {"all_gather bfloat16": (36, PSI), "reduce_scatter bfloat16": (1, PSI), "all_reduce float64": (2, 2)},
    ),
    (
        zero(3) | ASKED,
        {"all_gather float32": (36, PSI), "reduce_scatter bfloat16": (1, PSI), "all_reduce float64": (2, 2)},
    ),
    (
        zero(3, bucket_mib=1),
        {"all_gather float32": (36, PSI), "reduce_scatter float32": (5, PSI), "all_reduce float64": (2, 2)},
    ),
    (
        zero(3, deepspeed_config=NOTHING_KEPT),
        {"all_gather float32": (40, 2 * PSI), "reduce_scatter float32": (1, PSI), "all_reduce float64": (2, 2)},
    ),
    # FSDP2: each block twice and the root once, in every micro-step; scattered in every micro-step.
    (fsdp2(), {"all_gather float32": (5, FSDP2_GATHERED), "reduce_scatter float32": (3, PSI + TOKENS)}),
    (
        fsdp2(grad_accum=3),
        {"all_gather float32": (15, 3 * FSDP2_GATHERED), "reduce_scatter float32": (9, 3 * (PSI + TOKENS))},
    ),
    (fsdp2() | BF16, {"all_gather float32": (5, FSDP2_GATHERED), "reduce_scatter float32": (3, PSI + TOKENS)}),
    (fsdp2() | PURE, {"all_gather bfloat16": (5, FSDP2_GATHERED), "reduce_scatter bfloat16": (3, PSI + TOKENS)}),
    # Of fp32 shards it gathers and scatters half the bytes; gradients may travel in fp32 all the same.
    (fsdp2(**MASTERED), {"all_gather bfloat16": (5, FSDP2_GATHERED), "reduce_scatter bfloat16": (3, PSI + TOKENS)}),
    (
        fsdp2(**MASTERED, gradient_dtype="fp32"),
        {"all_gather bfloat16": (5, FSDP2_GATHERED), "reduce_scatter float32": (3, PSI + TOKENS)},
    ),
    (fsdp2() | ASKED, {"all_gather float32": (5, FSDP2_GATHERED), "reduce_scatter bfloat16": (3, PSI + TOKENS)}),
    (
        fsdp2(reshard_after_forward=False),
        {"all_gather float32": (3, PSI + TOKENS), "reduce_scatter float32": (3, PSI + TOKENS)},
    ),
    (
        fsdp2(activation_checkpointing=True),
        {"all_gather float32": (5, FSDP2_GATHERED), "reduce_scatter float32": (3, PSI + TOKENS)},
    ),
    # Blocks that are not alike: FSDP2 gathers Swin's stages, and of UperNet everything else at once.
    (
        fsdp2(model="swin"),
        {
            "all_gather float32": (7, SWIN + STAGES + 2 * THREE_HEADS),
            "reduce_scatter float32": (4, SWIN + THREE_HEADS),
        },
    ),
    (
        fsdp2(model="upernet", grad_accum=2),
        {
            "all_gather float32": (14, 2 * (UPERNET + STAGES + 2 * THREE_HEADS)),
            "reduce_scatter float32": (8, 2 * (UPERNET + THREE_HEADS)),
        },
    ),
    ({"model": "upernet", "engine": "ddp"}, {"all_reduce float32": (2, UPERNET)}),
    # Buckets of 1 MiB are full where the order of backward fills them, which is not that of registration.
    (
        zero(2, model="upernet", grad_accum=2, bucket_mib=1),
        {"all_reduce float32": (12, 2 * UPERNET + NORM_AND_OVERFLOW), "all_gather float32": (2, UPERNET + 3)},
    ),
    # ZeRO-3 pads each tensor by itself: a scale of 3 to 4.
    (
        zero(3, model="upernet", grad_accum=2),
        {
            "all_gather float32": (104, UPERNET + 1 + LARGE),
            "reduce_scatter float32": (2, 2 * (UPERNET + 1)),
            "all_reduce float64": (2, 2),
        },
    ),
    (
        zero(3, model="swin") | BF16,
        {
            "all_gather bfloat16": (1, LARGE),
            "all_gather float32": (69, SWIN + 1 - LARGE),
            "reduce_scatter bfloat16": (1, SWIN - FLOAT_OF_SWIN),
            "reduce_scatter float32": (1, FLOAT_OF_SWIN + 1),
            "all_reduce float64": (2, 2),
        },
    ),
    # Accelerate sends what it wraps sends.
    (through_accelerate("ddp", grad_accum=3), DDP),
    (
        through_accelerate("deepspeed", zero_stage=2, grad_accum=3),
        {"all_reduce float32": (5, 3 * PSI + NORM_AND_OVERFLOW), "all_gather float32": (2, ALIGNED)},
    ),
]
AT_NIGHT: list[Case] = [
    *({"engine": "ddp"} | fields for fields in (BF16, PURE | ASKED, {"activation_checkpointing": True})),
    {"engine": "ddp", "static_graph": True, "gradient_as_bucket_view": True},
    {"engine": "ddp", "gradient_clipping": 1.0},
    zero(0) | BF16, zero(0) | ASKED, zero(0, bucket_mib=1),
    zero(1, grad_accum=3), zero(1) | ASKED, zero(1, gradient_dtype="fp32") | BF16, zero(1, bucket_mib=1),
    zero(2), zero(2) | ASKED, zero(2, offload="optimizer"),
    zero(3) | BF16, zero(3, bucket_mib=1),
    fsdp2() | BF16, fsdp2() | PURE, fsdp2() | ASKED, fsdp2(activation_checkpointing=True),
    fsdp2(model="swin"), {"model": "upernet", "engine": "ddp"}, zero(3, model="swin") | BF16,
]  # fmt: skip
"""What by day is trained with other engines, or by the same with the other fields alone."""
ONE_RANK: list[tuple[Case, Kinds]] = [
    ({"engine": "ddp"}, DDP),
    (zero(0), {"all_reduce float32": (1, PSI)}),
    (zero(1), {"all_reduce float32": (3, PSI + NORM_AND_OVERFLOW)}),
    (zero(2), {"all_reduce float32": (3, PSI + NORM_AND_OVERFLOW)}),
    (zero(3), {"reduce_scatter float32": (1, PSI), "all_reduce float64": (2, 2)}),
    (fsdp2(), {}),
]


def launch(cases: Sequence[Case], ranks: int, folder: Path, timeout: float = 300.0) -> list[tuple[Traffic, str | None]]:
    """What each case sends, by the analysis of what the ranks recorded; and the dtype its engine names."""
    (folder / "cases.json").write_text(json.dumps(cases))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    cores = sorted(os.sched_getaffinity(0))
    forks = [
        prepared_here().start(
            SCRIPT,
            folder,
            log=folder / f"log-{rank}.txt",
            environment={
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "WORLD_SIZE": ranks,
                "RANK": rank,
                "OMP_NUM_THREADS": 1,  # unset, Accelerate gives each rank a thread for every core
                "TORCH_FR_BUFFER_SIZE": 1000,  # each engine reads the whole ring
            },
            core=cores[rank % len(cores)],
        )
        for rank in range(ranks)
    ]
    codes = [fork.wait(timeout) for fork in forks]
    assert codes == [0] * ranks, "\n".join((folder / f"log-{rank}.txt").read_text()[-2000:] for rank in range(ranks))
    return counted_in(folder, cases, ranks)


def counted_in(folder: Path, cases: Sequence[Case], ranks: int) -> list[tuple[Traffic, str | None]]:
    """What `launch` counted there; empty where that came to no end."""
    paths = [folder / f"rank-{rank}.json" for rank in range(ranks)]
    if not all(path.exists() for path in paths):
        return []
    by_rank = [json.loads(path.read_text()) for path in paths]
    return [_analysed(case, list(found)) for case, found in zip(cases, zip(*by_rank, strict=True), strict=True)]


def _analysed(case: Case, found: Sequence[dict[str, Any]]) -> tuple[Traffic, str | None]:
    errors = [one["error"] for one in found if "error" in one]
    assert not errors, errors[0]
    trial = trial_of(case, len(found))
    ranks: list[RankRecord] = []
    for rank, one in enumerate(found):
        lines = tuple(TrafficLine.model_validate(line) for line in one["lines"])
        ranks.append(make_rank(trial, rank, [0.1]).model_copy(update={"traffic": lines}))
    run = make_run(trial, ranks)
    told = traffic([run], [run_figures(run)])
    assert told is not None
    return told, found[0]["gradient_dtype"]


class Counted:
    """What two ranks sent, by case; by day without `AT_NIGHT`."""

    def __init__(self, cases: Sequence[Case], folder: Path) -> None:
        self._cases, self._told = cases, launch(cases, 2, folder)

    def __getitem__(self, case: Case) -> tuple[Traffic, str | None]:
        return self._told[self._cases.index(case)]


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Counted:
    by_night = "nightly" in request.config.option.markexpr
    cases = [case for case, _ in TWO_RANKS if by_night or case not in AT_NIGHT]
    return Counted(cases, tmp_path_factory.mktemp("two"))


def some_at_night(case: Case, *others: object, id: str | None = None) -> ParameterSet:
    """The parameters of a test of one case."""
    return pytest.param(case, *others, id=id, marks=[pytest.mark.nightly] if case in AT_NIGHT else [])


def kinds(told: Traffic) -> Kinds:
    assert told.calls is not None, told.reason
    return {f"{one.operation} {one.dtype}": (one.calls, one.elements) for one in told.sent}


def named(case: Case) -> str:
    return " ".join(str(value) for value in case.values())


def test_psi_is_the_number_of_parameters() -> None:
    assert parameters(MODEL) == PSI
    assert [parameters(MODELS[name]) for name in ("swin", "upernet")] == [SWIN, UPERNET]


@pytest.mark.parametrize(("case", "expected"), [some_at_night(*row, id=named(row[0])) for row in TWO_RANKS])
def test_what_two_ranks_send(case: Case, expected: Kinds, two_ranks: Counted) -> None:
    told, _ = two_ranks[case]
    assert kinds(told) == expected
    assert {one.ranks for one in told.sent} == {2}


OTHERS: list[Case] = [
    {"engine": "ddp"}, {"engine": "ddp", "bucket_mib": 1}, {"engine": "ddp"} | BF16, zero(0), zero(1), zero(1) | BF16,
    zero(2), zero(2, grad_accum=2, bucket_mib=1), zero(3), zero(3, bucket_mib=1),
    zero(3, deepspeed_config=NOTHING_KEPT),
    zero(3) | BF16, fsdp2(), fsdp2(grad_accum=2), fsdp2(reshard_after_forward=False), fsdp2() | PURE,
    through_accelerate("ddp"), through_accelerate("deepspeed", zero_stage=2),
]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_models_of_unlike_blocks_send_is_what_arithmetic_says(tmp_path: Path, ranks: int) -> None:
    """Calls and bytes of each operation; on one rank FSDP2 and the gathers of ZeRO call nothing."""
    cases = [case | {"model": model} for model in ("swin", "upernet", "pyramid") for case in OTHERS]
    for case, (told, _) in zip(cases, launch(cases, ranks, tmp_path), strict=True):
        assert not unlike_arithmetic(case, told, ranks), case


def unlike_arithmetic(case: Case, told: Traffic, ranks: int) -> dict[str, tuple[int, int]]:
    """Operations whose calls or bytes are others than planned: counted, planned; on one rank of those called."""
    counted: Counter[str] = Counter()
    planned: Counter[str] = Counter()
    for one in told.sent:
        counted[one.operation] += one.tensor_bytes or 0
        counted[f"calls of {one.operation}"] += one.calls
    for message in messages(trial_of(case, ranks)) or ():
        times = message.times(case.get("grad_accum", 1))
        planned[message.operation] += round(times * message.tensor_bytes)
        planned[f"calls of {message.operation}"] += round(times)
    return {
        kind: (counted[kind], planned[kind])
        for kind in planned.keys() | counted.keys()
        if (ranks > 1 or counted[kind]) and abs(counted[kind] - planned[kind]) > 3
    }


def test_what_one_rank_alone_still_calls(tmp_path: Path) -> None:
    """All of it asked for, none of it on a wire."""
    found = launch([case for case, _ in ONE_RANK], 1, tmp_path)
    assert [kinds(told) for told, _ in found] == [expected for _, expected in ONE_RANK]
    assert [told.physical_bytes for told, _ in found] == [0.0] * len(ONE_RANK)


@pytest.mark.parametrize(
    ("case", "engine_names", "travels"),
    [
        some_at_night({"engine": "ddp"} | BF16, "float32", "float32"),
        some_at_night({"engine": "ddp"} | PURE, "bfloat16", "bfloat16"),
        some_at_night(zero(0) | ASKED, "bfloat16", "bfloat16"),
        some_at_night(zero(1) | ASKED, "bfloat16", "bfloat16"),
        some_at_night(zero(3) | ASKED, "bfloat16", "bfloat16"),
        some_at_night(zero(1) | BF16, "bfloat16", "bfloat16"),
        some_at_night(zero(1, gradient_dtype="fp32") | BF16, "bfloat16", "bfloat16"),
        some_at_night(zero(3) | BF16, "bfloat16", "bfloat16"),
        some_at_night(fsdp2() | ASKED, "bfloat16", "bfloat16"),
        some_at_night(fsdp2(**MASTERED), "bfloat16", "bfloat16"),
        some_at_night(fsdp2(**MASTERED, gradient_dtype="fp32"), "float32", "float32"),
    ],
)
def test_the_dtype_in_which_gradients_travel_is_the_one_that_the_engine_names(
    case: Case, engine_names: str, travels: str, two_ranks: Counted
) -> None:
    told, name = two_ranks[case]
    assert (name, told.gradient_dtype) == (engine_names, travels)


def test_bytes_asked_for_and_on_the_wire(two_ranks: Counted) -> None:
    """At two ranks half of the volume is on the wire; but gloo sends a reduce-scatter as an all-reduce."""
    ddp, kept_out, whole = (two_ranks[case][0] for case in ({"engine": "ddp"}, fsdp2(), zero(3)))
    assert (ddp.logical_bytes, ddp.physical_bytes) == (8 * PSI, 4 * PSI)
    assert kept_out.logical_bytes == 4 * (FSDP2_GATHERED + PSI + TOKENS)
    halved = two_ranks[fsdp2(**MASTERED)][0]
    assert halved.logical_bytes == 2 * (FSDP2_GATHERED + PSI + TOKENS)
    assert kept_out.physical_bytes == 2 * (FSDP2_GATHERED + 2 * (PSI + TOKENS))
    assert whole.logical_bytes == 4 * 2 * PSI + 8 * 2 * 2
    assert whole.physical_bytes == 2 * 3 * PSI + 8 * 2
