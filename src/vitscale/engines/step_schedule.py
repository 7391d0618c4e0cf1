"""Which optimizer steps of a run are timed, which are explained, and which are neither.

Light steps carry nothing but timestamps, and only they are in a reported time. A block of steps is explained under the
profiler; when it ends the rank pauses to read the profile. Meanwhile the loader's threads may get ahead, so as many
batches as they can have prepared are settled before the next timed step. On CPU light and explained blocks alternate,
so that drift is not taken for the cost of explaining, half of them at the beginning and half at the end:

    warm-up | light explained settling | ... | gradients settling | light ... | light explained settling | ... | light

The epochs between hold light steps alone, and their wall time is the sum of these. If a run is too short for such an
epoch in between, all blocks come early, and the epochs after them are light.

On a GPU the profiler comes last. Once it has run, CUPTI stays attached to the process, which slows down every launch
from then on: 10 to 20 % of training were seen (pytorch #144455, #146604). So all light steps lie before the first
block. Timed steps beside the blocks are attached: they say what that costs, and are in no reported time.

    warm-up | light | gradients settling | light ... | explained settling attached | explained settling attached | ...
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from vitscale.engines.checks import why_no_gradient_norms
from vitscale.trial.trial import StepWindow, Trial

BLOCKS = {"cpu": 8, "cuda": 4}
EXPLAINED_STEPS = {"cpu": 1, "cuda": 3}
"""Steps of one block. One on a host, because a growing profile's memory slows the steps down. On a GPU a block begins
on a drained device, so its first step does not count."""
GRADIENT_STEPS = (32, 8)
"""Steps on which the gradient is measured, the most that a run has room for: the noise scale of 8 steps is rough."""
_LIGHT_STEPS = 4
"""Fewest timed steps before a block, and after the last."""
_ATTACHED_STEPS = 2
"""Timed steps between two blocks on a GPU."""
_LIGHT_SHARE = 0.5
"""Least share of the steps after warm-up that stays light."""


def settling_steps(trial: Trial) -> int:
    """Steps until the loader is where it was before a pause: one, plus one for each batch that a thread held."""
    return 1 + -(-trial.data.workers // trial.train.grad_accum)


def has_two_batch_sizes(trial: Trial) -> bool:
    """Whether a step has unreduced gradients of fewer images than its own, because of several ranks or micro-steps."""
    return trial.layout.data * trial.train.grad_accum > 1


def timed_stretch(kinds: Sequence[StepWindow], warmup_steps: int, epoch: range) -> range:
    """The longest run of timed steps in an epoch, of equally long ones the last; all its steps if none is timed.

    Args:
        kinds: the window of each of the run's steps.
        warmup_steps: the first so many steps are not timed.
        epoch: the steps of one epoch.
    """
    longest, begin = range(0), epoch.start
    for step in epoch:
        if kinds[step] != "light" or step < warmup_steps:
            begin = step + 1
        elif step + 1 - begin >= len(longest):
            longest = range(begin, step + 1)
    return longest or epoch


FEWEST_LIGHT = 20
"""Timed steps of the shortest run: its mean is then known to a quarter of what single steps differ by."""
_FEWEST_EXPLAINED = 2
_MOST_LOOKED_AT = 200


def shortest_run(trial: Trial, steps_per_epoch: int) -> int:
    """Optimizer steps after warm-up of the shortest run with `FEWEST_LIGHT` timed steps. Where the trial is explained
    and epochs leave room, it has two explained blocks too.

    More steps would tell more of this run, but only another run tells how far runs differ.
    """
    enough = []
    for steps in range(FEWEST_LIGHT, _MOST_LOOKED_AT + 1):
        kinds = windows(trial, steps + trial.window.warmup_steps, steps_per_epoch)[trial.window.warmup_steps :]
        if kinds.count("light") >= FEWEST_LIGHT:
            blocks = sum(kind == "explained" != before for before, kind in pairwise(("light", *kinds)))
            if blocks >= _FEWEST_EXPLAINED or not trial.window.explain:
                return steps
            enough.append(steps)
    return enough[0]


class _Block(NamedTuple):
    window: StepWindow
    begin: int
    length: int


def windows(trial: Trial, steps: int, steps_per_epoch: int) -> tuple[StepWindow, ...]:
    """The window of each of a run's `steps` optimizer steps. Warm-up steps are light, and marked apart.

    A run too short for one block has light steps only; so has one that is not to be explained. No block crosses from
    one epoch to the next or begins one: an epoch's first step waits for the loader to start.
    """
    schedule = _Schedule(trial, steps, steps_per_epoch)
    return schedule.windows() if trial.window.explain else schedule.laid([])


class _Schedule:
    """The places of a run's blocks."""

    def __init__(self, trial: Trial, steps: int, steps_per_epoch: int) -> None:
        self.steps, self.per_epoch, self.device = steps, steps_per_epoch, trial.train.device
        self.warmup, self.settling = trial.window.warmup_steps, settling_steps(trial)
        self.first = self.warmup + _LIGHT_STEPS
        self.workers = max(1, trial.data.workers)
        self.length = EXPLAINED_STEPS[self.device]
        self.gradient_steps = (
            GRADIENT_STEPS if has_two_batch_sizes(trial) and why_no_gradient_norms(trial) is None else ()
        )

    def windows(self) -> tuple[StepWindow, ...]:
        """The window of each step of a run that is to be explained."""
        if self.device == "cuda":
            return self.laid(self._profile_last())
        early = self._all_early()
        spread = self._spread(sum(block.window == "explained" for block in early))
        # Spread the blocks, unless only the other way leaves whole epochs of light steps.
        laid = self.laid(early)
        if spread is None or (self._light_epochs(laid) and not self._light_epochs(self.laid(spread))):
            return laid
        return self.laid(spread)

    def _all_early(self) -> list[_Block]:
        blocks = self._forward("explained", [self.length] * BLOCKS[self.device], [])
        blocks = blocks[: self._whole_bursts(len(blocks))]
        return self._with_gradients(blocks)

    def _spread(self, count: int) -> list[_Block] | None:
        """Puts half of the explained blocks at the beginning, the others at the end; None where that is impossible."""
        early = self._forward("explained", [self.length] * (count - count // 2), [])
        early = self._with_gradients(early, budget_for=count * (self.length + self.settling))
        explained = [block for block in early if block.window == "explained"]
        if not explained or count < 2:
            return None
        burst = explained[-1].begin + count // 2
        late = self._backward(count // 2, self.steps - _LIGHT_STEPS, burst)
        if late is None or late[0].begin < self._end(early[-1]) + _LIGHT_STEPS:
            return None
        return [*early, *late]

    def _profile_last(self) -> list[_Block]:
        """Puts explained blocks last and gradients first; gradients matter more than a third or fourth block."""
        counts = range(BLOCKS[self.device], 0, -1)
        with_gradients = [(count, length) for count in counts if count > 1 for length in self.gradient_steps]
        for count, gradients in [*with_gradients, *((count, 0) for count in counts)]:
            late = self._backward(self._whole_bursts(count), self.steps - _LIGHT_STEPS, None)
            if not late:
                continue
            early = self._forward("gradients", [gradients], []) if gradients else []
            blocks = [*early, *late]
            room = late[0].begin - (self._end(early[0]) if early else self.warmup)
            if len(early) == bool(gradients) and room >= _LIGHT_STEPS and not self._short_of_light(blocks):
                return blocks
        return []

    def _forward(self, window: StepWindow, lengths: list[int], after: list[_Block], spent: int = 0) -> list[_Block]:
        """The most blocks of these lengths, one after the other, that the run, its epochs and its light steps allow."""
        budget = int(max(0, self.steps - self.warmup) * (1 - _LIGHT_SHARE)) - spent
        earliest = self.first if not after else after[-1].begin + self._distance(after[-1].length)
        blocks: list[_Block] = []
        for length in lengths:
            begin, whole = self._inside_after(earliest, length), length + self.settling
            if length >= self.per_epoch or whole > budget or begin + whole > self.steps:
                break
            blocks.append(_Block(window, begin, length))
            earliest, budget = begin + self._distance(length), budget - whole
        return blocks

    def _backward(self, count: int, end: int, burst: int | None) -> list[_Block] | None:
        """`count` explained blocks, the last of which is over by `end`; None where there is no room.

        `burst` is a step at the place in the loader's bursts that the last block shall have.
        """
        blocks: list[_Block] = []
        begin = end - self.length - self.settling
        for _ in range(count):
            if burst is not None:
                begin -= (begin - burst) % self.workers
            for _ in range(self.length + 1):
                if self._inside_after(begin, self.length) == begin:
                    break
                begin -= self.workers if burst is not None else 1
            else:
                return None
            if begin < self.first or self.length >= self.per_epoch:
                return None
            blocks.insert(0, _Block("explained", begin, self.length))
            burst = begin - 1
            begin -= self._distance(self.length)
        return blocks

    def _with_gradients(self, blocks: list[_Block], budget_for: int = 0) -> list[_Block]:
        spent = max(budget_for, sum(block.length + self.settling for block in blocks))
        for length in self.gradient_steps:
            if gradients := self._forward("gradients", [length], blocks, spent):
                return [*blocks, *gradients]
        return blocks

    def _distance(self, length: int) -> int:
        """Steps from the beginning of a block to that of the next, with settling and timed steps between.

        On a host there are as many timed steps as the block takes; on a GPU a few, as they are in no reported time.
        Threads that began together deliver in bursts of `workers` steps. From block to block the place in the burst
        moves on by one, so that the blocks' mean is the loader's.
        """
        whole = length + self.settling
        distance = whole + (_ATTACHED_STEPS if self.device == "cuda" else max(_LIGHT_STEPS, whole))
        return distance + (1 - distance) % self.workers

    def _whole_bursts(self, count: int) -> int:
        """The most blocks up to `count` that look at every place of a burst equally often; `count` if it is small."""
        return count // self.workers * self.workers if count > self.workers else count

    def _inside_after(self, step: int, length: int) -> int:
        """The first step from `step` on where `length` steps lie in one epoch and do not begin it."""
        in_epoch = step % self.per_epoch
        if in_epoch == 0:
            return step + 1
        return step if in_epoch + length <= self.per_epoch else step - in_epoch + self.per_epoch + 1

    def _end(self, block: _Block) -> int:
        return block.begin + block.length + self.settling

    def laid(self, blocks: list[_Block]) -> tuple[StepWindow, ...]:
        """The window of each step, given these blocks in order."""
        kinds: list[StepWindow] = ["light"] * self.steps
        explained = [block.begin for block in blocks if block.window == "explained"]
        if self.device == "cuda" and explained:
            kinds[explained[0] :] = ["attached"] * (self.steps - explained[0])
        for window, begin, length in blocks:
            kinds[begin : begin + length] = [window] * length
            kinds[begin + length : begin + length + self.settling] = ["settling"] * self.settling
        return tuple(kinds)

    def _short_of_light(self, blocks: list[_Block]) -> bool:
        after_warmup = self.laid(blocks)[self.warmup :]
        return after_warmup.count("light") < _LIGHT_SHARE * len(after_warmup)

    def _light_epochs(self, laid: tuple[StepWindow, ...]) -> int:
        """Number of whole epochs after warm-up that have only light steps."""
        begins = range(0, self.steps - self.per_epoch + 1, self.per_epoch)
        return sum(begin >= self.warmup and set(laid[begin : begin + self.per_epoch]) == {"light"} for begin in begins)
