"""Settings with which DeepSpeed holds other states than the papers of its stages say: offloading, and ZeRO++.

Offloading (ZeRO-Offload, arXiv 2101.06840) keeps states in the host's memory. ZeRO++ (arXiv 2306.10209) keeps a second
shard of the weights within groups of ranks (hpZ), and gathers weights and scatters gradients quantised (qwZ, qgZ).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vitscale.engines.deepspeed.config import as_flag, as_number, flag, section
from vitscale.errors import shown
from vitscale.trial.trial import TrainSpec

_SWITCHES = ("zero_quantized_nontrainable_weights",)
"""Switches of zero_optimization with which DeepSpeed holds what is not modelled."""
_QUANTISING_SWITCHES = ("zero_quantized_weights", "zero_quantized_gradients")
"""Switches of ZeRO++ whose kernels DeepSpeed has for GPUs alone; they count at stage 3."""
_SIZES_WITHOUT_GROUPS = (None, 0, 1, -1)
"""Sizes of a group of ranks that mean that there are no groups."""


class HostOffload(NamedTuple):
    """The states that DeepSpeed keeps in the host's memory."""

    optimizer: bool
    """Whether fp32 masters, the optimizer's states and the gradients of its step are there; it works there, too."""
    weights: bool
    """Whether stage 3's shards of weights are there; they are copied to the device when they are gathered."""


def offload_of(train: TrainSpec) -> HostOffload:
    """Return the offload that the study sets, or else the user's file, under today's keys or their old names."""
    zero = section(train.deepspeed_config, "zero_optimization")
    optimizer = train.offload != "none" or _is_on_host(zero, "offload_optimizer") or flag(train, "cpu_offload") is True
    weights = (
        train.offload == "parameters" or _is_on_host(zero, "offload_param") or flag(train, "cpu_offload_param") is True
    )
    return HostOffload(
        optimizer=optimizer and train.zero_stage >= 1,
        weights=weights and train.zero_stage == 3,
    )


def _is_on_host(zero: dict[str, object], key: str) -> bool:
    """Whether a section such as `offload_optimizer` of the file's zero_optimization offloads to the host's memory."""
    return section(zero, key).get("device") == "cpu"


class ZeroPlusPlus(NamedTuple):
    """ZeRO++ at stage 3, as the user's file sets it."""

    second_shard_ranks: int
    """Ranks that share a second shard of the weights (`zero_hpz_partition_size`); 1: there is none."""
    quantises_weights: bool
    """Whether weights are gathered in 8 bits."""
    quantises_gradients: bool
    """Whether gradients are exchanged among hosts in 4 bits."""

    @property
    def is_used(self) -> bool:
        """Whether any of its parts is switched on."""
        return self.second_shard_ranks > 1 or self.quantises_weights or self.quantises_gradients


def zero_plus_plus(train: TrainSpec) -> ZeroPlusPlus:
    """Return the settings of ZeRO++; below stage 3 DeepSpeed does nothing with them."""
    if train.zero_stage < 3:
        return ZeroPlusPlus(second_shard_ranks=1, quantises_weights=False, quantises_gradients=False)
    zero = section(train.deepspeed_config, "zero_optimization")
    group_size = as_number(zero.get("zero_hpz_partition_size"))
    return ZeroPlusPlus(
        second_shard_ranks=1 if group_size is None else max(1, int(group_size)),
        quantises_weights=flag(train, "zero_quantized_weights") is True,
        quantises_gradients=flag(train, "zero_quantized_gradients") is True,
    )


def unmodelled_setting(train: TrainSpec) -> str:
    """Return the first setting of the user's file with which DeepSpeed holds what is not modelled; empty without one.

    Example: "zero_optimization.offload_optimizer.device = 'nvme'".
    """
    return next(_unmodelled_settings(train), "")


def _unmodelled_settings(train: TrainSpec) -> Iterator[str]:
    """Yield every setting that is not modelled, as the file names it."""
    config = train.deepspeed_config or {}
    zero = section(config, "zero_optimization")
    if "data_types" in config:
        yield "data_types"
    if zero.get("zenflow") not in (None, "auto"):
        yield "zero_optimization.zenflow"
    if flag(train, "contiguous_gradients") is False:
        yield "zero_optimization.contiguous_gradients = false"
    for key in _SWITCHES:
        if flag(train, key):
            yield f"zero_optimization.{key}"
    if as_number(zero.get("mics_shard_size")) not in _SIZES_WITHOUT_GROUPS:
        yield "zero_optimization.mics_shard_size"
    for precision in ("bf16", "fp16"):
        for key in (f"{precision}_master_weights_and_grads", f"{precision}_optimizer_states"):
            if as_flag(section(config, precision).get(key)):
                yield f"{precision}.{key}"
    yield from _unmodelled_offloads(train)
    for key in _QUANTISING_SWITCHES:
        if flag(train, key) and train.zero_stage == 3 and train.device == "cpu":
            yield f"zero_optimization.{key} on a CPU, where DeepSpeed has no kernel for it,"


def _unmodelled_offloads(train: TrainSpec) -> Iterator[str]:
    """Yield the settings of offloading that are not modelled.

    What goes to NVMe passes through pinned buffers, whose number and size depend on the host's asynchronous reads.
    """
    zero = section(train.deepspeed_config, "zero_optimization")
    for key in ("offload_optimizer", "offload_param"):
        device = section(zero, key).get("device", "none")
        if device not in ("none", "cpu", "auto"):
            yield f"zero_optimization.{key}.device = {shown(device)}"
    optimizer = section(zero, "offload_optimizer")
    if optimizer.get("device") != "cpu":
        return
    if train.zero_stage == 0:
        yield "zero_optimization.offload_optimizer at stage 0"
    if as_number(optimizer.get("ratio"), "float") not in (None, 1):
        yield f"zero_optimization.offload_optimizer.ratio = {shown(optimizer['ratio'])}"
    if as_flag(optimizer.get("super_offload")):
        yield "zero_optimization.offload_optimizer.super_offload"
