"""`from vitscale import Probe`: with it a user's own training script marks its steps.

Outside a study every method is a single branch and nothing is imported, so a Probe can stay in the code. Inside a
study, the rank that runs the script (`run_script` in `vitscale.worker.__main__`) puts here what measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from vitscale.worker.script_arguments import ScriptPhase

if TYPE_CHECKING:  # torch, which these import, is for the script to import
    import torch

    from vitscale.worker.script_steps import ScriptSteps

Item = TypeVar("Item")
_NOTHING: AbstractContextManager[None] = nullcontext()


class Current:
    """State of this process."""

    start: Callable[[], ScriptSteps] | None = None
    """Begins to measure; None outside a study, and in processes that the script starts."""
    script_steps: ScriptSteps | None = None


class Probe:
    """Marks the optimizer steps of your own training script, so that a study can measure them.

    Make one on every rank; several in one process are the same. This script trains by itself (`python train.py`), and
    `vitscale run` measures it in a study that has `script = "train.py"` and `micro_batch = 8` in its [train]:

        import torch
        from vitscale import Probe

        model = torch.nn.Linear(12, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = [(torch.randn(8, 12), torch.randint(10, (8,))) for _ in range(20)]

        probe = Probe()
        probe.describe(model)
        for epoch in range(3):
            for images, labels in probe.steps(loader):  # in place of `in loader`
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                probe.loss(loss)
            with probe.pause():  # what is no training
                accuracy = (model(images).argmax(dim=1) == labels).float().mean()
            if probe.done:  # never outside a study
                break
    """

    def __init__(self) -> None:
        if Current.script_steps is None and Current.start is not None:
            Current.script_steps = Current.start()
        self._script_steps = Current.script_steps

    @property
    def done(self) -> bool:
        """Whether enough is measured, so that the script may end; always False outside a study."""
        return self._script_steps is not None and self._script_steps.done

    def step(self, images: int) -> AbstractContextManager[None]:
        """Context for one optimizer step with all of its micro-steps.

        A step is timed from the end of the one before, so that the wait for its data counts wherever that is fetched;
        for what is no training between two steps see `pause`.

        Args:
            images: images that this rank trains in it, without padding: the study's micro_batch x grad_accum.

        Raises:
            ValueError: of other images than that.
        """
        return _NOTHING if self._script_steps is None else self._script_steps.one_step(images)

    def steps(
        self, loader: Iterable[Item], accumulate: int = 1, images: int | Callable[[Item], int] | None = None
    ) -> Iterable[Item]:
        """Yields the batches of `loader`, every `accumulate` of which are a step: `for batch in probe.steps(...)`.

        A step ends where the loop asks for the batch after its last one, or before that pauses or is left (`break`)
        after an optimizer's step; left before that, it is dropped, and the run's log says how many steps were. The
        batches end early when enough is measured.
        The last step of a loader may have fewer images than the others; batches that do not fill a step belong to none.

        Args:
            loader: gives this rank's batches.
            accumulate: micro-steps of an optimizer step.
            images: images of this rank in a whole step, or a function of a batch. None: the length of the first tensor
                in a batch.

        Raises:
            ValueError: other images or micro-steps than the study says.
        """
        return loader if self._script_steps is None else self._script_steps.batches(loader, accumulate, images)

    def pause(self) -> AbstractContextManager[None]:
        """Context for what is not training (evaluation, a checkpoint), between two steps and on every rank alike.

        In a loop over `steps` that is after the optimizer's step: a pause before it drops the step.
        """
        return _NOTHING if self._script_steps is None else self._script_steps.pause()

    def phase(self, name: ScriptPhase) -> AbstractContextManager[object]:
        """Context for a part of a step; profiled steps are then divided into these parts.

        Raises:
            ValueError: on entering it, for another name than the five.
        """
        return _NOTHING if self._script_steps is None else self._script_steps.phase(name)

    def loss(self, value: torch.Tensor | float) -> None:
        """Records the loss of a micro-step within its step; does not wait for the device."""
        if self._script_steps is not None:
            self._script_steps.add_loss(value)

    def describe(
        self,
        model: torch.nn.Module | None = None,
        *,
        parameters: int | None = None,
        flops_per_image: float | None = None,
        precision: str | None = None,
    ) -> None:
        """Says what is trained; what is left out stays unknown, and with it MFU and volumes.

        Args:
            model: the model whose parameters are counted, before it is sharded.
            parameters: their number.
            flops_per_image: FLOPs of training one image, forward and backward (1 MAC = 2 FLOP).
            precision: precision in the study's words ("bf16").

        Raises:
            ValueError: another precision than the study's.
        """
        if self._script_steps is None:
            return
        if model is not None and parameters is None:
            parameters = sum(_elements(parameter) for parameter in model.parameters())
        self._script_steps.describe(parameters, flops_per_image, precision)


def _elements(parameter: Any) -> int:
    """Elements of the full tensor: ZeRO-3 leaves an empty one, and notes how many it had."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
