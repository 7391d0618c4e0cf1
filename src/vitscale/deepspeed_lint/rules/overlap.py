"""Overlap: whether gradients are sent while backward still computes, and how often they are sent.

Without overlap the whole time of a transfer adds to the step. DeepSpeed collects gradients in buckets of
`reduce_bucket_size` elements. At stages 1 to 3 `overlap_comm` has each bucket sent as soon as it is full, while
backward goes on. How well that works depends on the release (`behaviours`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vitscale.deepspeed_lint.advice import REMOVED, FileChanges, FileFinding, Remedy
from vitscale.deepspeed_lint.behaviours import OVERLAP_OVERWRITES, OVERLAP_WAITS, STAGE_1_IGNORES_OVERLAP
from vitscale.deepspeed_lint.rules.optimizer import compresses
from vitscale.deepspeed_lint.view import ConfigurationView, finding

DEFAULT_BUCKET_ELEMENTS = 5e8
"""Default of `reduce_bucket_size` and `allgather_bucket_size`, in elements: deepspeed/runtime/zero/config.py, 0.9.5 to
0.19.8."""

_OVERLAP_KEY = "zero_optimization.overlap_comm"
_BUCKET_KEY = "zero_optimization.reduce_bucket_size"


def overlaps(view: ConfigurationView) -> bool | None:
    """Whether DeepSpeed sends gradients while backward goes on: `overlap_comm`, by default on at stage 3 alone.

    Return None where the stage or the switch is left open.
    """
    if view.stage is None or view.leaves_open(_OVERLAP_KEY):
        return None
    if view.stage == 1 and view.release.does(STAGE_1_IGNORES_OVERLAP):
        return False
    return view.flag(_OVERLAP_KEY, default=view.stage == 3)


def sends_by_itself(view: ConfigurationView) -> bool:
    """Whether DeepSpeed takes BF16_Optimizer, which sends gradients itself, in buckets of its own."""
    if view.stage != 1 or view.precision != "bf16" or view.accumulation_type != "fp32":
        return False
    # An optimizer that is offloaded to the CPU is another one; with nvme it is this one too.
    names_cpu = view.text("zero_optimization.offload_optimizer.device") == "cpu"
    offloads_to_cpu = names_cpu or view.is_on("zero_optimization.cpu_offload")
    return not offloads_to_cpu


def bucket_elements(view: ConfigurationView) -> float | None:
    """Return `reduce_bucket_size`, in elements; None where it is open."""
    return None if view.leaves_open(_BUCKET_KEY) else view.number(_BUCKET_KEY, DEFAULT_BUCKET_ELEMENTS)


def good_bucket(parameters: int) -> int:
    """Return a bucket's size in elements: about a tenth of the model, one significant digit, at least a million.

    Example: 8,000,000 for 86,567,656 parameters.
    """
    tenth = max(parameters // 10, 1_000_000)
    unit: int = 10 ** (len(str(tenth)) - 1)
    return tenth // unit * unit


_USUAL_BUCKET_ELEMENTS = 25_000_000
"""A bucket for a model of unknown size, in elements: a tenth of a quarter of a billion parameters."""
_NEWER_RELEASE = (
    "Run DeepSpeed 0.19.0 or later: 0.18.5 took that wait out, and 0.19.0 mended how the buckets' memory is kept"
)


def smaller_bucket(view: ConfigurationView) -> int:
    """Return a bucket that is well below the model's size, in elements."""
    parameters = view.target.parameters
    return _USUAL_BUCKET_ELEMENTS if parameters is None else good_bucket(parameters)


def _changes_to_overlap(view: ConfigurationView) -> FileChanges:
    """Return changes of the file with which stages 1 to 3 send gradients while backward goes on.

    They switch overlap_comm on, and make a larger bucket smaller: gradients are sent whenever a bucket is full.
    """
    changes: dict[str, Any] = {_OVERLAP_KEY: True}
    bucket = bucket_elements(view)
    if bucket is None or bucket > smaller_bucket(view):
        changes[_BUCKET_KEY] = smaller_bucket(view)
    return changes


def nothing_overlaps(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding where gradients are sent only after backward has ended, or while backward waits."""
    stage = view.stage
    if stage is None or view.target.gpus == 1:
        return
    if stage == 0:
        yield from _nothing_overlaps_at_stage_0(view)
    elif sends_by_itself(view):
        yield _bf16_optimizer_overlaps_nothing(view)
    elif stage == 1 and view.release.does(STAGE_1_IGNORES_OVERLAP):
        yield _release_ignores_overlap_at_stage_1(view)
    elif overlaps(view) is False:  # None: the file leaves it open, and there is nothing to report
        yield from _overlap_is_off(view, stage)


def _release_ignores_overlap_at_stage_1(view: ConfigurationView) -> FileFinding:
    """Return the finding on stage 1 in a release that does not read overlap_comm there.

    Its message: "DeepSpeed 0.12.6 ignores overlap_comm at stage 1, as all releases until 0.12.6: gradients ...".
    """
    version = view.release.target_version
    effect = f"DeepSpeed {version} {STAGE_1_IGNORES_OVERLAP.effect}"
    releases = f"as all releases {STAGE_1_IGNORES_OVERLAP.releases()}"
    return finding(
        "no-overlap",
        "warning",
        key=_OVERLAP_KEY,
        message=f"{effect}, {releases}: gradients are sent after backward has ended",
        fix=Remedy("Run DeepSpeed 0.19.0 or later, or take stage 2"),
        source=STAGE_1_IGNORES_OVERLAP.source,
    )


def _clause_on_smaller_bucket(view: ConfigurationView) -> str:
    """Return the clause of an advice that goes with `_changes_to_overlap`."""
    return f"with a reduce_bucket_size well below the model's size, such as {smaller_bucket(view):,}"


def _bf16_optimizer_overlaps_nothing(view: ConfigurationView) -> FileFinding:
    """Return the finding on a file with which DeepSpeed takes BF16_Optimizer (`sends_by_itself`).

    It does so because the file asks for fp32 accumulation. Without that it takes the usual optimizer of stage 1, which
    can overlap.
    """
    key = "data_types.grad_accum_dtype"
    without_accumulation_type = {key: REMOVED}
    usual_optimizer = Remedy(f"Leave {key} out, or take stage 2", without_accumulation_type)
    usual_optimizer_that_overlaps = Remedy(
        f"Leave {key} out and set overlap_comm to true, {_clause_on_smaller_bucket(view)}",
        {**without_accumulation_type, **_changes_to_overlap(view)},
    )
    return finding(
        "no-overlap",
        "warning",
        key=key,
        message="With bf16 and fp32 accumulation at stage 1 DeepSpeed takes BF16_Optimizer, which knows neither "
        "overlap_comm nor reduce_bucket_size: gradients are sent after backward has ended",
        fix=[usual_optimizer, usual_optimizer_that_overlaps],
        source=f"{view.source('runtime/engine.py')} (_do_optimizer_sanity_check, allreduce_gradients)",
    )


def _nothing_overlaps_at_stage_0(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding on stage 0, unless an optimizer sends something else in place of gradients."""
    is_requested = view.is_on(_OVERLAP_KEY)
    if compresses(view) and not is_requested:
        return
    if is_requested:
        subject = "overlap_comm has no effect at stage 0: the"
        key = _OVERLAP_KEY
    else:
        subject = "At stage 0 the"
        key = "zero_optimization.stage" if view.has("zero_optimization") else ""
    changes = {**_changes_to_overlap(view), "zero_optimization.stage": 1}
    text = f"Take stage 1 with overlap_comm true, {_clause_on_smaller_bucket(view)}"
    ddp = "PyTorch's DistributedDataParallel, which overlaps by itself"
    options = [Remedy(f"{text}; or {ddp}", changes)]
    if is_requested:
        options.append(Remedy(f"Remove it, or take {ddp}", {_OVERLAP_KEY: REMOVED}))
    options.append(Remedy(f"Take {ddp}; or stage 1 with what else it needs"))
    yield finding(
        "no-overlap",
        "warning",
        key=key,
        message=f"{subject} gradients are all-reduced after backward has ended, so the whole transfer adds to the step",
        fix=options,
        source=f"{view.source('runtime/engine.py')} (allreduce_gradients, buffered_allreduce_fallback)",
    )


def _overlap_is_off(view: ConfigurationView, stage: int) -> Iterator[FileFinding]:
    """Yield a finding on a file of stage 1, 2 or 3 in which overlap_comm is off."""
    default = "" if view.has(_OVERLAP_KEY) else " by default"
    effect = "gradients are sent after backward has ended" if stage == 1 else "backward waits for each bucket it sends"
    text = f"Set it to true, {_clause_on_smaller_bucket(view)}"
    options = [Remedy(text, _changes_to_overlap(view))]
    if stage < 3 and _overlap_fails(view):
        options = [Remedy(f"{text}, in DeepSpeed 0.19.0 or later: before, overlap_comm does not work well")]
    stage_file = "runtime/zero/stage3.py" if stage == 3 else "runtime/zero/stage_1_and_2.py"
    source = f"{view.source('runtime/zero/config.py')} (overlap_comm_valid) and {view.source(stage_file)}"
    message = f"overlap_comm is off{default} at stage {stage}: {effect}"
    yield finding("no-overlap", "warning", _OVERLAP_KEY, message, options, source)


def _overlap_fails(view: ConfigurationView) -> bool:
    """Whether the release overlaps nothing at stages 1 and 2, or may spoil what it sends."""
    return any(view.release.does(behaviour) for behaviour in (OVERLAP_WAITS, *OVERLAP_OVERWRITES))


def overlap_of_the_release(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield findings on `overlap_comm` at stages 1 and 2 in releases that overlap nothing, or may spoil gradients."""
    if view.stage not in (1, 2) or view.target.gpus == 1:
        return
    if not overlaps(view) or sends_by_itself(view):
        return
    if view.flag("zero_optimization.contiguous_gradients", default=True) is not True:
        return
    if view.release.does(OVERLAP_WAITS):
        yield finding(
            "no-overlap",
            "warning",
            key=_OVERLAP_KEY,
            message=f"DeepSpeed {view.release.target_version} {OVERLAP_WAITS.effect} ({OVERLAP_WAITS.releases()})",
            fix=Remedy(_NEWER_RELEASE),
            source=OVERLAP_WAITS.source,
        )
    for behaviour in OVERLAP_OVERWRITES:
        if view.release.does(behaviour):
            yield finding(
                "overlap-spoils-gradients",
                "warning",
                key=_OVERLAP_KEY,
                message=f"DeepSpeed {view.release.target_version} {behaviour.effect} ({behaviour.releases()})",
                fix=Remedy("Run DeepSpeed 0.19.0 or later; in this release set overlap_comm to false"),
                source=behaviour.source,
            )


def one_bucket(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding where one bucket holds the whole model, so that `overlap_comm` overlaps nothing.

    Gradients are sent when their bucket is full, and such a bucket is not full before backward has ended.
    """
    parameters = view.target.parameters
    elements = bucket_elements(view)
    if parameters is None or elements is None or elements < parameters:
        return
    if not view.stage or view.target.gpus == 1:
        return
    if not overlaps(view) or sends_by_itself(view):
        return
    default = "" if view.has(_BUCKET_KEY) else " (the default)"
    tenth = good_bucket(parameters)
    yield finding(
        "one-bucket",
        "warning",
        key=_BUCKET_KEY,
        message=(
            f"A bucket of {elements:,.0f} elements{default} holds all {parameters:,} gradients of the model: it "
            "is sent when backward has ended, and overlap_comm overlaps nothing"
        ),
        fix=Remedy(f"Set it to about a tenth of the model: {tenth:,}", {_BUCKET_KEY: tenth}),
        source=f"{view.source('runtime/zero/config.py')} (reduce_bucket_size counts elements, not bytes)",
    )


def gradients_sent_every_micro_step(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding where gradients are accumulated at stage 2 or 3, which saves no communication there."""
    stage = view.stage
    if stage not in (2, 3) or view.target.gpus == 1:
        return
    micro_steps = view.number("gradient_accumulation_steps", 1)
    if micro_steps is None or micro_steps <= 1:
        return
    larger_micro_batch = "a larger micro-batch with fewer micro-steps"
    yield finding(
        "gradients-sent-every-micro-step",
        "note",
        key="gradient_accumulation_steps",
        message=(
            f"At stage {stage} all gradients are reduced in each of the {micro_steps:g} micro-steps, at stages 0 and "
            "1 once per step"
        ),
        fix=[
            Remedy(f"Take stage 1 where its memory suffices, or {larger_micro_batch}", {"zero_optimization.stage": 1}),
            Remedy(
                f"Take stage 1 with overlap_comm true where its memory suffices, or {larger_micro_batch}",
                {"zero_optimization.stage": 1, **_changes_to_overlap(view)},
            ),
            Remedy(f"Take {larger_micro_batch}; or stage 1, without what is for stage {stage} alone"),
        ],
        source=f"{view.source('runtime/engine.py')} (allreduce_gradients)",
    )
