"""The optimizers that every engine shares, so that engines differ in nothing but distribution."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vitscale.trial.trial import Trial


def optimizer_of(model: nn.Module, trial: Trial) -> torch.optim.Optimizer:
    """The trial's optimizer over the model's parameters as they are now, at the learning rate after warm-up.

    AdamW and SGD are fused: one kernel over all parameters instead of several per tensor. Biases and norms (one
    dimension) take no weight decay, as is usual for vision transformers.
    """
    train = trial.train
    rate = trial.peak_learning_rate
    groups = _groups(model, train.weight_decay)
    if train.optimizer == "sgd":
        # torch has no fused SGD over shards; Accelerate shards the parameters only after this.
        sgd = torch.optim.SGD(groups, lr=rate, momentum=train.momentum, fused=train.wrapper != "fsdp2")
        if train.precision == "fp16" and train.momentum > 0 and train.wrapper in ("none", "ddp"):
            _zero_momentum(sgd)
        return sgd
    if train.optimizer == "lamb":
        return _lamb(groups, rate)
    return torch.optim.AdamW(groups, lr=rate, fused=True)


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _zero_momentum(sgd: torch.optim.SGD) -> None:
    """Lets a first step that fp16 overflows in be skipped without harm.

    GradScaler leaves that to the fused form, which then keeps its momentum as the memory happened to be (`_fused_sgd`
    in torch/optim/sgd.py, 2.13). A momentum of zero is the gradient after the first step, as one begun there. (The
    unfused form would do too, but GradScaler waits for the device in each of its steps. DeepSpeed skips steps itself.)
    """
    for group in sgd.param_groups:
        for parameter in group["params"]:
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _lamb(groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    """LAMB of the pytorch-optimizer library: You et al., "Large Batch Optimization for Deep Learning" (ICLR 2020).

    As in algorithm 2 there, the weight decay is part of the update whose norm the trust ratio divides by, and, as in
    the paper's third version, the moments' bias is not corrected. Left to itself the library divides the step by the
    first moment's correction once the trust ratio is in it, which makes the first steps ten times too long;
    `adam_debias` turns that off. Clipping is `gradient_clipping` here, as with every other optimizer.
    """
    from pytorch_optimizer import Lamb

    lamb: torch.optim.Optimizer = Lamb(groups, lr=rate, weight_decouple=False, adam_debias=True, max_grad_norm=0.0)
    return lamb


def set_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Sets the learning rate of all of an optimizer's groups."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
