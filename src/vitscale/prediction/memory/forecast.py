"""How much memory a rank of a trial will take at its peak, part by part: the highest of a step's moments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vitscale.model_spec import parameter_shapes
from vitscale.prediction.memory.activations import AUTOCAST, Activations, activations
from vitscale.prediction.memory.holding import STATE_BYTES, Holding, Parts, Sizes, added, sizes
from vitscale.prediction.memory.replicated import ddp, plain
from vitscale.prediction.memory.sharded import fsdp2
from vitscale.prediction.memory.zero import deepspeed
from vitscale.prediction.memory.zero_settings import modelled
from vitscale.trial import Trial

_HOLDINGS = {"none": plain, "ddp": ddp, "fsdp2": fsdp2, "deepspeed": deepspeed}

NOT_COVERED: Mapping[str, str] = {
    "libraries": "a CUDA context, kernels and cuBLAS workspaces; NCCL's or gloo's own buffers; Python itself",
    "fragmentation": "what the caching allocator reserves beyond what tensors take",
    "data": "images that threads have prepared ahead",
    "start-up": "what building the engine takes for a moment, before the first step",
}
"""What no forecast holds, and is not 0: name -> what it is."""


@dataclass(frozen=True)
class MemoryForecast:
    """Bytes of one rank's tensors; of the rank that takes most, where ranks differ."""

    moments: Mapping[str, Parts]
    """Moment of a step -> bytes by part; a part that is not named is not there."""
    not_covered: Mapping[str, str]
    """What is left out -> why, or what it is."""

    @property
    def peak_moment(self) -> str:
        """The moment that takes most."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def parts(self) -> Parts:
        """Bytes by part at the peak."""
        return self.moments[self.peak_moment]

    @property
    def peak_bytes(self) -> int:
        """Of all parts together at the peak."""
        return sum(self.parts.values())


def forecast(trial: Trial) -> MemoryForecast | None:
    """The memory that a rank of a resolved trial takes at its peak; None where it cannot be known by arithmetic.

    Unknown: a model that only building it could count, an engine or an optimizer whose states are not modelled here,
    offloading, and what a DeepSpeed file of the user's own may ask for beyond bucket sizes (`zero_settings.modelled`).
    """
    train = trial.train
    shapes = parameter_shapes(trial.model)
    if shapes is None or train.wrapper not in _HOLDINGS or train.optimizer not in STATE_BYTES:
        return None
    if train.offload != "none" or not modelled(train):
        return None
    through_deepspeed = train.wrapper == "deepspeed"
    autocast = train.precision in AUTOCAST and not (train.precision == "fp16" and through_deepspeed)
    kept = activations(
        trial.model, train, shapes, autocast=autocast, casts_kept=not (through_deepspeed and train.zero_stage == 3)
    )
    holding = _HOLDINGS[train.wrapper](trial, shapes)
    missing = dict(NOT_COVERED)
    if train.compile:
        missing["compile"] = "compiled blocks keep and fuse other activations than these, mostly fewer"
    return MemoryForecast(_moments(holding, kept, sizes(shapes)), missing)


def forecast_bytes(trial: Trial) -> int | None:
    """`forecast(trial).peak_bytes`; None where unknown."""
    found = forecast(trial)
    return None if found is None else found.peak_bytes


def _moments(holding: Holding, kept: Activations, count: Sizes) -> dict[str, Parts]:
    base = added(holding.steady, {"images": kept.images})
    held = added(base, holding.held)
    blocks = count.layers * kept.kept_of_block
    before_last = {"activations": blocks - kept.kept_of_block, "autocast's copies": kept.cast_weights}
    after_last = {"activations": blocks + kept.head, "autocast's copies": kept.cast_weights}
    backward = max(_in_backward(holding, kept, count), key=lambda parts: sum(parts.values()))
    moments = {
        "last block": added(held, holding.held_buckets, before_last, holding.forward),
        "end of forward": added(held, holding.held_buckets, after_last, holding.forward_end),
        "backward": added(held, backward),
        "exchange": added(base, holding.exchange),
        "step": added(base, holding.step),
    }
    return {name: {part: size for part, size in parts.items() if size} for name, parts in moments.items()}


def _in_backward(holding: Holding, kept: Activations, count: Sizes) -> Iterator[dict[str, int]]:
    """Bytes on top of `steady` and of what is held, at the moments of backward that can take most.

    In each block: where it is widest, in the MLP; when the MLP is done and a bucket may be full; and between it and the
    next. From block to block activations fall and gradients rise, so that it is mostly the first block or the last.
    """
    largest = count.largest_of_block
    for left in range(count.layers, 0, -1):
        done = count.head + (count.layers - left) * count.block
        block = left * kept.kept_of_block + kept.recomputed
        yield _moment_of_backward(holding, kept, left, done, largest, block, kept.backward_of_block)
        yield _moment_of_backward(
            holding, kept, left, done + count.mlp // 2, largest, block - kept.mlp_of_block, 2 * kept.stream
        )
        if holding.between_blocks:
            done = count.head + (count.layers - left + 1) * count.block
            below = (left - 1) * kept.kept_of_block
            parts = _moment_of_backward(holding, kept, left - 1, done, 0, below, kept.stream)
            yield added(parts, holding.between_blocks)
    yield _moment_of_backward(holding, kept, 0, count.all, count.embedding, 0, 2 * kept.stream)


def _moment_of_backward(
    holding: Holding, kept: Activations, left: int, done: int, new: int, stored: int, passed_on: int
) -> dict[str, int]:
    """One moment: `left` blocks have not gone through backward, `done` gradients are made, `new` are just there."""
    return added(
        holding.backward,
        holding.from_first_flush if done + new > holding.first_flush else {},
        {
            "activations": stored,
            "passed on in backward": passed_on,
            "autocast's copies": left * kept.cast_weights_of_block + kept.cast_weights_of_ends,
            "gathered weights": left * holding.kept_gathered_per_block,
            "gradients": int(done * holding.gradient_bytes) + new * holding.new_gradient_bytes,
        },
    )
