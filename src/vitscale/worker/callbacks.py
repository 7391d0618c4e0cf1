"""Callbacks that mark a library's optimizer steps by a Probe.

They are for Hugging Face's Trainer, for Lightning, and for loops with Composer's events. Each imports its library only
when it is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from vitscale.worker.probe import Current, Probe
from vitscale.worker.script_arguments import images_of


class _EventSteps:
    """Steps and pauses of a library's trainer: one of its events begins them, and another ends them.

    A step is under way, or a pause, or neither: `begin` begins a step, `pause` a pause, and `end` ends either. A pause
    within a step drops the step: what the library then trains of it belongs to no step, so the pause goes on until the
    library's next step begins. Outside a study every method does nothing.
    """

    def __init__(self) -> None:
        self.probe = Probe()
        self._script_steps = Current.script_steps
        self._images: int | None = None
        """Images so far of the step under way; None between steps."""
        self._is_last = False
        """Whether that step is its loader's last."""
        self._pause: AbstractContextManager[None] | None = None
        """The pause under way; None outside of one."""
        self._pause_dropped_step = False
        """Whether that pause began within a step."""

    def begin(self, images: int, *, last: bool = False) -> None:
        """Begins an optimizer step, unless one has begun. A pause under way ends first.

        Args:
            images: images of its first micro-step, or of the whole step.
            last: whether it is its loader's last, which may have fewer images than the others.
        """
        if self._pause is not None:
            self.end()
        if self._images is not None:
            return
        self._images = images
        self._is_last = last
        if self._script_steps is not None:
            self._script_steps.begin_step()

    def add(self, images: int) -> None:
        """Adds the images of a further micro-step to the step that has begun."""
        if self._images is not None:
            self._images += images

    def pause(self) -> None:
        """Begins a pause, unless one has begun. A step that has begun is dropped: it would hold the pause's time."""
        if self._pause is not None:
            return
        self._pause_dropped_step = self._images is not None
        self._images = None
        if self._pause_dropped_step and self._script_steps is not None:
            self._script_steps.drop_step()
        pause = self.probe.pause()
        pause.__enter__()
        self._pause = pause

    def resume(self) -> None:
        """Ends a pause under way, unless it has dropped a step: the rest of that step belongs to none."""
        if self._pause is not None and not self._pause_dropped_step:
            self.end()

    def end(self) -> bool:
        """Ends the step or the pause under way, if there is one; returns whether enough is measured."""
        pause = self._pause
        images = self._images
        self._pause = None
        self._images = None
        if pause is not None:
            pause.__exit__(None, None, None)
        elif images is not None and self._script_steps is not None:
            self._script_steps.end_step(images, allow_fewer_images=self._is_last)
        return self.probe.done


def _images_of_steps(args: Any, loader: Any) -> Sequence[int]:
    """Returns the images of this process in each of an epoch's steps under `transformers.Trainer`; empty if unknown.

    The last step may have fewer micro-steps than the others. A process that is alone may also have a smaller last
    batch. Several processes never do: the Trainer fills their last batches with images a second time.

    Example: 10 batches of 8 images with 4 micro-steps to a step give [32, 32, 16].

    Args:
        args: the Trainer's arguments.
        loader: gives this process's batches.
    """
    micro_batch = args.per_device_train_batch_size
    accumulate = args.gradient_accumulation_steps
    try:
        batches = len(loader)
        samples = len(loader.dataset)
    except (TypeError, AttributeError):  # a stream
        return ()
    if batches == 0:
        return ()
    batch_sizes = [micro_batch] * batches
    if args.world_size == 1 and not args.dataloader_drop_last:
        batch_sizes[-1] = samples - micro_batch * (batches - 1)
    if not 1 <= batch_sizes[-1] <= micro_batch:  # a sampler of its own, or several devices in one process
        return ()
    return [sum(batch_sizes[first : first + accumulate]) for first in range(0, batches, accumulate)]


def trainer_callback() -> Any:
    """Makes a callback for `transformers.Trainer(callbacks=[...])`; it ends training when enough is measured."""
    from transformers import TrainerCallback

    steps = _EventSteps()

    class ProbeCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
        """Marks the Trainer's optimizer steps, without evaluations and saving."""

        images: Sequence[int] = ()
        """Images of this process in each step of an epoch; empty: in all alike."""

        def on_train_begin(
            self, args: Any, _state: Any, _control: Any, model: Any = None, train_dataloader: Any = None, **_: Any
        ) -> None:
            """Says how many parameters there are."""
            steps.probe.describe(model)
            self.images = _images_of_steps(args, train_dataloader)

        def on_step_begin(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
            """Begins a step before its first micro-step."""
            images = args.per_device_train_batch_size * args.gradient_accumulation_steps
            if self.images:
                images = self.images[state.global_step % len(self.images)]
            steps.begin(images)

        def on_step_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
            """Ends a step after the optimizer's."""
            if steps.end():
                control.should_training_stop = True

        def on_evaluate(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
            """Marks a pause, because what came before was no training."""
            steps.pause()
            steps.end()

        on_save = on_evaluate
        on_epoch_begin = on_evaluate

    return ProbeCallback()


def lightning_callback() -> Any:
    """Makes a callback for `lightning.Trainer(callbacks=[...])`; it ends training when enough is measured."""
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback
    steps = _EventSteps()

    class ProbeCallback(Callback):  # type: ignore[misc]  # where Lightning is not installed it is of any type
        """Marks Lightning's optimizer steps, each of `accumulate_grad_batches` batches."""

        def on_train_start(self, _trainer: Any, pl_module: Any) -> None:
            """Says how many parameters there are."""
            steps.probe.describe(pl_module)

        def on_train_epoch_start(self, _trainer: Any, _pl_module: Any) -> None:
            """Marks a pause, because what came before was no training."""
            steps.pause()
            steps.end()

        def on_train_batch_start(self, trainer: Any, _pl_module: Any, batch: Any, batch_idx: int) -> None:
            """Begins a step before its first micro-step, where the loader still has all of them."""
            accumulate = trainer.accumulate_grad_batches
            remaining_batches = trainer.num_training_batches - batch_idx  # infinite where the loader has no length
            is_first_of_step = batch_idx % accumulate == 0
            if not is_first_of_step:
                steps.add(images_of(batch))
            elif remaining_batches < accumulate:
                steps.pause()
            else:
                steps.begin(images_of(batch), last=remaining_batches == accumulate)

        def on_train_batch_end(self, trainer: Any, _pl_module: Any, _outputs: Any, _batch: Any, batch_idx: int) -> None:
            """Ends a step after its last micro-step, and what fills none after the loader's last batch."""
            is_last_batch = batch_idx + 1 == trainer.num_training_batches
            is_step_over = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
            if (is_last_batch or is_step_over) and steps.end():
                trainer.should_stop = True

        def on_validation_start(self, _trainer: Any, _pl_module: Any) -> None:
            """Begins a pause for an evaluation."""
            steps.pause()

        def on_validation_end(self, _trainer: Any, _pl_module: Any) -> None:
            """Ends the pause after an evaluation."""
            steps.resume()

    return ProbeCallback()


def _is_last(state: Any) -> bool:
    """Whether the batch that begins is its loader's last; False where a loop's state does not say."""
    batches = getattr(state, "dataloader_len", None)
    progress = getattr(state, "timestamp", None)
    if batches is None or progress is None:
        return False
    return int(progress.batch_in_epoch) + 1 == int(batches)


def composer_callback() -> Any:
    """Makes a callback for Composer's Trainer, and for loops with its events whose batches are optimizer steps."""
    try:
        from composer import Callback
    except ImportError:
        Callback = object
    steps = _EventSteps()

    class ProbeCallback(Callback):  # type: ignore[misc]  # where Composer is not installed it is of any type
        """Marks a loop's batches, each an optimizer step."""

        def epoch_start(self, _state: Any, _logger: Any) -> None:
            """Marks a pause, because what came before was no training."""
            steps.pause()
            steps.end()

        def batch_start(self, state: Any, _logger: Any) -> None:
            """Begins a step before a batch's first micro-step."""
            steps.begin(images_of(state.batch), last=_is_last(state))

        def batch_end(self, state: Any, _logger: Any) -> None:
            """Ends a step after the optimizer's."""
            if steps.end():
                state.stop_training()

        def eval_start(self, _state: Any, _logger: Any) -> None:
            """Begins a pause for an evaluation."""
            steps.pause()

        def eval_end(self, _state: Any, _logger: Any) -> None:
            """Ends the pause after an evaluation."""
            steps.resume()

    return ProbeCallback()
