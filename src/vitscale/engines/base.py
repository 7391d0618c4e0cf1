"""What every engine does, and the pieces they share so that they differ in nothing but distribution."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from typing_extensions import override

from vitscale.models import logits_of
from vitscale.probes.explainer import Phase, no_phase
from vitscale.probes.gradient_norms import squared_norm
from vitscale.trial import TrainSpec, Trial

LossOf = Callable[[Tensor], Tensor]
"""Logits [b, classes] to a scalar loss whose mean over ranks and micro-steps is the mean over the step's images."""


class Engine(ABC):
    """One rank's model under training.

    A step is `grad_accum` calls of `micro_step`, of which the last has `last=True`, then one call of `step`.
    """

    gradient_dtype: str | None
    """The dtype in which gradients travel; None where none do."""

    @abstractmethod
    def __init__(self, model: nn.Module, trial: Trial, device: torch.device) -> None:
        """Moves `model` to `device` and wraps it; the process group has been joined."""

    @staticmethod
    @abstractmethod
    def preload(device_type: str) -> None:
        """Imports the engine's own library for a type of device, where it has one."""

    @abstractmethod
    def micro_step(self, images: Tensor, loss_of: LossOf, *, last: bool, phase: Phase = no_phase) -> Tensor:
        """Forward and backward of one micro-batch. What backward starts from is the loss / `grad_accum`.

        Args:
            images: [b, 3, H, W], float, on the device.
            loss_of: see `LossOf`.
            last: whether this micro-step ends the accumulation, so that gradients are exchanged.
            phase: entered as "forward" around the model and the loss, as "backward" around all that backward does,
                exchanges included.

        Returns:
            The detached loss (scalar).
        """

    @abstractmethod
    def step(self) -> None:
        """Clips, updates the weights and clears the gradients."""

    @property
    def norm_unknown(self) -> str | None:
        """Why the norms of its gradients cannot be told; None where they can."""
        return None

    def step_with_norm(self) -> float:
        """As `step`; returns the squared L2 norm of the gradient that the optimizer gets: exchanged, not yet clipped.

        Means nothing where `norm_unknown` has a reason, and is not finite where the gradient is not. Waits for the
        device: not for steps that are timed.
        """
        norm = squared_norm(parameter.grad for parameter in self.module.parameters())
        self.step()
        return norm

    @abstractmethod
    def evaluate(self, images: Tensor) -> Tensor:
        """Logits [b, classes] in evaluation mode, without gradients."""

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The model inside."""


def autocast(train: TrainSpec, device: torch.device) -> AbstractContextManager[None]:
    """`bf16` means autocast over fp32 weights; anything else computes in the weights' own dtype."""
    if train.precision == "bf16":
        # torch types autocast's __enter__ as Any; nothing is taken from it.
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def optimizer_of(model: nn.Module, train: TrainSpec) -> torch.optim.Optimizer:
    """The trial's optimizer, fused: one kernel over all parameters instead of several per tensor.

    Biases and norms (one dimension) take no weight decay, as is usual for vision transformers.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if train.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=train.learning_rate, momentum=train.momentum, fused=True)
    return torch.optim.AdamW(groups, lr=train.learning_rate, fused=True)


class TorchEngine(Engine):
    """What plain training and DDP share: torch's own loop. They differ in the wrapper and in when gradients travel."""

    def __init__(self, model: nn.Module, trial: Trial, device: torch.device) -> None:
        self.wrapped = wrapped = self.wrap(model, trial.train, device)
        self.train_spec = trial.train
        self.device = device
        # After wrapping: the optimizer must hold the very parameters the wrapper reduces.
        self.optimizer = optimizer_of(wrapped, trial.train)

    @staticmethod
    def preload(device_type: str) -> None:
        """Nothing: torch is there already."""

    @staticmethod
    @abstractmethod
    def wrap(model: nn.Module, train: TrainSpec, device: torch.device) -> nn.Module:
        """Puts the model on its device and into its wrapper; the order, and why, stands here."""

    def gradients_stay(self) -> AbstractContextManager[None]:
        """The context in which backward exchanges nothing."""
        return nullcontext()

    @override
    def micro_step(self, images: Tensor, loss_of: LossOf, *, last: bool, phase: Phase = no_phase) -> Tensor:
        with nullcontext() if last else self.gradients_stay():
            # Backward lies inside too: DDP decides in forward whether the coming backward reduces.
            with phase("forward"):
                with autocast(self.train_spec, self.device):
                    logits = logits_of(self.wrapped(images))
                loss = loss_of(logits.float())
            with phase("backward"):
                (loss / self.train_spec.grad_accum).backward()
                detached = loss.detach()
                del loss, logits  # with them goes the graph, and that takes its time
        return detached

    @override
    def step(self) -> None:
        if self.train_spec.gradient_clipping > 0:
            # After the exchange: the norm is that of the global gradient.
            nn.utils.clip_grad_norm_(self.wrapped.parameters(), self.train_spec.gradient_clipping)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @override
    def evaluate(self, images: Tensor) -> Tensor:
        self.module.eval()
        with torch.no_grad(), autocast(self.train_spec, self.device):
            logits = logits_of(self.module(images))
        self.module.train()
        return logits.float()
