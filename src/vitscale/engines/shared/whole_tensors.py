"""Whole weights and optimizer states of a distributed model, by name, whatever holds their parts.

These are torch's own tensors and shards, or DeepSpeed's partitions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from vitscale.errors import RequestError, shown

STATES: dict[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "lamb": ("exp_avg", "exp_avg_sq"),
}
"""Optimizer -> the states that it keeps for each parameter, in the parameter's shape. Beside them AdamW counts its
steps for each parameter, LAMB for each group; whatever else LAMB keeps is worked out anew in every step."""


class LossScale(ABC):
    """The factor by which fp16 scales its losses, and the steps since it last changed."""

    @abstractmethod
    def get(self) -> tuple[float, int]:
        """Return the factor, and the steps since it last changed."""

    @abstractmethod
    def set(self, factor: float, steps: int) -> None:
        """Go on from this factor, `steps` steps after it last changed."""


class WholeTensors(ABC):
    """The weights and optimizer states of one engine, each whole.

    All ranks call all methods alike, because a whole tensor may have to be gathered. One tensor is whole at a time, so
    that a rank's memory grows by no more than the largest one.
    """

    loss_scale: LossScale | None = None

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, kind: str) -> None:
        """Take the tensors of a model.

        Args:
            module: the model inside the wrapper.
            optimizer: the optimizer that updates it.
            kind: the name of the optimizer, as in `STATES`.

        Raises:
            RequestError: the optimizer is none of `STATES`.
        """
        if kind not in STATES:
            raise RequestError(
                f"train.optimizer = {shown(kind)} cannot be saved: what it keeps of a parameter is not known here, "
                "or is another on every rank",
                valid=[f"train.optimizer = {shown(name)}" for name in STATES],
            )
        self.module = module
        self.optimizer = optimizer
        self.kind = kind
        self.parameters: dict[str, nn.Parameter] = dict(module.named_parameters())
        self.trained = [name for name, parameter in self.parameters.items() if parameter.requires_grad]
        persistent = module.state_dict().keys()
        self.buffers = {name: buffer for name, buffer in module.named_buffers() if name in persistent}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole parameter."""
        return tuple(self.parameters[name].shape)

    @abstractmethod
    def weight(self, name: str) -> Tensor:
        """Return the whole weight that the optimizer updates, on any device."""

    @abstractmethod
    def set_weight(self, name: str, whole: Tensor) -> None:
        """Overwrite a weight, both the one that the optimizer updates and the one that computes."""

    def buffer(self, name: str) -> Tensor:
        """Return one of `buffers`."""
        return self.buffers[name].detach()

    def set_buffer(self, name: str, whole: Tensor) -> None:
        """Overwrite one of `buffers`."""
        self.buffers[name].copy_(whole)

    @abstractmethod
    def has_state(self, name: str, key: str) -> bool:
        """Return whether an update has given a trained parameter this state yet; this gathers nothing."""

    @abstractmethod
    def state(self, name: str, key: str) -> Tensor:
        """Return a whole state of a trained parameter; `key`: one of its optimizer's `STATES`."""

    @abstractmethod
    def set_state(self, name: str, key: str, whole: Tensor) -> None:
        """Overwrite a state, which `make_states` has made."""

    @abstractmethod
    def make_states(self, names: Iterable[str], keys: Iterable[str], steps: int) -> None:
        """Replace all of the optimizer's states by new ones, all zero.

        Args:
            names: the parameters that get states.
            keys: the states of each.
            steps: updates that the optimizer counts from then on.
        """

    def steps(self) -> int:
        """Return the number of updates that the optimizer counts; 0 where it counts none.

        Raises:
            RequestError: it counts more for some parameters than for others.
        """
        if self.kind == "lamb":
            counts = {int(group.get("step", 0)) for group in self.optimizer.param_groups}
        else:
            counts = {int(state["step"]) for state in self.optimizer.state.values() if "step" in state}
        if len(counts) > 1:
            raise RequestError(
                "the optimizer cannot be saved: some parameters got fewer updates than others "
                f"({min(counts)} against {max(counts)})",
                next_step="Freeze parameters that no image reaches, or use all of them in every step",
            )
        return counts.pop() if counts else 0

    def _make(self, holders: Iterable[Tensor], keys: Iterable[str], steps: int) -> None:
        """Do what `make_states` says, as the optimizer's own first step would.

        Args:
            holders: the tensors that the optimizer keeps states of.
            keys: the states of each.
            steps: updates that the optimizer counts from then on.
        """
        keys = tuple(keys)
        self.optimizer.state.clear()
        for holder in holders:
            state: dict[str, Any] = {key: torch.zeros_like(holder) for key in keys}
            if self.kind == "adamw":
                # torch.optim keeps this count on the parameter's device where one kernel updates all parameters.
                on_device = any(group.get("fused") for group in self.optimizer.param_groups)
                state["step"] = torch.tensor(float(steps), device=holder.device if on_device else "cpu")
            self.optimizer.state[holder] = state
        if self.kind == "lamb":
            for group in self.optimizer.param_groups:
                group["step"] = steps


class TorchTensors(WholeTensors):
    """Tensors of torch's own optimizer: whole on every rank, or shards that torch knows how to gather."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        kind: str,
        *,
        masters: Mapping[nn.Parameter, Tensor] | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        """Take the tensors of a model; see `WholeTensors`.

        Args:
            module: the model inside the wrapper.
            optimizer: the optimizer that updates it.
            kind: the name of the optimizer, as in `STATES`.
            masters: parameter -> the fp32 tensor that the optimizer updates, where that is another one.
            loss_scale: the loss scale of fp16, if there is one.
        """
        super().__init__(module, optimizer, kind)
        self._masters = masters or {}
        self.loss_scale = loss_scale

    def _updated(self, name: str) -> Tensor:
        """Return the tensor that the optimizer updates for a parameter: its fp32 master, or the parameter itself."""
        parameter = self.parameters[name]
        return self._masters.get(parameter, parameter)

    def weight(self, name: str) -> Tensor:
        """Return the whole weight, gathered where it is sharded."""
        return _whole(self._updated(name))

    def set_weight(self, name: str, whole: Tensor) -> None:
        """Overwrite a weight; of one that is sharded each rank takes its own part."""
        _fill(self.parameters[name], whole)
        _fill(self._updated(name), whole)

    def has_state(self, name: str, key: str) -> bool:
        """Return whether there is a state; SGD without momentum keeps None, which is none."""
        return self.optimizer.state.get(self._updated(name), {}).get(key) is not None

    def state(self, name: str, key: str) -> Tensor:
        """Return the whole state, gathered where it is sharded."""
        return _whole(self.optimizer.state[self._updated(name)][key])

    def set_state(self, name: str, key: str, whole: Tensor) -> None:
        """Overwrite a state; of one that is sharded each rank takes its own part."""
        _fill(self.optimizer.state[self._updated(name)][key], whole)

    def make_states(self, names: Iterable[str], keys: Iterable[str], steps: int) -> None:
        """Make states of the tensors that are updated for these parameters."""
        self._make([self._updated(name) for name in names], keys, steps)


class TorchLossScale(LossScale):
    """The loss scale of torch's GradScaler."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler

    def get(self) -> tuple[float, int]:
        """Return the factor, and the steps since it last changed; this waits for the device."""
        state = self._scaler.state_dict()
        return float(state["scale"]), int(state["_growth_tracker"])

    def set(self, factor: float, steps: int) -> None:
        """Set the factor and the steps since it last changed; all else stays as the scaler was made."""
        self._scaler.load_state_dict(self._scaler.state_dict() | {"scale": factor, "_growth_tracker": steps})


def torch_loss_scale(scaler: torch.amp.GradScaler | None) -> LossScale | None:
    """Return the loss scale of a scaler; None where there is none, or it is switched off."""
    if scaler is None or not scaler.is_enabled():
        return None
    return TorchLossScale(scaler)


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor whole on every rank, gathered where it is sharded."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    # Offloaded shards lie on the host, where NCCL gathers nothing.
    gathered: Tensor = cast(DTensor, tensor.to(tensor.device_mesh.device_type)).full_tensor()
    return gathered


def _fill(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded: each rank takes its own part."""
    target = target.detach()
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    # No source rank: every rank has the whole and cuts its own part out of it.
    parts = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    target.to_local().copy_(parts.to_local())


def deepspeed_tensors(engine: Any, kind: str) -> WholeTensors:
    """Return the tensors of a DeepSpeed engine, by the kind of optimizer that it has made of torch's.

    Raises:
        RequestError: DeepSpeed has made an optimizer that is not known here.
    """
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    module = engine.module
    optimizer = engine.optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        return TorchTensors(module, optimizer, kind)
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        # Stage 0 with bf16 or fp16 weights: torch's optimizer has fp32 copies of them.
        masters = dict(zip(chain(*optimizer.fp16_groups), chain(*optimizer.fp32_groups), strict=True))
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
    """Flat fp32 tensors, of which each rank holds one part."""

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
        """Return whether the flat tensors have this state: as they hold parameters together, all have it or none."""
        del name
        return all(self.optimizer.state.get(flat, {}).get(key) is not None for flat in self._flat())

    def state(self, name: str, key: str) -> Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state

        whole: Tensor = safe_get_full_optimizer_state(self.parameters[name], key)
        return whole

    def make_states(self, names: Iterable[str], keys: Iterable[str], steps: int) -> None:
        """Make states of all the flat tensors, or of none where there are no names."""
        self._make(self._flat() if list(names) else [], keys, steps)

    @abstractmethod
    def _flat(self) -> list[Tensor]:
        """Return the tensors that the optimizer updates: this rank's parts."""

    def _frozen(self, parameter: nn.Parameter) -> Tensor:
        """Return the whole weight of a parameter that the optimizer does not update."""
        return parameter.detach()


class _Stage1Or2(_ZeroTensors):
    """Stages 1 and 2: weights that compute are whole on every rank; their fp32 copies and the states are not."""

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
        """Give each parameter its fragment of the states.

        DeepSpeed 0.19.8 does this once, after the update of its first group, when the others have no states yet
        (`_optimizer_step` in stage_1_and_2.py).
        """
        self._zero._hp_optimizer_states_linked = False
        if all(self.optimizer.state.get(flat) for flat in self._flat()):
            self._zero._lazy_init_hp_params_optimizer_state()

    def _flat(self) -> list[Tensor]:
        return list(self._zero.single_partition_of_fp32_groups)


class _Stage3(_ZeroTensors):
    """Stage 3: weights that compute are partitioned too."""

    def shape(self, name: str) -> tuple[int, ...]:
        parameter: Any = self.parameters[name]
        return tuple(parameter.ds_shape)

    def set_weight(self, name: str, whole: Tensor) -> None:
        import deepspeed
        from deepspeed.utils import safe_set_local_fp32_param

        parameter = self.parameters[name]
        # Rank 0's copy is taken when the weight is partitioned again; all ranks have the same.
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.detach().copy_(whole)
        if parameter.requires_grad:
            safe_set_local_fp32_param(parameter, self._own_part(parameter, whole))

    def set_state(self, name: str, key: str, whole: Tensor) -> None:
        from deepspeed.utils import safe_set_local_optimizer_state

        parameter = self.parameters[name]
        safe_set_local_optimizer_state(parameter, self._own_part(parameter, whole), key)

    def _own_part(self, parameter: Any, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, [elements of a part]; the last ranks' are padded with zeros.

        `safe_set_full_*` of DeepSpeed 0.19.8 fail for weights that do not divide over the ranks (`set_full_hp_param` in
        stage3.py).
        """
        part_elements = parameter.partition_numel()
        begin = dist.get_rank() * part_elements
        own_elements = whole.flatten()[begin : begin + part_elements]
        padded = torch.zeros(part_elements)
        padded[: len(own_elements)] = own_elements
        return padded

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
        steps_since_overflow = self._holder.cur_iter - self._holder.last_overflow_iter - 1
        return float(self._holder.cur_scale), steps_since_overflow

    def set(self, factor: float, steps: int) -> None:
        self._holder.cur_scale = factor
        self._holder.cur_iter = steps
        self._holder.last_overflow_iter = -1


def _loss_scale(holder: Any) -> LossScale | None:
    """Return the loss scale in a `LossScaler` (stages 1 to 3) or a `LossScaleConfig` (stage 0); None: it is fixed."""
    is_dynamic = getattr(holder, "dynamic", False) or getattr(holder, "dynamic_loss_scale", False)
    return _DeepSpeedLossScale(holder) if is_dynamic else None
