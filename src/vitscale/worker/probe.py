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
        """Returns a context for one optimizer step with all of its micro-steps: `with probe.step(images):`.

        A step is timed from the end of the step before, so the wait for its data counts wherever the data is fetched.
        What is not training goes into `pause`, between two steps.

        Args:
            images: number of images that this rank trains in the step, without padding. It has to be the study's
                micro_batch x grad_accum.

        Raises:
            ValueError: it is another number.
        """
        return _NOTHING if self._script_steps is None else self._script_steps.one_step(images)

    def steps(
        self, loader: Iterable[Item], accumulate: int = 1, images: int | Callable[[Item], int] | None = None
    ) -> Iterable[Item]:
        """Yields the batches of `loader`, and marks `accumulate` of them as one step: `for batch in probe.steps(...)`.

        A step ends when the loop asks for the next batch after the step's last one. It ends earlier if the loop pauses
        (`pause`) or is left (`break`) after that batch has been trained, which a Probe knows from the step of one of
        torch's optimizers. If the loop pauses or is left before that, the step is dropped: it is not recorded. The
        run's log says how many steps were dropped because the loop was left.

        The batches end early when enough is measured.

        The last step of a loader may have fewer images than the others. Batches at the loader's end that are too few
        for a step are yielded too, and belong to no step.

        Args:
            loader: gives this rank's batches.
            accumulate: number of batches (micro-steps) in an optimizer step, as in the study.
            images: number of images of this rank in a whole step, or a function that returns the number of images in a
                batch. None: the length of the first tensor in a batch.

        Raises:
            ValueError: the number of images or of micro-steps is not the study's.
        """
        return loader if self._script_steps is None else self._script_steps.batches(loader, accumulate, images)

    def pause(self) -> AbstractContextManager[None]:
        """Returns a context for what is not training, such as an evaluation or a checkpoint: `with probe.pause():`.

        It stands between two steps, and every rank pauses there. In a loop over `steps`, "between two steps" is after
        the optimizer's step; a pause before the optimizer's step drops the step.
        """
        return _NOTHING if self._script_steps is None else self._script_steps.pause()

    def phase(self, name: ScriptPhase) -> AbstractContextManager[object]:
        """Returns a context for a part of a step: `with probe.phase("forward"):`. Profiles then show these parts.

        Raises:
            ValueError: on entering the context, if `name` is not one of the five.
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
        """Describes what is trained. What is left out stays unknown, and so do the MFU and the volumes that need it.

        Args:
            model: the model before it is sharded; its parameters are counted, and so are its FLOPs, where a copy of it
                on meta tensors can run.
            parameters: number of parameters, in place of `model`.
            flops_per_image: FLOPs of training on one image, forward and backward (1 MAC = 2 FLOP), in place of those
                of `model`.
            precision: precision by the study's name ("bf16").

        Raises:
            ValueError: another precision than the study's.
        """
        if self._script_steps is None:
            return
        if model is not None and parameters is None:
            counted = sum(_elements_of_parameter(parameter) for parameter in model.parameters())
            self._script_steps.describe(counted, flops_per_image, precision, model, parameters_source="measured")
        else:
            self._script_steps.describe(parameters, flops_per_image, precision, model)


def _elements_of_parameter(parameter: Any) -> int:
    """Returns the number of elements of a whole parameter.

    ZeRO-3 leaves each rank an empty tensor, and notes the number of elements in its `ds_numel`.
    """
    return int(getattr(parameter, "ds_numel", parameter.numel()))
