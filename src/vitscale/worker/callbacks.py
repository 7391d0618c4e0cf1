"""A Probe as a callback: for Hugging Face's Trainer, for Lightning, and for loops with Composer's events.

Each is made by a function, so that a library is imported where its callback is asked for.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from vitscale.worker.probe import Probe, images_of


class _Steps:
    """Steps and pauses that begin in one call and end in another."""

    def __init__(self) -> None:
        self.probe = Probe()
        self._entered: AbstractContextManager[None] | None = None

    def begin(self, images: int) -> None:
        """An optimizer step, unless one has begun."""
        if self._entered is None:
            self._enter(self.probe.step(images))

    def pause(self) -> None:
        """Something else than training; a step that has not ended is none."""
        if self._entered is None:
            self._enter(self.probe.pause())

    def end(self) -> bool:
        """Ends what has begun; returns whether enough is measured."""
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.__exit__(None, None, None)
        return self.probe.done

    def _enter(self, context: AbstractContextManager[None]) -> None:
        context.__enter__()
        self._entered = context


def trainer_callback() -> Any:
    """For `transformers.Trainer(callbacks=[...])`: ends training when enough is measured."""
    from transformers import TrainerCallback

    class ProbeCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
        """Tells a Probe of the Trainer's optimizer steps; what it evaluates and saves is none of them."""

        def __init__(self) -> None:
            self._steps = _Steps()

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            """Tells how many parameters there are."""
            del args, state, control
            self._steps.probe.describe(model)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Before the first micro-step."""
            del state, control
            self._steps.begin(args.per_device_train_batch_size * args.gradient_accumulation_steps)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """After the optimizer's step."""
            del args, state
            if self._steps.end():
                control.should_training_stop = True

        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """After an evaluation."""
            del args, state, control
            self._steps.pause()
            self._steps.end()

        on_save = on_evaluate
        on_epoch_begin = on_evaluate

    return ProbeCallback()


def lightning_callback() -> Any:
    """For `lightning.Trainer(callbacks=[...])`: ends training when enough is measured."""
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback

    class ProbeCallback(Callback):  # type: ignore[misc]  # where Lightning is not installed it is of any type
        """Tells a Probe of Lightning's optimizer steps: of each `accumulate_grad_batches` batches."""

        def __init__(self) -> None:
            self._steps = _Steps()

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """Tells how many parameters there are."""
            del trainer
            self._steps.probe.describe(pl_module)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            """Before each micro-step."""
            del pl_module, batch_idx
            self._steps.begin(images_of(batch) * trainer.accumulate_grad_batches)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            """After each micro-step."""
            del pl_module, outputs, batch
            if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 and self._steps.end():
                trainer.should_stop = True

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            """Evaluation begins."""
            del trainer, pl_module
            self._steps.pause()

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            """Evaluation is over."""
            del trainer, pl_module
            self._steps.end()

    return ProbeCallback()


def composer_callback() -> Any:
    """For loops with Composer's events, of which each batch is an optimizer step, and for Composer's own Trainer."""
    try:
        from composer import Callback
    except ImportError:
        Callback = object

    class ProbeCallback(Callback):  # type: ignore[misc]  # transformers is untyped
        """Tells a Probe of a loop's batches."""

        def __init__(self) -> None:
            self._steps = _Steps()

        def batch_start(self, state: Any, logger: Any) -> None:
            """Before a batch's first micro-step."""
            del logger
            self._steps.begin(images_of(state.batch))

        def batch_end(self, state: Any, logger: Any) -> None:
            """After the optimizer's step."""
            del logger
            if self._steps.end():
                state.stop_training()

        def eval_start(self, state: Any, logger: Any) -> None:
            """Evaluation begins."""
            del state, logger
            self._steps.pause()

        def eval_end(self, state: Any, logger: Any) -> None:
            """Evaluation is over."""
            del state, logger
            self._steps.end()

    return ProbeCallback()
