"""Which optimizer steps of a run are timed, which are explained, and which are neither.

After warm-up, light and explained blocks alternate, so that drift is not taken for the cost of explaining:

    warm-up | light explained settling | light explained settling | ... | gradients settling | light to the end

Light steps carry nothing but timestamps, and only they are in a reported time. A block is explained under the profiler;
when it ends the rank pauses to read the profile. Meanwhile the loader's threads may finish what they hold, so as many
batches as they can have got ahead are settled before the next light step. The blocks come early: the later epochs of a
long run hold light steps alone, and their wall time is the sum of these.
"""

from __future__ import annotations

from collections.abc import Sequence

from vitscale.engine_options import norms_unknown
from vitscale.record import StepWindow
from vitscale.trial import Trial

BLOCKS = {"cpu": 8, "cuda": 4}
EXPLAINED_STEPS = {"cpu": 1, "cuda": 3}
"""Of one block. On a host one, for the memory of a growing profile slows the steps down. On a GPU the first step of a
block begins on a drained device, so that it takes more to have any that tell."""
GRADIENT_STEPS = (32, 8)
"""As many as a run has room for: the noise scale of 8 steps is rough."""
_LIGHT_STEPS = 4
_LIGHT_SHARE = 0.5
"""Of the steps after warm-up, at least so many stay light."""


def settling_steps(trial: Trial) -> int:
    """Steps until the loader is where it was before a pause: one, and one for each batch a thread had in hand."""
    return 1 + -(-trial.data.workers // trial.train.grad_accum)


def has_two_batch_sizes(trial: Trial) -> bool:
    """Whether a step holds unreduced gradients of fewer images than the step has: of ranks, or of micro-steps."""
    return trial.world.size * trial.train.grad_accum > 1


def windows(trial: Trial, steps: int, steps_per_epoch: int) -> tuple[StepWindow, ...]:
    """The window of each of a run's `steps` optimizer steps. Warm-up steps are light, and marked apart.

    A run too short for one block has light steps only; so has one that is not to be explained. No block crosses from
    one epoch to the next or begins one: an epoch's first step waits for the loader to start.
    """
    found: list[StepWindow] = ["light"] * steps
    if not trial.window.explain:
        return tuple(found)
    after_warmup = max(0, steps - trial.window.warmup_steps)
    budget = int(after_warmup * (1 - _LIGHT_SHARE))
    settling = settling_steps(trial)
    place = trial.window.warmup_steps + _LIGHT_STEPS
    device = trial.train.device
    explained = EXPLAINED_STEPS[device]
    blocks: list[tuple[StepWindow, int, int]] = []

    def add(window: StepWindow, length: int) -> bool:
        """Places a block after the others, if a run and an epoch of this length have room for it."""
        nonlocal place, budget
        whole = length + settling
        begin = _inside_one_epoch(place, length, steps_per_epoch)
        if length >= steps_per_epoch or whole > budget or begin + whole > steps:
            return False
        blocks.append((window, begin, length))
        # Threads that began together deliver in bursts, every so many steps. From block to block the place in the burst
        # moves on by one, so that the blocks' mean is the loader's.
        distance = whole + max(_LIGHT_STEPS, whole)
        distance += (1 - distance) % max(1, trial.data.workers)
        place, budget = begin + distance, budget - whole
        return True

    while len(blocks) < BLOCKS[device] and add("explained", explained):
        pass
    if has_two_batch_sizes(trial) and norms_unknown(trial.train) is None:
        any(add("gradients", length) for length in GRADIENT_STEPS)
    for window, place, length in _whole_bursts(blocks, trial.data.workers):
        found[place : place + length] = [window] * length
        found[place + length : place + length + settling] = ["settling"] * settling
    return tuple(found)


def timed_stretch(found: Sequence[StepWindow], warmup_steps: int, epoch: range) -> range:
    """The longest run of timed steps among an epoch's steps; of equally long ones the last; all of them if it has none.

    Args:
        found: the window of each of the run's steps.
        warmup_steps: the first so many steps are not timed.
        epoch: the steps of one epoch.
    """
    longest, begin = range(0), epoch.start
    for step in epoch:
        if found[step] != "light" or step < warmup_steps:
            begin = step + 1
        elif step + 1 - begin >= len(longest):
            longest = range(begin, step + 1)
    return longest or epoch


def _whole_bursts(blocks: list[tuple[StepWindow, int, int]], workers: int) -> list[tuple[StepWindow, int, int]]:
    """As many explained blocks as look at every place of a burst equally often, if there are enough for that."""
    explained = [block for block in blocks if block[0] == "explained"]
    if workers > 1 and len(explained) > workers:
        explained = explained[: len(explained) // workers * workers]
    return explained + [block for block in blocks if block[0] != "explained"]


def _inside_one_epoch(place: int, length: int, steps_per_epoch: int) -> int:
    """The first place from `place` on at which `length` steps lie in one epoch, and not at its start."""
    in_epoch = place % steps_per_epoch
    if in_epoch == 0:
        return place + 1
    if in_epoch + length > steps_per_epoch:
        return place - in_epoch + steps_per_epoch + 1
    return place
