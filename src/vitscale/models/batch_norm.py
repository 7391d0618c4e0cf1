"""Batch norm over the images that count: those of this rank, or those of all ranks.

Padding images, which repeat others so that slots are full, would shift the statistics of torch's own norm (two images
of eight that are zero shift activations by 0.6). torch's `SyncBatchNorm` takes only CUDA tensors; this one takes any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from vitscale.errors import RequestError, shown
from vitscale.store.records import NORM_MARK


class BatchNorm(_BatchNorm):
    """torch's batch norm with its parameters, buffers and their names; in training over the first `real` images alone.

    The other images are padding: they come out as zeros and get no gradient.
    """

    def __init__(self, like: _BatchNorm, *, synchronised: bool) -> None:
        """Takes over the tensors of `like`."""
        nn.Module.__init__(self)
        self.num_features, self.eps, self.momentum = like.num_features, like.eps, like.momentum
        self.affine, self.track_running_stats, self.training = like.affine, like.track_running_stats, like.training
        for name, parameter in like._parameters.items():
            self.register_parameter(name, parameter)
        for name, buffer in like._buffers.items():
            self.register_buffer(name, buffer)
        self.synchronised = synchronised
        self.real: int | None = None
        """How many images of the coming micro-batches count, from the first on; None: all."""
        self.group: dist.ProcessGroup | None = None
        """The ranks over whose images the norm is taken: a synchronised one, where None means all ranks, or a local one
        whose images several ranks share, where None means this rank."""
        self.replicas: dist.ProcessGroup | None = None
        """The ranks that have this norm and other images; None: all."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Normalises [b, C, ...]; the shape stays.

        Raises:
            RequestError: it is over one value of each channel, in training.
        """
        if not self.training:
            return super().forward(input)
        images = input[: self.real]
        if (self.synchronised or self.group is not None) and dist.is_initialized():
            normed = self._over_ranks(images)
        elif len(images):
            if images.numel() == images.shape[1]:
                what = "a batch norm is over one image of one pixel, as behind a pooling, and one value has no variance"
                advice = "Set train.micro_batch = 2 or more; train.drop_last = true where an epoch's last step is that"
                raise RequestError(what, next_step=advice)
            normed = super().forward(images)
        elif self.affine:
            # No image, but weight and bias need a gradient in every micro-batch: it is 0.
            normed = (images * _beside(self.weight, images) + _beside(self.bias, images)).to(images.dtype)
        else:
            normed = images
        padding = len(input) - len(images)
        return normed if not padding else torch.cat([normed, normed.new_zeros(padding, *normed.shape[1:])])

    def _over_ranks(self, images: Tensor) -> Tensor:
        apply: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = _Synchronised.apply
        normed, mean, variance, count = apply(images, self.weight, self.bias, self.eps, self.group)
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            with torch.no_grad():
                seen = count[0] > 0  # otherwise all of the norm's ranks have nothing but padding
                self.num_batches_tracked.add_(seen)
                weight = 1.0 / self.num_batches_tracked.clamp(min=1) if self.momentum is None else self.momentum
                unbiased = variance * (count / (count - 1).clamp(min=1))
                for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
                    running.add_((new - running) * (weight * seen))
        return normed

    @override
    def _check_input_dim(self, input: Tensor) -> None:
        """Accepts any number of dimensions: each module that is replaced would check for its own."""


class BatchNormAct(BatchNorm):
    """The same for timm's `BatchNormAct2d`: dropout and an activation follow the norm."""

    def __init__(self, like: _BatchNorm, *, synchronised: bool) -> None:
        """Takes over the tensors of `like`, its dropout and its activation."""
        super().__init__(like, synchronised=synchronised)
        self.drop: nn.Module = like.get_submodule("drop")
        self.act: nn.Module = like.get_submodule("act")

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Normalises [b, C, H, W] and applies the activation; the shape stays.

        Raises:
            RequestError: as `BatchNorm.forward`.
        """
        activated: Tensor = self.act(self.drop(super().forward(input)))
        return activated


def _replacement(norm: _BatchNorm) -> type[BatchNorm] | None:
    """Return the class that stands for a batch norm; None where its class has a forward of its own."""
    kind = type(norm)
    is_of_timm = kind.__module__ == "timm.layers.norm_act" and kind.__name__ == "BatchNormAct2d"
    if is_of_timm or kind is BatchNormAct:
        return BatchNormAct
    if kind.forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward, BatchNorm.forward):
        return BatchNorm
    return None


class _Synchronised(torch.autograd.Function):
    """Batch norm over all images of a group of ranks: one all-reduce in forward, one in backward, both in float64.

    With M values of a channel over those ranks and y = xhat * weight + bias, the gradient of the ranks' losses together
    is weight / deviation * (dy - (sum dy + xhat * sum(dy * xhat)) / M): Ioffe & Szegedy, "Batch Normalization" (ICML
    2015), section 3. A rank's gradients of weight and bias are its own parts, which the engine adds up like all others.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any,
        images: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the images normalised, and mean, biased variance (float64 [C]) and number of values of a channel."""
        over = [dim for dim in range(images.ndim) if dim != 1]
        values = images.float()
        count = torch.full((1,), images.numel() // images.shape[1], dtype=torch.float64, device=images.device)
        sums = torch.cat([_sum(values, over), _sum(values.square(), over), count])
        _exchange(sums, group)
        total, squares, count = sums.tensor_split([images.shape[1], 2 * images.shape[1]])
        mean = total / count.clamp(min=1)
        variance = (squares / count.clamp(min=1) - mean.square()).clamp(min=0)
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(images, weight, mean, scale, count)
        ctx.mark_non_differentiable(mean, variance, count)
        ctx.bias, ctx.group = bias is not None, group
        factor = scale if weight is None else scale * weight
        shift = -mean * factor if bias is None else bias - mean * factor
        normed = values * _beside(factor, images) + _beside(shift, images)
        return normed.to(images.dtype), mean, variance, count

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        images, weight, mean, scale, count = ctx.saved_tensors
        over = [dim for dim in range(images.ndim) if dim != 1]
        gradient = gradients[0].float()
        normed = (images.float() - _beside(mean, images)) * _beside(scale, images)
        own = torch.stack([_sum(gradient, over), _sum(gradient * normed, over)])
        sums = own.clone()
        _exchange(sums, ctx.group)
        of_bias, of_weight = sums / count.clamp(min=1)
        factor = scale if weight is None else scale * weight
        of_images = (gradient - _beside(of_bias, images) - normed * _beside(of_weight, images)) * _beside(
            factor, images
        )
        return (
            of_images.to(images.dtype),
            None if weight is None else own[1].to(weight.dtype),
            own[0].to(mean.dtype if weight is None else weight.dtype) if ctx.bias else None,
            None,
            None,
        )


def _exchange(sums: Tensor, group: dist.ProcessGroup | None) -> None:
    """Adds up `sums` over the ranks of a group (None: all), in place."""
    with torch.profiler.record_function(NORM_MARK):
        dist.all_reduce(sums, group=group)


def _sum(values: Tensor, over: list[int]) -> Tensor:
    return values.sum(over, dtype=torch.float64)


def _beside(of_channels: Tensor, images: Tensor) -> Tensor:
    """[C] as float32, shaped to go with [b, C, ...]."""
    return of_channels.float().view(1, -1, *(1,) * (images.ndim - 2))


def over_real_images(model: nn.Module, *, synchronised: bool) -> None:
    """Replaces every batch norm of torch's in the model, in place, and keeps DDP from broadcasting buffers.

    Buffers of synchronised norms are equal on all ranks; those of local ones are a rank's own until
    `average_statistics`. A broadcast in each forward would also hide how long ranks wait for one another.

    Raises:
        RequestError: a norm's class has a forward of its own, and what that does besides would be lost.
    """
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, _BatchNorm):
                continue
            replacement = _replacement(child)
            if replacement is None:
                what = f"{shown(f'{path}.{name}'.strip('.'))} is a batch norm with a forward of its own"
                raise RequestError(
                    f"{what}, {shown(type(child).__name__)}, and norms are replaced here to leave padding out",
                    next_step="Use torch's own batch norms, with what that forward does besides in modules behind them",
                )
            setattr(parent, name, replacement(child, synchronised=synchronised))
    # `DistributedDataParallel` reads this, whoever wraps the model in one.
    names = [name for name, _ in model.named_buffers()]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def norms_of(model: nn.Module) -> list[BatchNorm]:
    """The batch norms that `over_real_images` has put into the model."""
    return [module for module in model.modules() if isinstance(module, BatchNorm)]


def average_statistics(norms: Iterable[BatchNorm]) -> None:
    """Averages the running statistics of local norms over `replicas`, so that all ranks evaluate the same model."""
    if not dist.is_initialized():
        return
    for norm in norms:
        for running in (norm.running_mean, norm.running_var):
            if not norm.synchronised and running is not None:
                dist.all_reduce(running, group=norm.replicas)
                running /= dist.get_world_size(norm.replicas)
