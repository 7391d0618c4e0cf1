"""Pipeline parallelism by `torch.distributed.pipelining`: a step's micro-batches flow through the ranks' stages.

The training loop stays as it is. `micro_step` keeps its micro-batches until the step's last one; then the schedule runs
all of them, each rank its own stages. The rank of the last stage has the losses, and sends their sum to the others.
While no stage of a rank computes, the rank is in the phase "bubble".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.functional import interpolate
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from vitscale.engines.base import Engine, LossOf, TorchEngine
from vitscale.engines.ddp.wrap import StageDdp
from vitscale.engines.shared.stages import Activation, StagedModel, TensorShapes
from vitscale.engines.shared.whole_tensors import TorchTensors, WholeTensors
from vitscale.models.batch_norm import norms_of
from vitscale.probes.steps import PhaseContext, no_phase
from vitscale.store.records import PhaseName
from vitscale.trial.trial import Trial

_SCHEDULE_BY_NAME: dict[str, Callable[..., Any]] = {
    "gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B,
}  # fmt: skip
_WHY_UNKNOWN_ON_GPU = (
    "on a GPU a stage waits inside NCCL's kernels, where waiting for a stage is not told from a transfer"
)


class PipelineEngine(TorchEngine):
    """A schedule over the ranks that hold the stages of one model.

    What ranks with the same stages do among themselves comes from the engine that it is combined with: see `pipelined`.

    A step goes like this. All calls of `micro_step` but the last only keep their micro-batch. The last call runs
    torch's schedule, which calls back: `_Stage` enters the phases "forward" and "backward" by `working` whenever it
    computes, and the schedule asks `_loss` for the loss of each micro-batch.
    """

    wrapped: StagedModel

    def __init__(self, model: nn.Module, trial: Trial, device: torch.device) -> None:
        super().__init__(model, trial, device)
        self.parallel = trial.parallel
        self._norms = norms_of(self.module)
        self._micro_batches: list[_MicroBatch] = []
        """Those of the step so far."""
        self._schedule_by_shape: dict[tuple[int, ...], Any] = {}
        """Shape [b, c, H, W] of a micro-batch -> torch's schedule for it."""
        self._bubble = ExitStack()
        """Holds the phase "bubble" open whenever no stage computes."""
        self._phase: PhaseContext = no_phase
        """The `phase` of the `micro_step` that runs the schedule."""

    @override
    def micro_step(self, images: Tensor, loss_of: LossOf, *, last: bool, phase: PhaseContext = no_phase) -> Tensor:
        """Keep a micro-batch; with the `last` one of a step, take all of them forward and backward.

        Returns:
            The sum of the step's losses, on every rank, for the last micro-batch; 0 for the others.
        """
        real_images = self._norms[0].real if self._norms else None
        self._micro_batches.append(_MicroBatch(images.to(self.input_dtype), loss_of, real_images))
        if not last:
            return torch.zeros((), device=self.device)
        self._phase = phase
        try:
            return self._run_schedule()
        finally:
            self._bubble.close()
            self._micro_batches.clear()

    def _run_schedule(self) -> Tensor:
        """Take all micro-batches of a step forward and backward; return the sum of their losses, on every rank."""
        count = len(self._micro_batches)
        all_images = [micro_batch.images for micro_batch in self._micro_batches]
        shape = tuple(all_images[-1].shape)
        if shape not in self._schedule_by_shape:
            self._schedule_by_shape[shape] = self._made_schedule(shape, count)
        inputs = [torch.cat(all_images)] if self.wrapped.has_first_stage else []
        micro_batch_numbers = torch.arange(count)  # what `_loss` gets as labels
        losses: list[Tensor] = []
        self._bubble.enter_context(self._phase("bubble"))
        self._schedule_by_shape[shape].step(*inputs, target=micro_batch_numbers, losses=losses, return_outputs=False)
        for stage in self.wrapped.wrapped:
            if isinstance(stage, StageDdp):
                with self.working("backward"):
                    stage.end_exchange()
        total = torch.zeros((), device=self.device)
        for loss in losses:
            total += loss.detach() * self.train_spec.grad_accum
        # No rank waits for this: the first stage ends last, and the last one has had the losses for a while.
        dist.broadcast(total, group=self.wrapped.group, group_src=self.parallel.pipeline - 1)
        return total

    def before_forward(self, number: int) -> None:
        """Set, for this rank's norms, how many images of micro-batch `number` are not padding."""
        for norm in self._norms:
            norm.real = self._micro_batches[number].real_images

    @contextmanager
    def working(self, name: PhaseName) -> Iterator[None]:
        """The context in which a stage computes, in phase `name`; all other time of a schedule is the bubble."""
        self._bubble.close()
        with self._phase(name):
            yield
        self._bubble.enter_context(self._phase("bubble"))

    def _made_schedule(self, shape: tuple[int, ...], count: int) -> Any:
        """Make torch's schedule for micro-batches of one shape; it keeps buffers for them.

        Args:
            shape: [b, c, H, W] of each micro-batch.
            count: number of micro-batches.
        """
        images, _, height, width = shape
        handed_on = [self._stand_ins(images, shapes) for shapes in self.wrapped.shapes(height, width)]
        stages = [
            _Stage(self, stage, self._stage_number(index), handed_on)
            for index, stage in enumerate(self.wrapped.wrapped)
        ]
        name = self.parallel.schedule
        # Only the interleaved schedule takes several stages of a rank; with the others a rank has one.
        stages_to_run = stages if name == "interleaved" else stages[0]
        return _SCHEDULE_BY_NAME[name](stages_to_run, count, self._loss, scale_grads=False)

    def _stand_ins(self, images: int, shapes: TensorShapes) -> tuple[Tensor, ...]:
        """Return tensors like those that a stage hands on, without elements (device "meta").

        Args:
            images: number of images.
            shapes: the tensors' shapes for one image.
        """
        dtype = self.wrapped.dtype
        return tuple(torch.empty(images, *shape, dtype=dtype, device="meta").requires_grad_() for shape in shapes)

    def _stage_number(self, index: int) -> int:
        """Return the number, in the whole model, of this rank's stage with this index.

        Example: of two ranks rank 1 has the stages 1 and 3, so its stage with index 1 is number 3.
        """
        return self.wrapped.group.rank() + index * self.parallel.pipeline

    def _loss(self, logits: Tensor, number: Tensor) -> Tensor:
        """Return the loss of micro-batch `number`, from which its backward starts; the schedule calls this."""
        with self.working("forward"):
            loss_of = self._micro_batches[int(number)].loss_of
            return loss_of(logits.float()) / self.train_spec.grad_accum

    @override
    def evaluate(self, images: Tensor) -> Tensor | None:
        """Return logits on the rank of the last stage, and None on all others, which go on to the next images.

        Where the model resizes its logits to its images, this does it too. In training the loss does the same, to
        labels of the images' size.
        """
        staged = self.wrapped
        image_size = images.shape[2:]
        shapes = staged.shapes(*image_size)
        output: Any = images.to(self.input_dtype)
        staged.eval()
        for index, stage in enumerate(staged.wrapped):
            number = self._stage_number(index)
            inputs = (output,) if number == 0 else self._received(number, len(images), shapes[number - 1])
            module = stage.module if isinstance(stage, DistributedDataParallel) else stage
            with torch.no_grad(), self.autocast():
                output = module(*inputs)
            if number < self.parallel.stages - 1:
                self._send_on(number, output)
        staged.train()
        if not staged.has_last_stage:
            return None
        logits: Tensor = output
        if staged.resizes:
            logits = interpolate(logits, size=image_size, mode="bilinear", align_corners=False)
        return logits.float()

    def _received(self, number: int, images: int, shapes: TensorShapes) -> tuple[Tensor, ...]:
        """Return what the stage before stage `number` hands on, once its rank has sent it.

        Args:
            number: the number of the stage that receives.
            images: number of images.
            shapes: the tensors' shapes for one image.
        """
        source = (number - 1) % self.parallel.pipeline
        tensors = tuple(torch.empty(images, *shape, dtype=self.wrapped.dtype, device=self.device) for shape in shapes)
        for tensor in tensors:
            dist.recv(tensor, group=self.wrapped.group, group_src=source)
        return tensors

    def _send_on(self, number: int, output: Activation) -> None:
        """Send the output of stage `number` to the rank of the next stage."""
        target = (number + 1) % self.parallel.pipeline
        for tensor in (output,) if isinstance(output, Tensor) else output:
            dist.send(tensor, group=self.wrapped.group, group_dst=target)

    @property
    @override
    def unknown_parts(self) -> dict[str, str]:
        if self.device.type != "cuda":
            return {}
        return dict.fromkeys(("bubble", "wait", "wire"), _WHY_UNKNOWN_ON_GPU)

    @property
    @override
    def module(self) -> nn.Module:
        """This rank's stages, under the names of the whole model."""
        return self.wrapped.local_modules

    @override
    def whole_tensors(self) -> WholeTensors:
        return _WholeTensors(self.wrapped, self.optimizer, self.train_spec.optimizer)


class _MicroBatch(NamedTuple):
    """A micro-batch that waits for the step's schedule."""

    images: Tensor
    loss_of: LossOf
    real_images: int | None
    """Number of images that norms are taken over; None: all, or the model has no norms."""


def pipelined(kind: type[Engine]) -> type[Engine]:
    """Return the engine that treats a model in stages as `kind` treats a whole one.

    Raises:
        TypeError: `kind` is no `TorchEngine`.
    """
    if not issubclass(kind, TorchEngine):
        raise TypeError(f"{kind.__name__} takes no model in stages")
    return type(f"Pipelined{kind.__name__}", (PipelineEngine, kind), {})


class _Stage(PipelineStage):
    """torch's stage, which also enters the engine's phases when it computes."""

    def __init__(
        self, engine: PipelineEngine, wrapped: nn.Module, number: int, handed_on: Sequence[tuple[Tensor, ...]]
    ) -> None:
        """Make the stage of this number in the whole model.

        Args:
            engine: the engine whose phases it enters.
            wrapped: the stage's modules.
            number: the number of the stage.
            handed_on: tensors like those that each stage but the last hands on, stage by stage. As they are known,
                torch need not find them out by passes that train nothing.
        """
        stages = len(handed_on) + 1
        is_first = number == 0
        is_last = number == stages - 1
        # The first stage's input and the last one's output are not sent, and any tensor will do for them.
        inputs = handed_on[0][:1] if is_first else handed_on[number - 1]
        outputs = handed_on[-1][:1] if is_last else handed_on[number]
        super().__init__(wrapped, number, stages, engine.device, inputs, outputs, group=engine.wrapped.group)
        self._engine = engine

    @override
    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._engine.before_forward(fwd_chunk_id)
        with self._engine.working("forward"), self._engine.autocast():
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    @override
    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self._engine.working("backward"):
            super().backward_one_chunk(*args, **kwargs)

    @override
    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        with self._engine.working("backward"):
            super().perform_reduce_grad(grad_scale_factor)


class _WholeTensors(TorchTensors):
    """Whole tensors of all stages: the rank that holds a tensor sends it to the others."""

    def __init__(self, stages: StagedModel, optimizer: torch.optim.Optimizer, optimizer_name: str) -> None:
        super().__init__(stages.local_modules, optimizer, optimizer_name)
        self._stages = stages
        self._local_parameters = self.parameters
        self._local_buffers = self.buffers
        self.parameters = stages.parameters_of_model | self._local_parameters
        self.buffers = stages.buffers_of_model | self._local_buffers
        self.trained = [name for name, parameter in self.parameters.items() if parameter.requires_grad]
        # Each rank trains some: no optimizer is made without a parameter.
        self._first_local_trained = next(name for name in self.trained if name in self._local_parameters)

    @override
    def weight(self, name: str) -> Tensor:
        return self._from_holder(name, lambda: super(_WholeTensors, self).weight(name))

    @override
    def set_weight(self, name: str, full_tensor: Tensor) -> None:
        if name in self._local_parameters:
            super().set_weight(name, full_tensor)

    @override
    def has_state(self, name: str, key: str) -> bool:
        """Return whether there is a state of a parameter.

        Of a parameter on another rank there is one if there is one of the first that this rank trains: a step updates
        all stages.
        """
        local_name = name if name in self._local_parameters else self._first_local_trained
        return super().has_state(local_name, key)

    @override
    def state(self, name: str, key: str) -> Tensor:
        return self._from_holder(name, lambda: super(_WholeTensors, self).state(name, key))

    @override
    def set_state(self, name: str, key: str, full_tensor: Tensor) -> None:
        if name in self._local_parameters:
            super().set_state(name, key, full_tensor)

    @override
    def make_states(self, names: Iterable[str], keys: Iterable[str], steps: int) -> None:
        super().make_states([name for name in names if name in self._local_parameters], keys, steps)

    @override
    def buffer(self, name: str) -> Tensor:
        buffer = self.buffers[name]
        if name not in self._local_buffers:
            buffer = torch.empty_like(buffer, device=self._device)
        return self._broadcast(name, buffer)

    @override
    def set_buffer(self, name: str, full_tensor: Tensor) -> None:
        if name in self._local_buffers:
            super().set_buffer(name, full_tensor)

    def _from_holder(self, name: str, local_tensor: Callable[[], Tensor]) -> Tensor:
        """Return a tensor in fp32 on all ranks, from the rank that holds the parameter `name`.

        Args:
            name: the parameter to which the tensor belongs, and whose shape it has.
            local_tensor: returns it; called on the rank that holds the parameter.
        """
        if name in self._local_parameters:
            return self._broadcast(name, local_tensor().float())
        return self._broadcast(name, torch.empty(self.shape(name), device=self._device))

    def _broadcast(self, name: str, tensor: Tensor) -> Tensor:
        """Return, on all ranks, the tensor of the rank that owns the parameter or buffer of this name.

        Args:
            name: the parameter or buffer.
            tensor: what the owner sends; on other ranks any tensor of the same shape, which is overwritten.
        """
        contiguous = tensor.contiguous()
        dist.broadcast(contiguous, group=self._stages.group, group_src=self._stages.holder_by_name[name])
        return contiguous

    @property
    def _device(self) -> torch.device:
        return next(iter(self._local_parameters.values())).device
