"""Whole weights and optimizer states of a distributed model, by name, whatever holds their parts.

These are torch's own tensors and shards, or DeepSpeed's partitions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple, cast

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


class LossScaleState(NamedTuple):
    """The state from which a loss scale goes on after a checkpoint."""

    factor: float
    """The factor by which losses are multiplied."""
    steps: int
    """Optimizer steps since the factor last changed."""


class LossScale(ABC):
    """The factor by which fp16 scales its losses; a library adapts it to overflows as training goes on."""

    @abstractmethod
    def get(self) -> LossScaleState:
        """Return the factor, and the steps since it last changed."""

    @abstractmethod
    def set(self, factor: float, steps: int) -> None:
        """Go on from this factor, `steps` steps after it last changed."""


class WholeTensors(ABC):
    """The weights and optimizer states of one engine, each whole: as a model on a single device would have it.

    Ranks may hold a part of a tensor only. So all ranks call all methods alike: reading gathers the parts, and writing
    has each rank take its own part out of the whole tensor that it is given. One tensor is whole at a time, so that a
    rank's memory grows by no more than the largest one.
    """

    loss_scale: LossScale | None = None
    """None where losses are not scaled, or by a fixed factor."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, optimizer_name: str) -> None:
        """Take the tensors of a model.

        Args:
            module: the model inside the wrapper.
            optimizer: the optimizer that updates it.
            optimizer_name: the name of the optimizer, as in `STATES`.

        Raises:
            RequestError: the optimizer is none of `STATES`.
        """
        if optimizer_name not in STATES:
            raise RequestError(
                f"train.optimizer = {shown(optimizer_name)} cannot be saved: what it keeps of a parameter is not known "
                "here, or is another on every rank",
                valid=[f"train.optimizer = {shown(name)}" for name in STATES],
            )
        self.module = module
        self.optimizer = optimizer
        self.optimizer_name = optimizer_name
        self.parameters: dict[str, nn.Parameter] = dict(module.named_parameters())
        """Name in the model -> parameter, of which this rank may hold a part only."""
        self.trained = [name for name, parameter in self.parameters.items() if parameter.requires_grad]
        """Names of the parameters that the optimizer updates."""
        saved_names = module.state_dict().keys()  # without buffers that a module marks as not persistent
        self.buffers = {name: buffer for name, buffer in module.named_buffers() if name in saved_names}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole parameter."""
        return tuple(self.parameters[name].shape)

    @abstractmethod
    def weight(self, name: str) -> Tensor:
        """Return the whole weight that the optimizer updates, on any device."""

    @abstractmethod
    def set_weight(self, name: str, full_tensor: Tensor) -> None:
        """Overwrite a weight, both the one that the optimizer updates and the one that computes."""

    def buffer(self, name: str) -> Tensor:
        """Return one of `buffers`."""
        return self.buffers[name].detach()

    def set_buffer(self, name: str, full_tensor: Tensor) -> None:
        """Overwrite one of `buffers`."""
        self.buffers[name].copy_(full_tensor)

    @abstractmethod
    def has_state(self, name: str, key: str) -> bool:
        """Return whether an update has given a trained parameter this state yet; this gathers nothing."""

    @abstractmethod
    def state(self, name: str, key: str) -> Tensor:
        """Return a whole state of a trained parameter; `key`: one of its optimizer's `STATES`."""

    @abstractmethod
    def set_state(self, name: str, key: str, full_tensor: Tensor) -> None:
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
        if self.optimizer_name == "lamb":
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

    def _make_states_of(self, updated_tensors: Iterable[Tensor], keys: Iterable[str], steps: int) -> None:
        """Replace all of the optimizer's states by new ones, all zero, as its own first step would make them.

        Args:
            updated_tensors: the tensors that the optimizer updates and keeps states of: parameters, fp32 masters of
                them, or flat tensors of many parameters.
            keys: the states of each.
            steps: updates that the optimizer counts from then on.
        """
        state_keys = tuple(keys)
        self.optimizer.state.clear()
        for tensor in updated_tensors:
            state: dict[str, Any] = {key: torch.zeros_like(tensor) for key in state_keys}
            if self.optimizer_name == "adamw":
                # torch.optim keeps this count on the parameter's device where one kernel updates all parameters.
                is_fused = any(group.get("fused") for group in self.optimizer.param_groups)
                state["step"] = torch.tensor(float(steps), device=tensor.device if is_fused else "cpu")
            self.optimizer.state[tensor] = state
        if self.optimizer_name == "lamb":
            for group in self.optimizer.param_groups:
                group["step"] = steps


class TorchTensors(WholeTensors):
    """Tensors of torch's own optimizer: whole on every rank, or shards that torch knows how to gather."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        optimizer_name: str,
        *,
        masters: Mapping[nn.Parameter, Tensor] | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        """Take the tensors of a model; see `WholeTensors`.

        Args:
            module: the model inside the wrapper.
            optimizer: the optimizer that updates it.
            optimizer_name: the name of the optimizer, as in `STATES`.
            masters: parameter -> its fp32 master, a copy that the optimizer updates in its stead. None, or without a
                parameter: the optimizer updates the parameter itself.
            loss_scale: the loss scale of fp16, if there is one.
        """
        super().__init__(module, optimizer, optimizer_name)
        self._masters = masters or {}
        self.loss_scale = loss_scale

    def _updated_tensor(self, name: str) -> Tensor:
        """Return the tensor that the optimizer updates for a parameter: its fp32 master, or the parameter itself."""
        parameter = self.parameters[name]
        return self._masters.get(parameter, parameter)

    def weight(self, name: str) -> Tensor:
        """Return the whole weight, gathered where it is sharded."""
        return _gathered_tensor(self._updated_tensor(name))

    def set_weight(self, name: str, full_tensor: Tensor) -> None:
        """Overwrite a weight; of one that is sharded each rank takes its own part."""
        _copy_into(self.parameters[name], full_tensor)
        _copy_into(self._updated_tensor(name), full_tensor)

    def has_state(self, name: str, key: str) -> bool:
        """Return whether there is a state; SGD without momentum keeps None, which is none."""
        return self.optimizer.state.get(self._updated_tensor(name), {}).get(key) is not None

    def state(self, name: str, key: str) -> Tensor:
        """Return the whole state, gathered where it is sharded."""
        return _gathered_tensor(self.optimizer.state[self._updated_tensor(name)][key])

    def set_state(self, name: str, key: str, full_tensor: Tensor) -> None:
        """Overwrite a state; of one that is sharded each rank takes its own part."""
        _copy_into(self.optimizer.state[self._updated_tensor(name)][key], full_tensor)

    def make_states(self, names: Iterable[str], keys: Iterable[str], steps: int) -> None:
        """Make states of the tensors that are updated for these parameters."""
        self._make_states_of([self._updated_tensor(name) for name in names], keys, steps)


class TorchLossScale(LossScale):
    """The loss scale of torch's GradScaler."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler

    def get(self) -> LossScaleState:
        """Return the factor, and the steps since it last changed; this waits for the device."""
        state = self._scaler.state_dict()
        return LossScaleState(factor=float(state["scale"]), steps=int(state["_growth_tracker"]))

    def set(self, factor: float, steps: int) -> None:
        """Set the factor and the steps since it last changed; all else stays as the scaler was made."""
        self._scaler.load_state_dict(self._scaler.state_dict() | {"scale": factor, "_growth_tracker": steps})


def torch_loss_scale(scaler: torch.amp.GradScaler | None) -> LossScale | None:
    """Return the loss scale of a scaler; None where there is none, or it is switched off."""
    if scaler is None or not scaler.is_enabled():
        return None
    return TorchLossScale(scaler)


def _gathered_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor whole on every rank, gathered where it is sharded."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    # Offloaded shards lie on the host, where NCCL gathers nothing.
    gathered: Tensor = cast(DTensor, tensor.to(tensor.device_mesh.device_type)).full_tensor()
    return gathered


def _copy_into(target: Tensor, full_tensor: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded: each rank takes its own part."""
    target = target.detach()
    if not isinstance(target, DTensor):
        target.copy_(full_tensor)
        return
    # No source rank: every rank has the whole and cuts its own part out of it.
    parts = distribute_tensor(full_tensor, target.device_mesh, target.placements, src_data_rank=None)
    target.to_local().copy_(parts.to_local())


def deepspeed_tensors(engine: Any, optimizer_name: str) -> WholeTensors:
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
        return TorchTensors(module, optimizer, optimizer_name)
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        # Stage 0 with bf16 or fp16 weights: torch's optimizer has fp32 copies of them.
        masters = dict(zip(chain(*optimizer.fp16_groups), chain(*optimizer.fp32_groups), strict=True))
        scale = _loss_scale(optimizer.loss_scale_config)
        return TorchTensors(module, optimizer.optimizer, optimizer_name, masters=masters, loss_scale=scale)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return _Stage1Or2(module, optimizer, optimizer_name)
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return _Stage3(module, optimizer, optimizer_name)
    raise RequestError(
        f"what DeepSpeed makes of this configuration ({shown(type(optimizer).__name__)}) cannot be saved",
        next_step="Leave data_types and optimizer out of the DeepSpeed file, or do without the checkpoint",
    )


class _ZeroTensors(WholeTensors):
    """Tensors of a ZeRO optimizer of DeepSpeed's.

    It updates flat fp32 tensors, each of which holds many parameters end to end; a rank has one part of each.
    """

    def __init__(self, module: nn.Module, zero: Any, optimizer_name: str) -> None:
        super().__init__(module, zero.optimizer, optimizer_name)
        self._zero = zero
        self.loss_scale = _loss_scale(zero.loss_scaler)

    def weight(self, name: str) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        parameter = self.parameters[name]
        if not parameter.requires_grad:
            return self._frozen_weight(parameter)
        full_tensor: Tensor = safe_get_full_fp32_param(parameter)
        return full_tensor

    def has_state(self, name: str, key: str) -> bool:
        """Return whether the flat tensors have this state: as they hold parameters together, all have it or none."""
        del name
        return all(self.optimizer.state.get(flat_part, {}).get(key) is not None for flat_part in self._flat_parts())

    def state(self, name: str, key: str) -> Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state

        full_tensor: Tensor = safe_get_full_optimizer_state(self.parameters[name], key)
        return full_tensor

    def make_states(self, names: Iterable[str], keys: Iterable[str], steps: int) -> None:
        """Make states of all the flat tensors, or of none where there are no names."""
        self._make_states_of(self._flat_parts() if list(names) else [], keys, steps)

    @abstractmethod
    def _flat_parts(self) -> list[Tensor]:
        """Return this rank's parts of the flat tensors; these the optimizer updates."""

    def _frozen_weight(self, parameter: nn.Parameter) -> Tensor:
        """Return the whole weight of a parameter that the optimizer does not update."""
        return parameter.detach()


class _Stage1Or2(_ZeroTensors):
    """Stages 1 and 2: weights that compute are whole on every rank; their fp32 copies and the states are not."""

    def __init__(self, module: nn.Module, zero: Any, optimizer_name: str) -> None:
        super().__init__(module, zero, optimizer_name)
        self._link_states()

    def set_weight(self, name: str, full_tensor: Tensor) -> None:
        from deepspeed.utils import safe_set_full_fp32_param

        parameter = self.parameters[name]
        parameter.detach().copy_(full_tensor)
        if parameter.requires_grad:
            safe_set_full_fp32_param(parameter, full_tensor)

    def make_states(self, names: Iterable[str], keys: Iterable[str], steps: int) -> None:
        super().make_states(names, keys, steps)
        self._link_states()

    def set_state(self, name: str, key: str, full_tensor: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        safe_set_full_optimizer_state(self.parameters[name], full_tensor, key)

    def _link_states(self) -> None:
        """Give each parameter its fragment of the states.

        DeepSpeed 0.19.8 does this once, after the update of its first group, when the others have no states yet
        (`_optimizer_step` in stage_1_and_2.py).
        """
        self._zero._hp_optimizer_states_linked = False
        if all(self.optimizer.state.get(flat_part) for flat_part in self._flat_parts()):
            self._zero._lazy_init_hp_params_optimizer_state()

    def _flat_parts(self) -> list[Tensor]:
        return list(self._zero.single_partition_of_fp32_groups)


class _Stage3(_ZeroTensors):
    """Stage 3: weights that compute are partitioned too."""

    def shape(self, name: str) -> tuple[int, ...]:
        parameter: Any = self.parameters[name]
        return tuple(parameter.ds_shape)

    def set_weight(self, name: str, full_tensor: Tensor) -> None:
        import deepspeed
        from deepspeed.utils import safe_set_local_fp32_param

        parameter = self.parameters[name]
        # Rank 0's copy is taken when the weight is partitioned again; all ranks have the same.
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.detach().copy_(full_tensor)
        if parameter.requires_grad:
            safe_set_local_fp32_param(parameter, self._own_part(parameter, full_tensor))

    def set_state(self, name: str, key: str, full_tensor: Tensor) -> None:
        from deepspeed.utils import safe_set_local_optimizer_state

        parameter = self.parameters[name]
        safe_set_local_optimizer_state(parameter, self._own_part(parameter, full_tensor), key)

    def _own_part(self, parameter: Any, full_tensor: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, [elements of a part]; the last ranks' are padded with zeros.

        `safe_set_full_*` of DeepSpeed 0.19.8 fail for weights that do not divide over the ranks (`set_full_hp_param` in
        stage3.py).
        """
        part_elements = parameter.partition_numel()
        begin = dist.get_rank() * part_elements
        own_elements = full_tensor.flatten()[begin : begin + part_elements]
        padded = torch.zeros(part_elements)
        padded[: len(own_elements)] = own_elements
        return padded

    def _flat_parts(self) -> list[Tensor]:
        return list(self._zero.fp32_partitioned_groups_flat)

    def _frozen_weight(self, parameter: nn.Parameter) -> Tensor:
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()


class _DeepSpeedLossScale(LossScale):
    """DeepSpeed's dynamic loss scale: it counts steps, and remembers the last one that overflowed."""

    def __init__(self, holder: Any) -> None:
        self._holder = holder

    def get(self) -> LossScaleState:
        steps_since_overflow = self._holder.cur_iter - self._holder.last_overflow_iter - 1
        return LossScaleState(factor=float(self._holder.cur_scale), steps=steps_since_overflow)

    def set(self, factor: float, steps: int) -> None:
        self._holder.cur_scale = factor
        self._holder.cur_iter = steps
        self._holder.last_overflow_iter = -1


def _loss_scale(holder: Any) -> LossScale | None:
    """Return the loss scale in a `LossScaler` (stages 1 to 3) or a `LossScaleConfig` (stage 0); None: it is fixed."""
    is_dynamic = getattr(holder, "dynamic", False) or getattr(holder, "dynamic_loss_scale", False)
    return _DeepSpeedLossScale(holder) if is_dynamic else None
