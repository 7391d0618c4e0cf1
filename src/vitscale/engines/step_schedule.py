"""Which optimizer steps of a run are timed, which are explained, and which are neither: the window of each step.

    light      carries nothing but timestamps; only these steps are in a reported time
    explained  runs under the profiler
    gradients  measures the gradient, for the noise scale
    settling   follows a block of explained or gradients steps, and is not timed
    attached   is timed on a GPU between explained blocks, and is in no reported time

Explained steps, and gradients steps, come in blocks. When a block ends the rank pauses to read the profile. Meanwhile
the loader's threads may get ahead, so as many batches as they can have prepared are settled before the next timed step.
On CPU light and explained blocks alternate, so that a machine that slows down during the run (drift) is not taken for
the cost of explaining, half of them at the beginning and half at the end:

    warm-up | light explained settling | ... | gradients settling | light ... | light explained settling | ... | light

The epochs between hold light steps alone, and their wall time is the sum of these. If a run is too short for such an
epoch in between, all blocks come early, and the epochs after them are light.

On a GPU the profiler comes last. Once it has run, CUPTI stays attached to the process, which slows down every launch
from then on: 10 to 20 % of training were seen (pytorch #144455, #146604). So all light steps lie before the first
explained block. Timed steps beside the blocks are attached: they show how much slower steps are from then on.

    warm-up | light | gradients settling | light ... | explained settling attached | explained settling attached | ...
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vitscale.engines.checks import why_no_gradient_norms
from vitscale.trial.trial import StepWindow, Trial

BLOCKS = {"cpu": 8, "cuda": 4}
"""Most explained blocks of a run, by device."""
EXPLAINED_STEPS = {"cpu": 1, "cuda": 3}
"""Steps of one block. One on a host, because a growing profile's memory slows the steps down. On a GPU a block begins
on a drained device, so its first step does not count."""
GRADIENT_STEPS = (32, 8)
"""Steps on which the gradient is measured, the most that a run has room for: the noise scale of 8 steps is rough."""
_LIGHT_STEPS = 4
"""Fewest timed steps before a block, and after the last."""
_ATTACHED_STEPS = 2
"""Timed steps between two blocks on a GPU."""
_LEAST_LIGHT_SHARE = 0.5
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
_FEWEST_EXPLAINED_BLOCKS = 2
_LONGEST_RUN_TRIED = 200
"""Most steps of a run that `shortest_run` tries."""


def shortest_run(trial: Trial, steps_per_epoch: int) -> int:
    """Return the steps after warm-up of the shortest run with `FEWEST_LIGHT` timed steps.

    Where the trial is explained and epochs leave room, it has two explained blocks too. More steps would say more about
    this run, but only another run says how far runs differ.
    """
    warmup_steps = trial.window.warmup_steps
    lengths_with_few_blocks: list[int] = []
    for steps in range(FEWEST_LIGHT, _LONGEST_RUN_TRIED + 1):
        kinds = windows(trial, steps + warmup_steps, steps_per_epoch)[warmup_steps:]
        if kinds.count("light") < FEWEST_LIGHT:
            continue
        if not trial.window.explain or _explained_blocks(kinds) >= _FEWEST_EXPLAINED_BLOCKS:
            return steps
        lengths_with_few_blocks.append(steps)
    return lengths_with_few_blocks[0]


def _explained_blocks(kinds: Sequence[StepWindow]) -> int:
    """Return how many stretches of explained steps there are."""
    previous_kind: StepWindow = "light"
    blocks = 0
    for kind in kinds:
        if kind == "explained" and previous_kind != "explained":
            blocks += 1
        previous_kind = kind
    return blocks


class _Block(NamedTuple):
    """Steps in a row with the same window; steps of settling follow it."""

    window: StepWindow
    begin: int
    """Its first step."""
    length: int
    """Its steps, without settling."""


def windows(trial: Trial, steps: int, steps_per_epoch: int) -> tuple[StepWindow, ...]:
    """Return the window of each of a run's `steps` optimizer steps. Warm-up steps are light too.

    A run too short for one block has light steps only; so has one that is not to be explained. No block crosses from
    one epoch to the next or begins one: an epoch's first step waits for the loader to start.
    """
    schedule = _Schedule(trial, steps, steps_per_epoch)
    return schedule.windows() if trial.window.explain else schedule.windows_with([])


class _ProfileSize(NamedTuple):
    """How much a run on a GPU explains and measures beside its light steps."""

    explained_blocks: int
    gradient_steps: int
    """Steps of its block of gradients; 0: it has none."""


class _Schedule:
    """Places a run's blocks.

    The loader's threads that began together deliver in bursts of `workers` steps. The phase of a step is its number in
    the burst, `step % workers`. Each block begins one phase after the block before it, so that over all blocks no phase
    counts more than another. With 4 workers blocks may begin at steps 9, 18 and 27, in the phases 1, 2 and 3.
    """

    def __init__(self, trial: Trial, steps: int, steps_per_epoch: int) -> None:
        self.steps = steps
        self.steps_per_epoch = steps_per_epoch
        self.device = trial.train.device
        self.warmup_steps = trial.window.warmup_steps
        self.settling_steps = settling_steps(trial)
        self.earliest_begin = self.warmup_steps + _LIGHT_STEPS
        """The first step at which a block may begin: warm-up and some light steps come before it."""
        self.workers = max(1, trial.data.workers)
        self.explained_steps = EXPLAINED_STEPS[self.device]
        """Steps of an explained block, without settling."""
        measures_gradients = has_two_batch_sizes(trial) and why_no_gradient_norms(trial) is None
        self.gradient_steps = GRADIENT_STEPS if measures_gradients else ()
        """Lengths that a block of gradients may have, the longest first."""

    def windows(self) -> tuple[StepWindow, ...]:
        """Return the window of each step of a run that is to be explained."""
        if self.device == "cuda":
            return self.windows_with(self._blocks_at_end())
        early_blocks = self._early_blocks()
        all_early = self.windows_with(early_blocks)
        explained_count = sum(block.window == "explained" for block in early_blocks)
        spread_blocks = self._spread_blocks(explained_count)
        if spread_blocks is None:
            return all_early
        # Spread the blocks, unless only the other way leaves whole epochs of light steps.
        spread = self.windows_with(spread_blocks)
        only_early_has_light_epochs = self._light_epochs(all_early) > 0 and self._light_epochs(spread) == 0
        return all_early if only_early_has_light_epochs else spread

    def _early_blocks(self) -> list[_Block]:
        """Return as many blocks as have room, one after the other from the beginning."""
        explained = self._placed_forward("explained", [self.explained_steps] * BLOCKS[self.device], previous=[])
        explained = explained[: self._count_in_whole_bursts(len(explained))]
        return self._with_gradients(explained)

    def _spread_blocks(self, count: int) -> list[_Block] | None:
        """Return blocks with half of the explained ones at the beginning, and the others at the end of the run.

        None where there is no room for them.

        Args:
            count: number of explained blocks.
        """
        late_count = count // 2
        early_explained = self._placed_forward("explained", [self.explained_steps] * (count - late_count), previous=[])
        early = self._with_gradients(early_explained, reserved=count * (self.explained_steps + self.settling_steps))
        if not early_explained or count < 2:
            return None
        # Each late block begins one phase after the block before it, and the first one after the last early block.
        last_phase = self._phase(early_explained[-1].begin + late_count)
        late = self._placed_backward(late_count, self.steps - _LIGHT_STEPS, last_phase=last_phase)
        if late is None or late[0].begin < self._end(early[-1]) + _LIGHT_STEPS:
            return None
        return [*early, *late]

    def _blocks_at_end(self) -> list[_Block]:
        """Return the blocks of a run on a GPU, the explained ones last; [] where none has room."""
        for size in self._profile_sizes():
            blocks = self._gradients_then_profile(size)
            if blocks:
                return blocks
        return []

    def _profile_sizes(self) -> Iterator[_ProfileSize]:
        """Yield what a run on a GPU may have beside light steps, the best first.

        A block of gradients matters more than a third or fourth explained block, and less than a second one.
        """
        counts = range(BLOCKS[self.device], 0, -1)
        for count in counts:
            if count > 1:
                for gradient_steps in self.gradient_steps:
                    yield _ProfileSize(count, gradient_steps)
        for count in counts:
            yield _ProfileSize(count, gradient_steps=0)

    def _gradients_then_profile(self, size: _ProfileSize) -> list[_Block]:
        """Return a block of gradients at the beginning and explained ones at the end; [] if not all have room."""
        count = self._count_in_whole_bursts(size.explained_blocks)
        late = self._placed_backward(count, self.steps - _LIGHT_STEPS, last_phase=None)
        if not late:
            return []
        early: list[_Block] = []
        if size.gradient_steps:
            early = self._placed_forward("gradients", [size.gradient_steps], previous=[])
            if not early:
                return []
        blocks = [*early, *late]
        first_light_step = self._end(early[0]) if early else self.warmup_steps
        has_room = late[0].begin - first_light_step >= _LIGHT_STEPS
        return blocks if has_room and not self._has_few_light_steps(blocks) else []

    def _placed_forward(
        self, window: StepWindow, lengths: list[int], *, previous: list[_Block], spent: int = 0
    ) -> list[_Block]:
        """Return blocks of these lengths, one after the other; only the first ones if not all of them have room.

        Blocks have room in the run, and in the budget: the steps after warm-up that need not be light.

        Args:
            window: the window of all their steps.
            lengths: steps of each block, without settling.
            previous: blocks that come before them.
            spent: steps of the budget that other blocks take.
        """
        steps_after_warmup = max(0, self.steps - self.warmup_steps)
        budget = int(steps_after_warmup * (1 - _LEAST_LIGHT_SHARE)) - spent
        earliest = self.earliest_begin
        if previous:
            earliest = previous[-1].begin + self._steps_between_begins(previous[-1].length)
        blocks: list[_Block] = []
        for length in lengths:
            begin = self._first_begin_from(earliest, length)
            block_steps = length + self.settling_steps
            fits_epoch = length < self.steps_per_epoch  # no block begins an epoch
            fits_run = begin + block_steps <= self.steps
            if not (fits_epoch and fits_run) or block_steps > budget:
                break
            blocks.append(_Block(window, begin, length))
            earliest = begin + self._steps_between_begins(length)
            budget -= block_steps
        return blocks

    def _placed_backward(self, count: int, end: int, *, last_phase: int | None) -> list[_Block] | None:
        """Return `count` explained blocks as late as they can be; None if not all of them have room.

        They are placed from the last one to the first, and returned in the order of steps.

        Args:
            count: number of blocks, at least 1.
            end: the step by which the last block is over and settled.
            last_phase: the phase in which the last block begins; None: any will do.
        """
        has_room_in_epoch = self.explained_steps < self.steps_per_epoch  # no block begins an epoch
        if not has_room_in_epoch:
            return None
        begins_last_first: list[int] = []
        latest = end - self.settling_steps - self.explained_steps
        phase = last_phase
        for _ in range(count):
            begin = self._last_begin(latest, phase=phase)
            if begin is None or begin < self.earliest_begin:
                return None
            begins_last_first.append(begin)
            # The block that comes before this one begins one phase earlier.
            phase = self._phase(begin - 1)
            latest = begin - self._steps_between_begins(self.explained_steps)
        return [_Block("explained", begin, self.explained_steps) for begin in reversed(begins_last_first)]

    def _phase(self, step: int) -> int:
        """Return the number of a step in its burst, from 0 to `workers` - 1."""
        return step % self.workers

    def _last_begin(self, latest: int, *, phase: int | None) -> int | None:
        """Return the last step up to `latest` at which an explained block may begin; None where none is near.

        Args:
            latest: the last step to look at.
            phase: the phase in which the block begins; None: any will do.
        """
        begin = latest
        stride = 1
        if phase is not None:
            steps_since_phase = (latest - phase) % self.workers
            begin = latest - steps_since_phase
            stride = self.workers
        # A block of n steps begins neither at an epoch's first step nor at its last n - 1 steps. So of n + 1 steps in a
        # row one will do; with a longer stride perhaps none does.
        for _ in range(self.explained_steps + 1):
            may_begin = self._first_begin_from(begin, self.explained_steps) == begin
            if may_begin:
                return begin
            begin -= stride
        return None

    def _with_gradients(self, blocks: list[_Block], reserved: int = 0) -> list[_Block]:
        """Return the blocks and after them the longest block of gradients that fits, if any does.

        `reserved`: steps that are kept for explained blocks, if these take fewer as yet.
        """
        spent = max(reserved, sum(block.length + self.settling_steps for block in blocks))
        for length in self.gradient_steps:
            gradients = self._placed_forward("gradients", [length], previous=blocks, spent=spent)
            if gradients:
                return [*blocks, *gradients]
        return blocks

    def _steps_between_begins(self, length: int) -> int:
        """Return the steps from the beginning of a block to that of the next, with settling and timed steps between.

        On a host there are as many timed steps as the block takes; on a GPU a few, as they are in no reported time.
        From block to block the phase moves on by one, so that the blocks' mean is the loader's.

        Args:
            length: steps of the block.
        """
        block_steps = length + self.settling_steps
        timed_steps = _ATTACHED_STEPS if self.device == "cuda" else max(_LIGHT_STEPS, block_steps)
        distance = block_steps + timed_steps
        missing_to_next_phase = (1 - distance) % self.workers
        return distance + missing_to_next_phase

    def _count_in_whole_bursts(self, count: int) -> int:
        """Return the most blocks up to `count` that lie equally often in every phase; `count` where phases are more."""
        if count <= self.workers:
            return count
        return count // self.workers * self.workers

    def _first_begin_from(self, earliest: int, length: int) -> int:
        """Return the first step from `earliest` on where `length` steps lie in one epoch and do not begin it."""
        step_in_epoch = earliest % self.steps_per_epoch
        if step_in_epoch == 0:
            return earliest + 1
        if step_in_epoch + length <= self.steps_per_epoch:
            return earliest
        next_epoch = earliest - step_in_epoch + self.steps_per_epoch
        return next_epoch + 1

    def _end(self, block: _Block) -> int:
        """Return the step after a block and its settling."""
        return block.begin + block.length + self.settling_steps

    def windows_with(self, blocks: list[_Block]) -> tuple[StepWindow, ...]:
        """Return the window of each step of a run with these blocks, which are in order."""
        kinds: list[StepWindow] = ["light"] * self.steps
        explained_begins = [block.begin for block in blocks if block.window == "explained"]
        if self.device == "cuda" and explained_begins:
            first_explained = explained_begins[0]
            kinds[first_explained:] = ["attached"] * (self.steps - first_explained)
        for window, begin, length in blocks:
            end = begin + length
            kinds[begin:end] = [window] * length
            kinds[end : end + self.settling_steps] = ["settling"] * self.settling_steps
        return tuple(kinds)

    def _has_few_light_steps(self, blocks: list[_Block]) -> bool:
        """Whether these blocks leave fewer steps light than a run must have."""
        after_warmup = self.windows_with(blocks)[self.warmup_steps :]
        return after_warmup.count("light") < _LEAST_LIGHT_SHARE * len(after_warmup)

    def _light_epochs(self, kinds: tuple[StepWindow, ...]) -> int:
        """Return the number of whole epochs after warm-up that have only light steps.

        `kinds`: the window of each step of the run.
        """
        light_epochs = 0
        for begin in range(0, self.steps - self.steps_per_epoch + 1, self.steps_per_epoch):
            kinds_of_epoch = set(kinds[begin : begin + self.steps_per_epoch])
            if begin >= self.warmup_steps and kinds_of_epoch == {"light"}:
                light_epochs += 1
        return light_epochs
