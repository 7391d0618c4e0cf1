"""`from vitscale import Probe`: with it a user's own training script tells of its steps.

Outside a study every method is a single branch and nothing is imported, so a Probe can stay in the code. Inside a
study, the rank that runs the script (`run_script` in `vitscale.worker.__main__`) puts here what measures. Functions
make callbacks with a Probe for Hugging Face's Trainer, for Lightning, and for loops with Composer's events; each
imports its library only when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    import torch

    from vitscale.worker.measuring import Measuring

Item = TypeVar("Item")
Phase = Literal["data", "h2d", "forward", "backward", "optimizer"]
_NOTHING: AbstractContextManager[None] = nullcontext()


class Current:
    """State of this process."""

    start: Callable[[], Measuring] | None = None
    """Begins to measure; None outside a study, and in processes that the script starts."""
    measuring: Measuring | None = None


class Probe:
    """Tells vitscale which optimizer steps a script takes. Make one on every rank; all of a process are the same."""

    def __init__(self) -> None:
        if Current.measuring is None and Current.start is not None:
            Current.measuring = Current.start()
        self._measuring = Current.measuring

    @property
    def done(self) -> bool:
        """Whether enough is measured, so that the script may end; always False outside a study."""
        return self._measuring is not None and self._measuring.done

    def step(self, images: int) -> AbstractContextManager[None]:
        """Context for one optimizer step with all of its micro-steps.

        A step is timed from the end of the one before, so that the wait for its data counts wherever that is fetched;
        for what is no training between two steps see `pause`.

        Args:
            images: images that this rank trains in it, without padding: the study's micro_batch x grad_accum.

        Raises:
            ValueError: of other images than that.
        """
        return _NOTHING if self._measuring is None else self._measuring.one_step(images)

    def steps(
        self, loader: Iterable[Item], accumulate: int = 1, images: int | Callable[[Item], int] | None = None
    ) -> Iterable[Item]:
        """Yields the batches of `loader`, every `accumulate` of which are a step: `for batch in probe.steps(...)`.

        A step ends where the loop asks for the batch after its last one, or before that pauses after an optimizer's
        step. The batches end early when enough is measured.
        The last step of a loader may have fewer images than the others; batches that do not fill a step belong to none.

        Args:
            loader: gives this rank's batches.
            accumulate: micro-steps of an optimizer step.
            images: images of this rank in a whole step, or a function of a batch. None: the length of the first tensor
                in a batch.

        Raises:
            ValueError: other images or micro-steps than the study says.
        """
        return loader if self._measuring is None else self._measuring.batches(loader, accumulate, images)

    def pause(self) -> AbstractContextManager[None]:
        """Context for what is not training (evaluation, a checkpoint), between two steps and on every rank alike.

        In a loop over `steps` that is after the optimizer's step: a pause before it gives the step up.
        """
        return _NOTHING if self._measuring is None else self._measuring.pause()

    def phase(self, name: Phase) -> AbstractContextManager[object]:
        """Context for a part of a step; profiled steps are then divided into these parts.

        Raises:
            ValueError: on entering it, for another name than the five.
        """
        return _NOTHING if self._measuring is None else self._measuring.phase(name)

    def loss(self, value: torch.Tensor | float) -> None:
        """Tells the loss of a micro-step within its step; does not wait for the device."""
        if self._measuring is not None:
            self._measuring.tell_loss(value)

    def describe(
        self,
        model: torch.nn.Module | None = None,
        *,
        parameters: int | None = None,
        flops_per_image: float | None = None,
        precision: str | None = None,
    ) -> None:
        """Tells what is trained; what is left out stays unknown, and with it MFU and volumes.

        Args:
            model: the model whose parameters are counted, before it is sharded.
            parameters: their number.
            flops_per_image: FLOPs of training one image, forward and backward (1 MAC = 2 FLOP).
            precision: precision in the study's words ("bf16").

        Raises:
            ValueError: another precision than the study's.
        """
        if self._measuring is not None:
            if model is not None and parameters is None:
                parameters = sum(_elements(parameter) for parameter in model.parameters())
            self._measuring.describe(parameters, flops_per_image, precision)


def _elements(parameter: Any) -> int:
    """Elements of the whole tensor: ZeRO-3 leaves an empty one, and notes how many it had."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def images_of(batch: Any) -> int:
    """Length of the first tensor in a batch.

    Raises:
        ValueError: there is none.
    """
    if (first := _first_shape(batch)) is None:
        raise ValueError("this batch holds no tensor to count its images by: give probe.steps(..., images=...)")
    return int(first[0])


def _first_shape(batch: Any) -> Any:
    """Shape of the first value with one dimension or more, in lists and tables at any depth; None if there is none."""
    if hasattr(batch, "shape"):
        return batch.shape or None
    inside: Iterable[Any] = batch if isinstance(batch, (list, tuple)) else ()
    if hasattr(batch, "values"):
        inside = batch.values()
    return next((shape for value in inside if (shape := _first_shape(value)) is not None), None)


class _Steps:
    """Steps and pauses that one call begins and another ends."""

    def __init__(self) -> None:
        self.probe = Probe()
        self._entered: AbstractContextManager[None] | None = None
        self._paused = self._gave_up = False
        self._images = 0

    def begin(self, images: int, *, last: bool = False) -> None:
        """Begins an optimizer step, unless one has begun. A pause that is left ends first.

        Args:
            images: images of its first micro-step, or of the whole step.
            last: whether it is its loader's last, which may have fewer images than the others.
        """
        if self._paused:
            self.end()
        if self._entered is None:
            self._images = images
            measuring = self.probe._measuring
            self._enter(_NOTHING if measuring is None else measuring.one_step(lambda: self._images, last=last))

    def add(self, images: int) -> None:
        """Adds the images of a further micro-step to the step that has begun."""
        self._images += images

    def pause(self) -> None:
        """Begins a pause, unless one has begun. A step that has begun is given up: it would hold the pause's time."""
        if self._paused:
            return
        self._gave_up = self._entered is not None
        if self._entered is not None:
            self._entered.__exit__(GaveUp, GaveUp(), None)
        self._enter(self.probe.pause())
        self._paused = True

    def resume(self) -> None:
        """Ends a pause, but for one within a step: the rest of that step belongs to none."""
        if self._paused and not self._gave_up:
            self.end()

    def end(self) -> bool:
        """Ends what has begun; returns whether enough is measured."""
        entered, self._entered, self._paused = self._entered, None, False
        if entered is not None:
            entered.__exit__(None, None, None)
        return self.probe.done

    def _enter(self, context: AbstractContextManager[None]) -> None:
        context.__enter__()
        self._entered = context


class GaveUp(Exception):
    """Leaves the contexts of a step that is given up, so that nothing of it is recorded."""


def _images_of_steps(args: Any, loader: Any) -> Sequence[int]:
    """Images of this process in each of an epoch's steps under `transformers.Trainer`; empty where nobody knows.

    The last step has fewer micro-steps, and a process that is alone a smaller last batch: several share batches out
    evenly, with images a second time.
    """
    each, accum = args.per_device_train_batch_size, args.gradient_accumulation_steps
    try:
        batches, samples = len(loader), len(loader.dataset)
    except (TypeError, AttributeError):  # a stream
        return ()
    sizes = [each] * batches
    if sizes and args.world_size == 1 and not args.dataloader_drop_last:
        sizes[-1] = samples - each * (batches - 1)
    if not sizes or not 1 <= sizes[-1] <= each:  # a sampler of its own, or several devices in one process
        return ()
    return [sum(sizes[first : first + accum]) for first in range(0, batches, accum)]


def trainer_callback() -> Any:
    """A callback for `transformers.Trainer(callbacks=[...])`; it ends training when enough is measured."""
    from transformers import TrainerCallback

    steps = _Steps()

    class ProbeCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
        """Tells a Probe of the Trainer's optimizer steps, without evaluations and saving."""

        images: Sequence[int] = ()
        """Images of this process in each step of an epoch; empty: in all alike."""

        def on_train_begin(
            self, args: Any, _state: Any, _control: Any, model: Any = None, train_dataloader: Any = None, **_: Any
        ) -> None:
            """Tells how many parameters there are."""
            steps.probe.describe(model)
            self.images = _images_of_steps(args, train_dataloader)

        def on_step_begin(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
            """Begins a step before its first micro-step."""
            whole = args.per_device_train_batch_size * args.gradient_accumulation_steps
            steps.begin(self.images[state.global_step % len(self.images)] if self.images else whole)

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
    """A callback for `lightning.Trainer(callbacks=[...])`; it ends training when enough is measured."""
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback
    steps = _Steps()

    class ProbeCallback(Callback):  # type: ignore[misc]  # where Lightning is not installed it is of any type
        """Tells a Probe of Lightning's optimizer steps, each of `accumulate_grad_batches` batches."""

        def on_train_start(self, _trainer: Any, pl_module: Any) -> None:
            """Tells how many parameters there are."""
            steps.probe.describe(pl_module)

        def on_train_epoch_start(self, _trainer: Any, _pl_module: Any) -> None:
            """Marks a pause, because what came before was no training."""
            steps.pause()
            steps.end()

        def on_train_batch_start(self, trainer: Any, _pl_module: Any, batch: Any, batch_idx: int) -> None:
            """Begins a step before its first micro-step, where the loader still has all of them."""
            accumulate = trainer.accumulate_grad_batches
            left = trainer.num_training_batches - batch_idx  # infinite where the loader has no length
            if batch_idx % accumulate:
                steps.add(images_of(batch))
            elif left < accumulate:
                steps.pause()
            else:
                steps.begin(images_of(batch), last=left == accumulate)

        def on_train_batch_end(self, trainer: Any, _pl_module: Any, _outputs: Any, _batch: Any, batch_idx: int) -> None:
            """Ends a step after its last micro-step, and what fills none after the loader's last batch."""
            last = batch_idx + 1 == trainer.num_training_batches
            if (last or (batch_idx + 1) % trainer.accumulate_grad_batches == 0) and steps.end():
                trainer.should_stop = True

        def on_validation_start(self, _trainer: Any, _pl_module: Any) -> None:
            """Begins a pause for an evaluation."""
            steps.pause()

        def on_validation_end(self, _trainer: Any, _pl_module: Any) -> None:
            """Ends the pause after an evaluation."""
            steps.resume()

    return ProbeCallback()


def _is_last(state: Any) -> bool:
    """Whether the batch that begins is its loader's last; False where a loop's state does not tell."""
    batches, trained = getattr(state, "dataloader_len", None), getattr(state, "timestamp", None)
    return batches is not None and trained is not None and int(trained.batch_in_epoch) + 1 == int(batches)


def composer_callback() -> Any:
    """A callback for Composer's own Trainer, and for loops with its events in which each batch is an optimizer step."""
    try:
        from composer import Callback
    except ImportError:
        Callback = object
    steps = _Steps()

    class ProbeCallback(Callback):  # type: ignore[misc]  # transformers is untyped
        """Tells a Probe of a loop's batches."""

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
