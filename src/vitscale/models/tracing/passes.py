"""Runs a model forward and backward on meta tensors, as a training rank does, and records it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vitscale.models import logits_of
from vitscale.models.blocks import blocks_of
from vitscale.models.losses import label_losses, slot_loss, tally
from vitscale.models.named import AuxiliaryLogits
from vitscale.models.tracing.attention import attention_of
from vitscale.models.tracing.autocast import EmulatedAutocast, meta_stands_for
from vitscale.models.tracing.building import DTYPES, checkpoint_blocks
from vitscale.models.tracing.errors import TraceError
from vitscale.models.tracing.recorder import Recorder, Recording
from vitscale.trial.model_card import TraceRequest

BEFORE_BLOCKS = "before the blocks"
BETWEEN_BLOCKS = "between blocks"
AFTER_BLOCKS = "after the blocks"
LOSS = "loss"
_FP32_BYTES = 4


class _Batch(NamedTuple):
    """A micro-batch."""

    images: Tensor
    """[n, c, H, W] in the weights' dtype."""
    labels: Tensor
    """[n], or [n, H, W] in segmentation."""


class TracedPasses:
    """A model on meta that is run forward and backward on any number of images, and recorded."""

    def __init__(self, model: nn.Module, request: TraceRequest) -> None:
        """Checkpoints the model's blocks where the request has it; the model is changed in place."""
        self._model = model
        self._request = request
        self._recorder: Recorder | None = None
        self.attempted: str | None = None
        """The operation that the last pass stopped at; None where it came to its end."""
        self._autocast: EmulatedAutocast | None = None
        if request.autocast_dtype is not None:
            dtype = DTYPES[request.autocast_dtype]
            self._autocast = EmulatedAutocast(request.device, dtype, self._note_weight_copy)
        names_by_module = {module: name for name, module in model.named_modules()}
        self._autocast_blocks: set[nn.Module] = set()
        """Checkpointed blocks whose forward was under autocast in the last pass."""
        self._block_names = {block: names_by_module[block] for block in blocks_of(model)}
        if request.checkpointing:
            checkpoint_blocks(model, self._block_context)

    def run(self, images: int) -> Recording:
        """Run a micro-batch of so many images; the gradients of the pass before are cleared first.

        It sets `attempted`, also where it fails.
        """
        self._model.zero_grad(set_to_none=True)
        self._autocast_blocks.clear()
        batch = self._batch(images)
        recorder = Recorder(self._model, batch)
        self._recorder = recorder
        with _garbage_collection_paused():
            try:
                with self._target_device_emulated(), self._observed_by(recorder):
                    self._forward_and_backward(recorder, *batch)
                recorder.leave_out(self._gradients())
            finally:
                self.attempted = recorder.attempted
                recorder.close()
        return recorder.recording

    @contextmanager
    def _target_device_emulated(self) -> Iterator[None]:
        """The context in which attention and autocast on meta tensors are those of the request's device."""
        device = self._request.device
        autocast_kernels = nullcontext() if self._autocast is None else self._autocast.installed()
        with attention_of(device), meta_stands_for(device), autocast_kernels:
            yield

    @contextmanager
    def _observed_by(self, recorder: Recorder) -> Iterator[None]:
        """The context in which a recorder learns of operations, of the blocks' bounds, and of batch norms."""
        with self._parts_followed(recorder), self._batch_norms_followed(recorder.recording), recorder:
            yield

    def without_gradient(self) -> list[nn.Parameter]:
        """Return the parameters to be trained that the last pass gave no gradient."""
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        return [parameter for parameter in trained if parameter.grad is None]

    def _batch(self, images: int) -> _Batch:
        """Return a micro-batch of so many images on meta."""
        spec = self._request.model
        side = spec.image_size
        dtype = DTYPES[self._request.weight_dtype]
        labels_shape = (images, side, side) if spec.task == "segmentation" else (images,)
        pixels = torch.empty(images, spec.channels, side, side, dtype=dtype, device="meta")
        return _Batch(pixels, torch.empty(labels_shape, dtype=torch.int64, device="meta"))

    def _forward_and_backward(self, recorder: Recorder, images: Tensor, labels: Tensor) -> None:
        """Do what `Engine.micro_step` and `Passes.micro_step` do with a micro-batch."""
        spec = self._request.model
        auxiliary_weight = spec.auxiliary_weight if spec.task == "segmentation" else 0.0
        auxiliary = AuxiliaryLogits(self._model, auxiliary_weight)
        try:
            recorder.begin_part(BEFORE_BLOCKS, block=0)
            with self._forward_autocast():
                logits = logits_of(self._model(images))
            self._check_logits(logits, labels)
            recorder.recording.logits_bytes = logits.untyped_storage().nbytes()
            recorder.begin_part(LOSS, block=0)
            loss = _loss(logits.float(), labels, auxiliary)
            recorder.begin_backward()
            loss.backward()
            del loss, logits  # the loop holds them until here
        finally:
            auxiliary.close()

    def _check_logits(self, logits: Tensor, labels: Tensor) -> None:
        """Refuse logits that are not [n, classes] for labels [n], or [n, classes, H, W] for labels [n, H, W]."""
        classes = self._request.model.num_classes
        image_count = labels.shape[0]
        dimensions = 2 if labels.ndim == 1 else 4
        has_shape = logits.shape[0] == image_count and logits.ndim == dimensions
        if not has_shape or (classes is not None and logits.shape[1] != classes):
            output = f"the model gives {tuple(logits.shape)} for {image_count} images"
            raise TraceError(f"{output}, and {classes} classes are trained")

    def _forward_autocast(self) -> AbstractContextManager[None]:
        """Return the context of a forward under autocast, where the request has it."""
        return nullcontext() if self._autocast is None else self._autocast.active()

    @contextmanager
    def _block_context(self, block: nn.Module) -> Iterator[None]:
        """The context of a checkpointed block's forward, in forward and in the repetition."""
        if self._recorder is None or not self._recorder.is_backward:
            if self._is_autocast_on():
                self._autocast_blocks.add(block)
            yield
            return
        # torch's checkpointing repeats the autocast of real devices alone.
        autocast = self._forward_autocast() if block in self._autocast_blocks else nullcontext()
        with self._recorder.recomputing(), autocast:
            yield

    def _is_autocast_on(self) -> bool:
        """Whether autocast casts now: a model may switch it off around some of its modules."""
        return self._autocast is not None and torch.is_autocast_enabled(self._request.device)

    @contextmanager
    def _parts_followed(self, recorder: Recorder) -> Iterator[None]:
        """The context in which the recorder begins a part wherever the forward of a block begins or ends.

        Blocks are numbered from 1 on, in the order in which they are first called.
        """
        number_by_block: dict[nn.Module, int] = {}

        def begin_block(block: nn.Module, arguments: object) -> None:
            del arguments
            number = number_by_block.setdefault(block, len(number_by_block) + 1)
            recorder.begin_part(self._block_names[block], number)

        def end_block(block: nn.Module, arguments: object, output: object) -> None:
            del block, arguments, output
            recorder.begin_part(BETWEEN_BLOCKS, block=0)

        with ExitStack() as stack:
            for block in self._block_names:
                stack.callback(block.register_forward_pre_hook(begin_block).remove)
                stack.callback(block.register_forward_hook(end_block).remove)
            yield

    @contextmanager
    def _batch_norms_followed(self, recording: Recording) -> Iterator[None]:
        """The context in which batch norms are recorded: channels at the first call, the largest input of each part."""
        called: set[nn.Module] = set()

        def record_norm(norm: _BatchNorm, arguments: tuple[Tensor, ...]) -> None:
            part = len(recording.parts) - 1
            input_bytes = _FP32_BYTES * arguments[0].numel()
            largest = recording.largest_batch_norm_bytes
            largest[part] = max(largest.get(part, 0), input_bytes)
            if norm not in called:
                called.add(norm)
                recording.batch_norm_channels.append(norm.num_features)

        with ExitStack() as stack:
            for module in self._model.modules():
                if isinstance(module, _BatchNorm):
                    stack.callback(module.register_forward_pre_hook(record_norm).remove)
            yield

    def _note_weight_copy(self, weight: Tensor, copy: Tensor) -> None:
        if self._recorder is not None:
            self._recorder.note_weight_copy(weight, copy)

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """The context in which no garbage is collected: tensors in reference cycles would be freed at any moment."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _loss(logits: Tensor, labels: Tensor, auxiliary: AuxiliaryLogits) -> Tensor:
    """Return the loss of a micro-batch of fp32 logits, as `Passes.micro_step` computes it."""
    losses = label_losses(logits, labels)
    with torch.no_grad():
        tally(losses, logits, labels)
    auxiliary_logits = auxiliary.take()
    if auxiliary_logits is not None:
        losses = losses + auxiliary.weight * label_losses(auxiliary_logits.float(), labels)
    return slot_loss(losses, step_count=labels.numel(), world_size=1, grad_accum=1)
