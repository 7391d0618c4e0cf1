"""Whole weights and optimizer states out of DeepSpeed's partitions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitscale.engines.whole_tensors import LossScale, TorchTensors, WholeTensors
from vitscale.errors import RequestError, shown


def deepspeed_tensors(engine: Any, kind: str) -> WholeTensors:
    """What a DeepSpeed engine holds, by the optimizer that it has made of torch's.

    Raises:
        RequestError: DeepSpeed has made one of it that is not known here.
    """
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    module, optimizer = engine.module, engine.optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        return TorchTensors(module, optimizer, kind)
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        # Stage 0 with bf16 or fp16 weights: torch's optimizer has fp32 copies of them.
        pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        masters = {low: high for lows, highs in pairs for low, high in zip(lows, highs, strict=True)}
        scale = _loss_scale(optimizer.loss_scale_config)
        return TorchTensors(module, optimizer.optimizer, kind, masters=masters, loss_scale=scale)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return _Stage1Or2(module, optimizer, kind)
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return _Stage3(module, optimizer, kind)
    raise RequestError(
        f"what DeepSpeed makes of this configuration ({shown(type(optimizer).__name__)}) cannot be saved",
        next_step="Leave data_types and optimizer out of the DeepSpeed file, or do without the checkpoint",
    )


class _ZeroTensors(WholeTensors):
    """Parts of flat fp32 tensors, of which each rank holds one part."""

    def __init__(self, module: nn.Module, zero: Any, kind: str) -> None:
        super().__init__(module, zero.optimizer, kind)
        self._zero = zero
        self.loss_scale = _loss_scale(zero.loss_scaler)

    def weight(self, name: str) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        parameter = self.parameters[name]
        if not parameter.requires_grad:
            return self._frozen(parameter)
        whole: Tensor = safe_get_full_fp32_param(parameter)
        return whole

    def has_state(self, name: str, key: str) -> bool:
        """A flat tensor holds parameters together: either all of them have states, or none."""
        del name
        return all(self.optimizer.state.get(flat, {}).get(key) is not None for flat in self._flat())

    def state(self, name: str, key: str) -> Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state

        whole: Tensor = safe_get_full_optimizer_state(self.parameters[name], key)
        return whole

    def make_states(self, names: Iterable[str], keys: Iterable[str], steps: int) -> None:
        """States of all the flat tensors, or of none."""
        self._make(self._flat() if list(names) else [], keys, steps)

    @abstractmethod
    def _flat(self) -> list[Tensor]:
        """The tensors that the optimizer updates, this rank's parts."""

    @abstractmethod
    def _frozen(self, parameter: nn.Parameter) -> Tensor:
        """A weight that the optimizer does not update."""


class _Stage1Or2(_ZeroTensors):
    """Weights that compute are whole on every rank; their fp32 copies and the states are not."""

    def __init__(self, module: nn.Module, zero: Any, kind: str) -> None:
        super().__init__(module, zero, kind)
        self._link_states()

    def set_weight(self, name: str, whole: Tensor) -> None:
        from deepspeed.utils import safe_set_full_fp32_param

        parameter = self.parameters[name]
        parameter.detach().copy_(whole)
        if parameter.requires_grad:
            safe_set_full_fp32_param(parameter, whole)

    def make_states(self, names: Iterable[str], keys: Iterable[str], steps: int) -> None:
        super().make_states(names, keys, steps)
        self._link_states()

    def set_state(self, name: str, key: str, whole: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        safe_set_full_optimizer_state(self.parameters[name], whole, key)

    def _link_states(self) -> None:
        """Tells each parameter its fragment of the states.

        DeepSpeed 0.19.8 does so once, after the update of the first of its groups, when the others have no states yet
        (`_optimizer_step` in stage_1_and_2.py).
        """
        self._zero._hp_optimizer_states_linked = False
        if all(self.optimizer.state.get(flat) for flat in self._flat()):
            self._zero._lazy_init_hp_params_optimizer_state()

    def _flat(self) -> list[Tensor]:
        return list(self._zero.single_partition_of_fp32_groups)

    def _frozen(self, parameter: nn.Parameter) -> Tensor:
        return parameter.detach()


class _Stage3(_ZeroTensors):
    """Weights that compute are partitioned too."""

    def shape(self, name: str) -> tuple[int, ...]:
        parameter: Any = self.parameters[name]
        return tuple(parameter.ds_shape)

    def set_weight(self, name: str, whole: Tensor) -> None:
        import deepspeed
        from deepspeed.utils import safe_set_local_fp32_param

        parameter = self.parameters[name]
        # Rank 0's is taken when it is partitioned again; all ranks bring the same.
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.detach().copy_(whole)
        if parameter.requires_grad:
            safe_set_local_fp32_param(parameter, self._part(parameter, whole))

    def set_state(self, name: str, key: str, whole: Tensor) -> None:
        from deepspeed.utils import safe_set_local_optimizer_state

        parameter = self.parameters[name]
        safe_set_local_optimizer_state(parameter, self._part(parameter, whole), key)

    def _part(self, parameter: Any, whole: Tensor) -> Tensor:
        """This rank's part [n], the last ones padded with zeros: `safe_set_full_*` of DeepSpeed 0.19.8 fail for weights
        that do not divide over the ranks (`set_full_hp_param` in stage3.py).
        """
        size = parameter.partition_numel()
        part = torch.zeros(size)
        real = whole.flatten()[dist.get_rank() * size :][:size]
        part[: len(real)] = real
        return part

    def _flat(self) -> list[Tensor]:
        return list(self._zero.fp32_partitioned_groups_flat)

    def _frozen(self, parameter: nn.Parameter) -> Tensor:
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()


class _DeepSpeedLossScale(LossScale):
    """DeepSpeed's dynamic loss scale: it counts steps, and remembers the last one that overflowed."""

    def __init__(self, holder: Any) -> None:
        self._holder = holder

    def get(self) -> tuple[float, int]:
        return float(self._holder.cur_scale), self._holder.cur_iter - self._holder.last_overflow_iter - 1

    def set(self, factor: float, steps: int) -> None:
        self._holder.cur_scale, self._holder.cur_iter, self._holder.last_overflow_iter = factor, steps, -1


def _loss_scale(holder: Any) -> LossScale | None:
    """Of a `LossScaler` (stages 1 to 3) or a `LossScaleConfig` (stage 0); None where the scale is fixed."""
    dynamic = getattr(holder, "dynamic", False) or getattr(holder, "dynamic_loss_scale", False)
    return _DeepSpeedLossScale(holder) if dynamic else None
