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

import math
from collections.abc import Sequence
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
    """Return the steps until the loader is where it was before a pause: one, and what its threads' batches make."""
    return 1 + math.ceil(trial.data.workers / trial.train.grad_accum)


def has_two_batch_sizes(trial: Trial) -> bool:
    """Whether a step has unreduced gradients of fewer images than its own, because of several ranks or micro-steps."""
    return trial.layout.data * trial.train.grad_accum > 1


def timed_stretch(kinds: Sequence[StepWindow], warmup_steps: int, epoch: range) -> range:
    """Return the longest run of timed steps in an epoch, of equally long ones the last; all its steps if none is timed.

    Args:
        kinds: the window of each of the run's steps.
        warmup_steps: the first so many steps are not timed.
        epoch: the steps of one epoch.
    """
    longest = range(0)
    begin = epoch.start
    for step in epoch:
        is_timed = kinds[step] == "light" and step >= warmup_steps
        if not is_timed:
            begin = step + 1
            continue
        stretch = range(begin, step + 1)
        if len(stretch) >= len(longest):
            longest = stretch
    return longest if longest else epoch


FEWEST_LIGHT = 20
"""Timed steps of the shortest run: its mean is then known to a quarter of what single steps differ by."""
_FEWEST_EXPLAINED = 2
_LONGEST_TRIED = 200
"""Most steps of a run that `shortest_run` tries."""


def shortest_run(trial: Trial, steps_per_epoch: int) -> int:
    """Return the steps after warm-up of the shortest run with `FEWEST_LIGHT` timed steps.

    Where the trial is explained and epochs leave room, it has two explained blocks too. More steps would say more about
    this run, but only another run says how far runs differ.
    """
    warmup_steps = trial.window.warmup_steps
    too_few_blocks: list[int] = []
    for steps in range(FEWEST_LIGHT, _LONGEST_TRIED + 1):
        kinds = windows(trial, steps + warmup_steps, steps_per_epoch)[warmup_steps:]
        if kinds.count("light") < FEWEST_LIGHT:
            continue
        if not trial.window.explain or _explained_blocks(kinds) >= _FEWEST_EXPLAINED:
            return steps
        too_few_blocks.append(steps)
    return too_few_blocks[0]


def _explained_blocks(kinds: Sequence[StepWindow]) -> int:
    """Return how many runs of explained steps there are."""
    before: StepWindow = "light"
    blocks = 0
    for kind in kinds:
        if kind == "explained" and before != "explained":
            blocks += 1
        before = kind
    return blocks


class _Block(NamedTuple):
    window: StepWindow
    begin: int
    length: int


def windows(trial: Trial, steps: int, steps_per_epoch: int) -> tuple[StepWindow, ...]:
    """Return the window of each of a run's `steps` optimizer steps. Warm-up steps are light, and marked apart.

    A run too short for one block has light steps only; so has one that is not to be explained. No block crosses from
    one epoch to the next or begins one: an epoch's first step waits for the loader to start.
    """
    schedule = _Schedule(trial, steps, steps_per_epoch)
    return schedule.windows() if trial.window.explain else schedule.laid([])


class _Schedule:
    """Where the blocks of a run lie."""

    def __init__(self, trial: Trial, steps: int, steps_per_epoch: int) -> None:
        self.steps = steps
        self.per_epoch = steps_per_epoch
        self.device = trial.train.device
        self.warmup = trial.window.warmup_steps
        self.settling = settling_steps(trial)
        self.first = self.warmup + _LIGHT_STEPS
        """The first step at which a block may begin."""
        self.workers = max(1, trial.data.workers)
        self.length = EXPLAINED_STEPS[self.device]
        """Steps of an explained block."""
        measures_gradients = has_two_batch_sizes(trial) and why_no_gradient_norms(trial) is None
        self.gradient_steps = GRADIENT_STEPS if measures_gradients else ()

    def windows(self) -> tuple[StepWindow, ...]:
        """Return the window of each step of a run that is to be explained."""
        if self.device == "cuda":
            return self.laid(self._profile_last())
        early = self._all_early()
        all_early = self.laid(early)
        spread_blocks = self._spread(sum(block.window == "explained" for block in early))
        if spread_blocks is None:
            return all_early
        # Spread the blocks, unless only the other way leaves whole epochs of light steps.
        spread = self.laid(spread_blocks)
        only_early_has_light_epochs = self._light_epochs(all_early) > 0 and self._light_epochs(spread) == 0
        return all_early if only_early_has_light_epochs else spread

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
        for count in counts:
            for gradient_steps in self.gradient_steps if count > 1 else ():
                blocks = self._gradients_then_profile(gradient_steps, count)
                if blocks:
                    return blocks
        for count in counts:
            blocks = self._gradients_then_profile(0, count)
            if blocks:
                return blocks
        return []

    def _gradients_then_profile(self, gradient_steps: int, count: int) -> list[_Block]:
        """Return a block of gradients and `count` explained ones at the end; none where there is no room for them all.

        `gradient_steps`: 0: no such block.
        """
        late = self._backward(self._whole_bursts(count), self.steps - _LIGHT_STEPS, None)
        if not late:
            return []
        early: list[_Block] = []
        if gradient_steps:
            early = self._forward("gradients", [gradient_steps], [])
            if not early:
                return []
        blocks = [*early, *late]
        light_from = self._end(early[0]) if early else self.warmup
        has_room = late[0].begin - light_from >= _LIGHT_STEPS
        return blocks if has_room and not self._short_of_light(blocks) else []

    def _forward(self, window: StepWindow, lengths: list[int], after: list[_Block], spent: int = 0) -> list[_Block]:
        """Return the most blocks of these lengths, one after the other, that the run, epochs and light steps allow.

        Args:
            window: the window of all their steps.
            lengths: steps of each.
            after: blocks that come before them.
            spent: steps that other blocks take of those that need not be light.
        """
        budget = int(max(0, self.steps - self.warmup) * (1 - _LIGHT_SHARE)) - spent
        earliest = self.first
        if after:
            earliest = after[-1].begin + self._distance(after[-1].length)
        blocks: list[_Block] = []
        for length in lengths:
            begin = self._inside_after(earliest, length)
            steps = length + self.settling
            fits_epoch = length < self.per_epoch
            fits_run = steps <= budget and begin + steps <= self.steps
            if not (fits_epoch and fits_run):
                break
            blocks.append(_Block(window, begin, length))
            earliest = begin + self._distance(length)
            budget -= steps
        return blocks

    def _backward(self, count: int, end: int, burst: int | None) -> list[_Block] | None:
        """Return `count` explained blocks, the last of which is over by `end`; None where there is no room.

        `burst` is a step at the place in the loader's bursts that the last block shall have.
        """
        blocks: list[_Block] = []
        latest = end - self.length - self.settling
        for _ in range(count):
            begin = self._begin_by(latest, burst)
            if begin is None or begin < self.first or self.length >= self.per_epoch:
                return None
            blocks.insert(0, _Block("explained", begin, self.length))
            burst = begin - 1
            latest = begin - self._distance(self.length)
        return blocks

    def _begin_by(self, latest: int, burst: int | None) -> int | None:
        """Return the last step up to `latest` at which an explained block may begin; None where none is near.

        `burst`: a step at the same place in the loader's bursts; None: any place will do.
        """
        begin = latest
        stride = 1
        if burst is not None:
            begin -= (begin - burst) % self.workers
            stride = self.workers
        for _ in range(self.length + 1):
            if self._inside_after(begin, self.length) == begin:
                return begin
            begin -= stride
        return None

    def _with_gradients(self, blocks: list[_Block], budget_for: int = 0) -> list[_Block]:
        """Return the blocks and after them the longest block of gradients that fits, if any does.

        `budget_for`: steps that are kept for explained blocks, if these take fewer as yet.
        """
        spent = max(budget_for, sum(block.length + self.settling for block in blocks))
        for length in self.gradient_steps:
            gradients = self._forward("gradients", [length], blocks, spent)
            if gradients:
                return [*blocks, *gradients]
        return blocks

    def _distance(self, length: int) -> int:
        """Return the steps from the beginning of a block to that of the next, with settling and timed steps between.

        On a host there are as many timed steps as the block takes; on a GPU a few, as they are in no reported time.
        Threads that began together deliver in bursts of `workers` steps. From block to block the place in the burst
        moves on by one, so that the blocks' mean is the loader's.
        """
        block_steps = length + self.settling
        timed_steps = _ATTACHED_STEPS if self.device == "cuda" else max(_LIGHT_STEPS, block_steps)
        distance = block_steps + timed_steps
        return distance + (1 - distance) % self.workers

    def _whole_bursts(self, count: int) -> int:
        """Return the most blocks up to `count` that look at every place of a burst equally often; `count` if small."""
        if count <= self.workers:
            return count
        return count // self.workers * self.workers

    def _inside_after(self, step: int, length: int) -> int:
        """Return the first step from `step` on where `length` steps lie in one epoch and do not begin it."""
        in_epoch = step % self.per_epoch
        if in_epoch == 0:
            return step + 1
        return step if in_epoch + length <= self.per_epoch else step - in_epoch + self.per_epoch + 1

    def _end(self, block: _Block) -> int:
        return block.begin + block.length + self.settling

    def laid(self, blocks: list[_Block]) -> tuple[StepWindow, ...]:
        """Return the window of each step, given these blocks in order."""
        kinds: list[StepWindow] = ["light"] * self.steps
        explained = [block.begin for block in blocks if block.window == "explained"]
        if self.device == "cuda" and explained:
            first_explained = explained[0]
            kinds[first_explained:] = ["attached"] * (self.steps - first_explained)
        for window, begin, length in blocks:
            end = begin + length
            kinds[begin:end] = [window] * length
            kinds[end : end + self.settling] = ["settling"] * self.settling
        return tuple(kinds)

    def _short_of_light(self, blocks: list[_Block]) -> bool:
        after_warmup = self.laid(blocks)[self.warmup :]
        return after_warmup.count("light") < _LIGHT_SHARE * len(after_warmup)

    def _light_epochs(self, laid: tuple[StepWindow, ...]) -> int:
        """Return the number of whole epochs after warm-up that have only light steps."""
        light_epochs = 0
        for begin in range(0, self.steps - self.per_epoch + 1, self.per_epoch):
            kinds = set(laid[begin : begin + self.per_epoch])
            if begin >= self.warmup and kinds == {"light"}:
                light_epochs += 1
        return light_epochs
