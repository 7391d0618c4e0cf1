"""The base of engines, and the pieces that engines share so that they differ only in how they distribute.

They are the optimizer, and what is done to each of a model's repeated blocks (checkpointing, compiling, sharding).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from vitscale.engines import wrapper_facts
from vitscale.engines.shared import checkpoint
from vitscale.engines.shared.splits import clip
from vitscale.engines.shared.whole_tensors import TorchTensors, WholeTensors, torch_loss_scale
from vitscale.errors import RequestError, shown
from vitscale.models import logits_of
from vitscale.models.blocks import blocks_of, checkpoint_block, counting_norms
from vitscale.probes.gradient_norms import squared_norm
from vitscale.probes.steps import PhaseContext, no_phase
from vitscale.trial.trial import TrainSpec, Trial


def optimizer_of(model: nn.Module, trial: Trial) -> torch.optim.Optimizer:
    """Return the trial's optimizer over the model's parameters as they are now, at the learning rate after warm-up.

    AdamW and SGD are fused: one kernel over all parameters instead of several per tensor. Biases and norms (one
    dimension) take no weight decay, as is usual for vision transformers.
    """
    train = trial.train
    learning_rate = trial.peak_learning_rate
    groups = _parameter_groups(model, train.weight_decay)
    if train.optimizer == "sgd":
        return _sgd(groups, learning_rate, train)
    if train.optimizer == "lamb":
        return _lamb(groups, learning_rate)
    return torch.optim.AdamW(groups, lr=learning_rate, fused=True)


class _GroupKey(NamedTuple):
    """What parameters of one group of the optimizer have in common."""

    is_flat: bool
    """Whether they have one dimension, as biases and norms, and so take no weight decay."""
    mesh: object
    """The mesh of DTensors; None of other tensors. A kernel takes tensors of one mesh."""


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the optimizer's groups of trained parameters, those with weight decay first."""
    groups: dict[_GroupKey, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            key = _GroupKey(is_flat=parameter.ndim <= 1, mesh=mesh)
            groups.setdefault(key, []).append(parameter)
    decayed_first = sorted(groups, key=lambda key: key.is_flat)
    return [{"params": groups[key], "weight_decay": 0.0 if key.is_flat else weight_decay} for key in decayed_first]


def _sgd(groups: list[dict[str, Any]], learning_rate: float, train: TrainSpec) -> torch.optim.SGD:
    """Return torch's SGD, fused where it can be."""
    facts = wrapper_facts(train)
    # Parameters do not tell whether they are DTensors: Accelerate shards them only after this.
    is_fused = not facts.updates_dtensors
    sgd = torch.optim.SGD(groups, lr=learning_rate, momentum=train.momentum, fused=is_fused)
    scaler_may_skip = train.precision == "fp16" and not facts.own_loss_scaling
    if is_fused and scaler_may_skip and train.momentum > 0:
        _zero_momentum(sgd)
    return sgd


def _zero_momentum(sgd: torch.optim.SGD) -> None:
    """Set all momentum to zero, so that a first step in which fp16 overflows is skipped without harm.

    GradScaler leaves the skipping to the fused form, which then keeps whatever the memory held as momentum
    (`_fused_sgd` in torch/optim/sgd.py, 2.13). A momentum that begins at zero is the gradient after the first step,
    like one that begins there. (The unfused form would do too, but GradScaler waits for the device in each of its
    steps. DeepSpeed skips steps itself.)
    """
    for group in sgd.param_groups:
        for parameter in group["params"]:
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _lamb(groups: list[dict[str, Any]], learning_rate: float) -> torch.optim.Optimizer:
    """Return LAMB, as the pytorch-optimizer library has it.

    It is that of You et al., "Large Batch Optimization for Deep Learning" (ICLR 2020). As in algorithm 2 there, the
    weight decay is part of the update whose norm the trust ratio divides by; as in the paper's third version, the
    moments' bias is not corrected. By default the library divides the step by the first moment's correction after the
    trust ratio is in it, which makes the first steps ten times too long; `adam_debias` turns that off. Clipping is
    `gradient_clipping` here, as with every other optimizer.
    """
    from pytorch_optimizer import Lamb

    lamb: torch.optim.Optimizer = Lamb(
        groups, lr=learning_rate, weight_decouple=False, adam_debias=True, max_grad_norm=0.0
    )
    return lamb


LossOf = Callable[[Tensor], Tensor]
"""Turns logits [b, classes] or [b, classes, h, w] into a scalar loss; its mean over ranks and micro-steps is the mean
over the step's images, or its pixels."""


class Engine(ABC):
    """One rank's model under training.

    A step is `grad_accum` calls of `micro_step`, the last with `last=True`, then one call of `step`.
    """

    train_spec: TrainSpec
    device: torch.device
    wrapped: Any
    """The model in its wrapper; forward in training goes through it."""
    optimizer: Any
    input_dtype: torch.dtype
    """The dtype of images."""
    gradient_dtype: str | None
    """The dtype in which gradients travel; None where none do."""

    @abstractmethod
    def __init__(self, model: nn.Module, trial: Trial, device: torch.device) -> None:
        """Move `model` to `device` and wrap it; the process group has been joined."""

    @staticmethod
    def preload(train: TrainSpec) -> None:
        """Import the libraries that training needs beyond torch, where it needs any."""
        del train

    def micro_step(self, images: Tensor, loss_of: LossOf, *, last: bool, phase: PhaseContext = no_phase) -> Tensor:
        """Take one micro-batch forward and backward; backward starts from the loss / `grad_accum`.

        Args:
            images: [b, c, H, W], float, on the device.
            loss_of: see `LossOf`.
            last: whether this micro-step ends the accumulation, so that gradients are exchanged.
            phase: entered as "forward" around the model and the loss, and as "backward" around all that backward does,
                exchanges included.

        Returns:
            The detached loss (scalar).
        """
        with self.accumulating(last=last):
            with phase("forward"):
                with self.autocast():
                    logits = logits_of(self.wrapped(images.to(self.input_dtype)))
                loss = loss_of(logits.float())
            with phase("backward"):
                self.backward(loss, last=last)
                detached = loss.detach()
                del loss, logits  # the graph goes with them, and that takes its time
        return detached

    def accumulating(self, *, last: bool) -> AbstractContextManager[object]:
        """The context of a micro-step's forward and backward: until the `last` one gradients need not be exchanged."""
        del last
        return nullcontext()

    def autocast(self) -> AbstractContextManager[None]:
        """The context of forward: `bf16` and `fp16` autocast fp32 weights; all else computes in the weights' dtype."""
        if self.train_spec.precision in _AUTOCAST_DTYPES:
            # torch types autocast's __enter__ as Any; its result is not used.
            return torch.autocast(self.device.type, dtype=_AUTOCAST_DTYPES[self.train_spec.precision])
        return nullcontext()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of `loss` / `grad_accum`; in the `last` micro-step have them exchanged."""
        del last
        (loss / self.train_spec.grad_accum).backward()

    @abstractmethod
    def step(self) -> None:
        """Clip the gradients, update the weights, and clear the gradients."""

    def rehearse(self, images: Tensor) -> None:
        """Take a micro-batch forward and backward without a trace, before the first step, on all ranks at once.

        Its loss is zero whatever the logits are, and so are its gradients: gradients that they are added to stay the
        same to the bit. Compiled blocks then know the shape of `images` ([b, c, H, W], float, on the device).
        """
        self.micro_step(images, _zero_loss, last=False)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate from the coming `step` on; called before that step's first `micro_step`."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    @property
    def unknown_parts(self) -> dict[str, str]:
        """Parts of a step's breakdown that this engine's structure hides, each with the reason."""
        return {}

    def step_with_norm(self) -> float:
        """Do what `step` does; return the squared L2 norm of the gradient as exchanged, but not yet clipped.

        Not for trials for which `engines.checks.why_no_gradient_norms` has a reason, nor for timed steps: it waits for
        the device. The norm is not finite where the gradient is not.
        """
        norm = squared_norm(parameter.grad for parameter in self.module.parameters())
        self.step()
        return norm

    def evaluate(self, images: Tensor) -> Tensor | None:
        """Return logits [b, classes], or [b, classes, h, w], made in evaluation mode, without gradients.

        Return None where another rank has the last stage.
        """
        forward = self.evaluated
        forward.eval()
        with torch.no_grad(), self.autocast():
            logits = logits_of(forward(images.to(self.input_dtype)))
        forward.train()
        return logits.float()

    @property
    def evaluated(self) -> nn.Module:
        """The module that evaluates: mostly the model inside the wrapper, for evaluation needs no exchange."""
        return self.module

    @property
    def module(self) -> nn.Module:
        """The model inside the wrapper."""
        module: nn.Module = self.wrapped.module
        return module

    def whole_tensors(self) -> WholeTensors:
        """Return weights and optimizer states as a checkpoint has them.

        Raises:
            RequestError: this engine or its optimizer cannot give them.
        """
        what = f"{type(self).__name__} saves no checkpoint: its states are in buffers of its own layout"
        raise RequestError(what, next_step="Leave measure.checkpoint out, or use another engine")

    def save_checkpoint(self, folder: Path, step: int, alive: checkpoint.Alive = lambda: None) -> None:
        """Save what training needs to go on after `step` optimizer steps; all ranks do it, between steps.

        See `checkpoint.save`.
        """
        checkpoint.save(self.whole_tensors(), folder, step, alive)

    def load_checkpoint(self, folder: Path, alive: checkpoint.Alive = lambda: None) -> int:
        """Restore what any engine saved at any number of ranks; return its step. See `checkpoint.load`."""
        return checkpoint.load(self.whole_tensors(), folder, alive)


_AUTOCAST_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}

TORCH_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""`train.gradient_dtype` -> torch's dtype."""


def weight_dtype(train: TrainSpec) -> torch.dtype:
    """Return the dtype of the weights that forward computes with, outside autocast."""
    return torch.bfloat16 if train.precision == "bf16-params" else torch.float32


def _zero_loss(logits: Tensor) -> Tensor:
    """Return a loss that is zero, and whose gradients are zero."""
    return logits.sum() * 0.0


class TorchEngine(Engine):
    """torch's own loop, which plain training, DDP and FSDP2 share.

    They differ in the wrapper and in when gradients travel. fp16 computes under autocast, and torch's GradScaler scales
    its losses so that small gradients survive.
    """

    wrapped: nn.Module

    def __init__(self, model: nn.Module, trial: Trial, device: torch.device) -> None:
        self.wrapped = wrapped = self.wrap(model, trial, device)
        self.train_spec = trial.train
        layout = trial.layout
        has_parts = layout.tensor > 1 or layout.pipeline > 1
        self.ranks_with_parts = trial.world.size // layout.pipeline if has_parts else None
        """Ranks that hold any part of what this rank holds (`splits.squared_gradient_norm`); None: all hold all."""
        self.device = device
        self.input_dtype = weight_dtype(trial.train)
        self.gradient_dtype = self.sent_gradient_dtype(trial.train)
        # This comes after wrapping: the optimizer must hold the very parameters that the wrapper reduces.
        self.optimizer = optimizer_of(wrapped, trial)
        self.scaler = torch.amp.GradScaler(device.type, enabled=trial.train.precision == "fp16")

    @staticmethod
    @abstractmethod
    def wrap(model: nn.Module, trial: Trial, device: torch.device) -> nn.Module:
        """Return the model on its device and in its wrapper; each engine's docstring says in which order, and why."""

    @staticmethod
    def sent_gradient_dtype(train: TrainSpec) -> str | None:
        """Return the dtype in which gradients travel, as torch names it: their own, unless the study names another."""
        dtype = TORCH_DTYPES[train.gradient_dtype] if train.gradient_dtype else weight_dtype(train)
        return str(dtype).removeprefix("torch.")

    @override
    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.scaler.scale(loss / self.train_spec.grad_accum).backward()

    @override
    def rehearse(self, images: Tensor) -> None:
        # DDP takes its static graph from its first backward, which must hold the exchange.
        self.micro_step(images, _zero_loss, last=self.train_spec.static_graph)
        self.optimizer.zero_grad(set_to_none=True)  # not to be held through the first step's forward

    @override
    def step(self) -> None:
        if self.train_spec.gradient_clipping > 0:
            # After the exchange the norm is that of the global gradient, and unscaled it is the true one.
            self.scaler.unscale_(self.optimizer)
            if self.ranks_with_parts is None:
                nn.utils.clip_grad_norm_(self.wrapped.parameters(), self.train_spec.gradient_clipping)
            else:
                clip(self.wrapped.parameters(), self.train_spec.gradient_clipping, self.ranks_with_parts)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    @override
    def module(self) -> nn.Module:
        """The result of `wrap`, where that is the model itself."""
        return self.wrapped

    @override
    def whole_tensors(self) -> WholeTensors:
        scale = torch_loss_scale(self.scaler)
        return TorchTensors(self.module, self.optimizer, self.train_spec.optimizer, loss_scale=scale)


def with_options(model: nn.Module, train: TrainSpec, own_blocks: Sequence[nn.Module] | None = None) -> nn.Module:
    """Return the model with activation checkpointing and compiling, as far as they are asked for, of each block.

    The blocks are changed in place, in this order, and parameters keep their names:

    1. checkpointing goes innermost: what wraps a block then sees one call in forward and its repetition in backward;
    2. compiling comes after it, so that the compiler sees the repetition and may choose what to keep;
    3. whatever distributes comes later still, outside both: its hooks gather weights and must not be compiled.

    This goes block by block because one compiled block serves all like it, and because FSDP2 and ZeRO-3 gather block by
    block.

    Args:
        model: the whole model.
        train: the options that are asked for.
        own_blocks: blocks of the pipeline stages on this rank; [] where its stages have none. None: the rank has the
            whole model, and its blocks are those of `blocks_of`.

    Raises:
        RequestError: an option is set, and the model has no repeated blocks; or both are, and a block has batch norms.
    """
    replays_graphs = train.compile_mode == "reduce-overhead" and train.compile
    if not (train.activation_checkpointing or train.compile):
        return model
    blocks = blocks_of(model) if own_blocks is None else own_blocks
    _check_block_options(model, train, has_blocks=bool(blocks or blocks_of(model)))
    if train.compile:
        _raise_recompile_limits(blocks, train)
    compile_options: dict[str, Any] = {"mode": train.compile_mode} if replays_graphs else {}
    for block in blocks:
        if train.activation_checkpointing:
            _check_counting(block, train)
            checkpoint_block(block)
        if train.compile:
            # One graph for each of the few shapes. By default the compiler makes one for all sizes of batch as soon as
            # it meets a second size, the last step's, and from then on uses it for the full batches too.
            block.compile(dynamic=False, **compile_options)
    if replays_graphs:
        model.register_forward_pre_hook(_mark_graphs_as_reusable)
    return model


def _check_block_options(model: nn.Module, train: TrainSpec, *, has_blocks: bool) -> None:
    """Check that activation checkpointing and compiling, as far as they are asked for, can be done to a model.

    Raises:
        RequestError: the model has no repeated blocks.
    """
    if not has_blocks:
        option = "activation_checkpointing" if train.activation_checkpointing else "compile"
        raise RequestError(
            f"train.{option} works block by block, and {shown(type(model).__name__)} has no list of two or more "
            "modules of one class outside its heads",
            next_step="Keep the model's blocks, each one module with a forward, in a torch.nn.ModuleList or Sequential,"
            f" or leave {option} out",
        )


def _raise_recompile_limits(blocks: Sequence[nn.Module], train: TrainSpec) -> None:
    """Let torch compile as many graphs of one code as the blocks need.

    Blocks that differ in a number alone (a rate of drop path) have one code and a graph each: of a full batch, of each
    micro-step of an epoch's last, of evaluation's two sizes, and one to spare. torch keeps eight graphs of one code,
    and would run all other blocks as they are.
    """
    kinds_of_blocks = len({_constants(block) for block in blocks})
    graphs_per_kind = 4 + train.grad_accum
    graphs = kinds_of_blocks * graphs_per_kind
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, graphs)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, graphs)


def _mark_graphs_as_reusable(*_: object) -> None:
    """Allow CUDA graphs of compiled blocks to take the memory of the last forward and backward again.

    By itself torch takes each call of a compiled block without a backward under way for a new beginning: in evaluation
    a block would write over its own input, the output of the block before it (pytorch/pytorch issue 160281).
    """
    torch.compiler.cudagraph_mark_step_begin()


def _check_counting(block: nn.Module, train: TrainSpec) -> None:
    """Check that a checkpointed block counts each image once in its running statistics.

    Raises:
        RequestError: the block is compiled, and has batch norms that count.
    """
    if train.compile and counting_norms(block):
        # torch takes no such context there, and its compiled backward updates the statistics again (seen in 2.13).
        raise RequestError(
            "train.compile with train.activation_checkpointing would count each image twice in the running statistics "
            f"of the batch norms in {shown(type(block).__name__)}",
            next_step="Leave one of the two out",
        )


class _Constant(NamedTuple):
    """A value of a block that compiled code may have built in, such as _Constant("mlp", "rate", 0.1)."""

    path: str
    """The module of the block that holds it."""
    attribute: str
    value: object


def _constants(block: nn.Module) -> tuple[_Constant, ...]:
    """Return values of a block that the compiler may take for constants: blocks with the same ones share graphs."""
    constants: list[_Constant] = []
    for path, module in block.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, int | float | str):
                constants.append(_Constant(path, name, value))
    return tuple(constants)


@contextmanager
def known_gpu(device_type: str) -> Iterator[None]:
    """A context of imports that ask for a GPU: they find that there is one, and NVML is not initialised.

    Either would start a thread and open the GPU, so that no rank could be a fork. DeepSpeed 0.19.8 initialises NVML
    (`CUDA_Accelerator`; earlier ones try kernels too); torch 2.11 asks in its compiler (`_inductor.runtime`), and for
    Megatron-Core in `cpp_extension`.
    """
    import pynvml

    def refuse() -> NoReturn:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    is_available = torch.cuda.is_available
    initialise = pynvml.nvmlInit
    if device_type == "cuda":
        torch.cuda.is_available = lambda: True
        pynvml.nvmlInit = refuse
    try:
        yield
    finally:
        torch.cuda.is_available = is_available
        pynvml.nvmlInit = initialise
