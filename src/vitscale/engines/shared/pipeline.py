"""Pipeline parallelism by `torch.distributed.pipelining`: a step's micro-batches flow through the ranks' stages.

The training loop stays as it is. `micro_step` keeps its micro-batches until the step's last one; then the schedule runs
all of them, each rank its own stages. The rank of the last stage has the losses; the others are told their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.functional import interpolate
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from vitscale.engines.base import Engine, LossOf, TorchEngine
from vitscale.engines.ddp.wrap import StageDdp
from vitscale.engines.shared.stages import Stages
from vitscale.engines.shared.whole_tensors import TorchTensors, WholeTensors
from vitscale.models.batch_norm import norms_of
from vitscale.probes.steps import Phase, no_phase
from vitscale.store.records import PhaseName
from vitscale.trial.trial import Trial

_SCHEDULES: dict[str, Callable[..., Any]] = {
    "gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B,
}  # fmt: skip
_ON_DEVICE = "on a GPU a stage waits inside NCCL's kernels, where waiting for a stage is not told from a transfer"


class PipelineEngine(TorchEngine):
    """A schedule over the ranks that hold the stages of one model.

    What ranks with the same stages do among themselves comes from the engine that it is combined with: see `pipelined`.
    """

    wrapped: Stages

    def __init__(self, model: nn.Module, trial: Trial, device: torch.device) -> None:
        super().__init__(model, trial, device)
        self.parallel = trial.parallel
        self._images: list[Tensor] = []
        self._losses_of: list[LossOf] = []
        self._norms = norms_of(self.module)
        self._real: list[int | None] = []
        """Number of images of each micro-batch that norms are taken over."""
        self._schedules: dict[tuple[int, ...], Any] = {}
        self._bubble = ExitStack()
        self._phase: Phase = no_phase

    @override
    def micro_step(self, images: Tensor, loss_of: LossOf, *, last: bool, phase: Phase = no_phase) -> Tensor:
        """Keeps a micro-batch; the `last` one of a step takes all of them forward and backward.

        Returns:
            The sum of the step's losses, on every rank, for the last micro-batch; 0 for the others.
        """
        self._images.append(images.to(self.input_dtype))
        self._losses_of.append(loss_of)
        self._real += [norm.real for norm in self._norms[:1]]
        total = torch.zeros((), device=self.device)
        if not last:
            return total
        self._phase = phase
        count, size = len(self._images), tuple(images.shape)
        if size not in self._schedules:
            self._schedules[size] = self._schedule(size, count)
        first = [torch.cat(self._images)] if self.wrapped.first else []
        losses: list[Tensor] = []
        try:
            self._bubble.enter_context(phase("bubble"))
            self._schedules[size].step(*first, target=torch.arange(count), losses=losses, return_outputs=False)
            for stage in self.wrapped.wrapped:
                if isinstance(stage, StageDdp):
                    with self.working("backward"):
                        stage.end_exchange()
            for loss in losses:
                total += loss.detach() * self.train_spec.grad_accum
            # No rank waits for this: the first stage ends last, and the last one has had the losses for a while.
            dist.broadcast(total, group=self.wrapped.group, group_src=self.parallel.pipeline - 1)
        finally:
            self._bubble.close()
            self._images.clear()
            self._losses_of.clear()
            self._real.clear()
        return total

    def before_forward(self, number: int) -> None:
        """Tells this rank's norms how many images of micro-batch `number` are not padding, as noted in `micro_step`."""
        for norm in self._norms:
            norm.real = self._real[number]

    @contextmanager
    def working(self, name: PhaseName) -> Iterator[None]:
        """The context in which a stage computes: all other time of a schedule is the bubble."""
        self._bubble.close()
        with self._phase(name):
            yield
        self._bubble.enter_context(self._phase("bubble"))

    def _schedule(self, size: tuple[int, ...], count: int) -> Any:
        """The schedule for micro-batches of shape `size`: torch's schedules keep buffers of one shape."""
        parallel, held = self.parallel, self.wrapped
        given = [
            tuple(torch.empty(size[0], *shape, dtype=held.dtype, device="meta").requires_grad_() for shape in shapes)
            for shapes in held.shapes(*size[2:])
        ]
        stages = [
            _Stage(self, wrapped, held.group.rank() + index * parallel.pipeline, given)
            for index, wrapped in enumerate(held.wrapped)
        ]
        return _SCHEDULES[parallel.schedule](
            stages if parallel.schedule == "interleaved" else stages[0], count, self._loss, scale_grads=False
        )

    def _loss(self, logits: Tensor, number: Tensor) -> Tensor:
        """The loss of micro-batch `number`, from which its backward starts."""
        with self.working("forward"):
            return self._losses_of[int(number)](logits.float()) / self.train_spec.grad_accum

    @override
    def evaluate(self, images: Tensor) -> Tensor | None:
        """Logits on the rank of the last stage; the others send on what they have, and go on to the next images.

        Where the model resizes its logits to its images, this does it too. In training the loss does the same, to
        labels of the images' size.
        """
        held, ranks = self.wrapped, self.parallel.pipeline
        last, shapes = self.parallel.stages - 1, held.shapes(*images.shape[2:])
        given: Any = images.to(self.input_dtype)
        held.eval()
        for index, stage in enumerate(held.wrapped):
            number = held.group.rank() + index * ranks
            taken: tuple[Tensor, ...] = (given,)
            if number > 0:
                taken = tuple(
                    torch.empty(len(images), *shape, dtype=held.dtype, device=self.device)
                    for shape in shapes[number - 1]
                )
                for tensor in taken:
                    dist.recv(tensor, group=held.group, group_src=(number - 1) % ranks)
            with torch.no_grad(), self.autocast():
                given = (stage.module if isinstance(stage, DistributedDataParallel) else stage)(*taken)
            if number < last:
                for tensor in (given,) if isinstance(given, Tensor) else given:
                    dist.send(tensor, group=held.group, group_dst=(number + 1) % ranks)
        held.train()
        if held.last and held.resizes:
            given = interpolate(given, size=images.shape[2:], mode="bilinear", align_corners=False)
        return given.float() if held.last else None

    @property
    @override
    def unknown_parts(self) -> dict[str, str]:
        return {"bubble": _ON_DEVICE, "wait": _ON_DEVICE, "wire": _ON_DEVICE} if self.device.type == "cuda" else {}

    @property
    @override
    def module(self) -> nn.Module:
        """This rank's stages, under the names of the whole model."""
        return self.wrapped.own

    @override
    def whole_tensors(self) -> WholeTensors:
        return _WholeTensors(self.wrapped, self.optimizer, self.train_spec.optimizer)


def pipelined(kind: type[Engine]) -> type[Engine]:
    """The engine that treats a model in stages as `kind` treats a whole one.

    Raises:
        TypeError: `kind` is no `TorchEngine`.
    """
    if not issubclass(kind, TorchEngine):
        raise TypeError(f"{kind.__name__} takes no model in stages")
    return type(f"Pipelined{kind.__name__}", (PipelineEngine, kind), {})


class _Stage(PipelineStage):
    """torch's stage, which also tells the engine when it computes."""

    def __init__(
        self, engine: PipelineEngine, wrapped: nn.Module, number: int, handed_on: Sequence[tuple[Tensor, ...]]
    ) -> None:
        """`handed_on`: tensors like those that each stage but the last hands on.

        As they are known, torch need not find them out by passes that train nothing. The first stage's input and the
        last one's output are not sent, and any tensor will do for them.
        """
        taken, given = handed_on[max(number - 1, 0)], handed_on[min(number, len(handed_on) - 1)]
        taken, given = taken if number else taken[:1], given if number < len(handed_on) else given[:1]
        super().__init__(wrapped, number, len(handed_on) + 1, engine.device, taken, given, group=engine.wrapped.group)
        self._engine = engine

    @override
    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        self._engine.before_forward(fwd_chunk_id)
        with self._engine.working("forward"), self._engine.autocast():
            return super().forward_one_chunk(fwd_chunk_id, *arguments, **named)

    @override
    def backward_one_chunk(self, *arguments: Any, **named: Any) -> None:
        with self._engine.working("backward"):
            super().backward_one_chunk(*arguments, **named)

    @override
    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        with self._engine.working("backward"):
            super().perform_reduce_grad(grad_scale_factor)


class _WholeTensors(TorchTensors):
    """Whole tensors of all stages: the rank that holds a tensor sends it to the others."""

    def __init__(self, stages: Stages, optimizer: torch.optim.Optimizer, kind: str) -> None:
        super().__init__(stages.own, optimizer, kind)
        self._stages, self._own, self._own_buffers = stages, self.parameters, self.buffers
        self.parameters = stages.of_model | self._own
        self.buffers = stages.buffers_of_model | self._own_buffers
        self.trained = [name for name, parameter in self.parameters.items() if parameter.requires_grad]
        # No optimizer is made without any.
        self._first_trained = next(name for name in self.trained if name in self._own)

    @override
    def weight(self, name: str) -> Tensor:
        return self._sent(name, lambda: super(_WholeTensors, self).weight(name))

    @override
    def set_weight(self, name: str, whole: Tensor) -> None:
        if name in self._own:
            super().set_weight(name, whole)

    @override
    def has_state(self, name: str, key: str) -> bool:
        """Whether there is state; for another rank's parameter as for the first that this rank trains: a step updates
        all stages."""
        return super().has_state(name if name in self._own else self._first_trained, key)

    @override
    def state(self, name: str, key: str) -> Tensor:
        return self._sent(name, lambda: super(_WholeTensors, self).state(name, key))

    @override
    def set_state(self, name: str, key: str, whole: Tensor) -> None:
        if name in self._own:
            super().set_state(name, key, whole)

    @override
    def make_states(self, names: Any, keys: Any, steps: int) -> None:
        super().make_states([name for name in names if name in self._own], keys, steps)

    @override
    def buffer(self, name: str) -> Tensor:
        like = self.buffers[name]
        return self._broadcast(name, like if name in self._own_buffers else torch.empty_like(like, device=self._device))

    @override
    def set_buffer(self, name: str, whole: Tensor) -> None:
        if name in self._own_buffers:
            super().set_buffer(name, whole)

    def _sent(self, name: str, take: Callable[[], Tensor]) -> Tensor:
        own = name in self._own
        return self._broadcast(name, take().float() if own else torch.empty(self.shape(name), device=self._device))

    def _broadcast(self, name: str, held: Tensor) -> Tensor:
        whole = held.contiguous()
        dist.broadcast(whole, group=self._stages.group, group_src=self._stages.owners[name])
        return whole

    @property
    def _device(self) -> torch.device:
        return next(iter(self._own.values())).device
