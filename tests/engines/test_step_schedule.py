"""Which steps are timed: the schedule of light, explained, settling and gradient steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results_factory import make_trial
from vitscale.engines.step_schedule import BLOCKS, EXPLAINED_STEPS, FEWEST_LIGHT, shortest_run, timed_stretch, windows
from vitscale.trial.trial import StepWindow, Trial


def trial_of(
    *,
    gpus: int = 1,
    grad_accum: int = 1,
    workers: int = 0,
    warmup_steps: int = 3,
    device: str = "cpu",
    explain: bool = True,
) -> Trial:
    trial = make_trial("ddp", gpus, grad_accum=grad_accum, warmup_steps=warmup_steps)
    return trial.model_copy(
        update={
            "data": trial.data.model_copy(update={"workers": workers}),
            "train": trial.train.model_copy(update={"device": device}),
            "window": trial.window.model_copy(update={"explain": explain}),
        }
    )


trials = st.builds(
    trial_of,
    gpus=st.sampled_from([1, 2]),
    grad_accum=st.integers(1, 3),
    workers=st.integers(0, 9),
    warmup_steps=st.integers(0, 6),
    device=st.sampled_from(["cpu", "cuda"]),
)


def groups(found: Sequence[str]) -> list[tuple[str, int]]:
    return [(window, len(list(group))) for window, group in groupby(found)]


def test_light_and_explained_steps_alternate_at_the_beginning_and_at_the_end() -> None:
    assert groups(windows(trial_of(), 120, 1000)) == [
        ("light", 7), ("explained", 1), ("settling", 1),
        *[("light", 4), ("explained", 1), ("settling", 1)] * 3,
        ("light", 69),
        *[("explained", 1), ("settling", 1), ("light", 4)] * 4,
    ]  # fmt: skip


def test_epochs_between_the_blocks_are_light_and_a_run_of_two_epochs_keeps_its_second() -> None:
    def explained_by_epoch(epochs: int) -> list[int]:
        found = windows(trial_of(), 100 * epochs, 100)
        return [found[100 * n : 100 * (n + 1)].count("explained") for n in range(epochs)]

    assert explained_by_epoch(5) == [4, 0, 0, 0, 4]
    assert explained_by_epoch(3) == [4, 0, 4]
    assert explained_by_epoch(2) == [8, 0]
    assert explained_by_epoch(1) == [8]


def test_on_a_gpu_the_profiler_comes_last_with_attached_steps_beside_it() -> None:
    blocks = [
        *[("explained", 3), ("settling", 1), ("attached", 2)] * 3,
        ("explained", 3),
        ("settling", 1),
        ("attached", 4),
    ]
    assert groups(windows(trial_of(device="cuda"), 120, 1000)) == [("light", 94), *blocks]
    assert groups(windows(trial_of(device="cuda", gpus=2), 200, 1000)) == [
        ("light", 7), ("gradients", 32), ("settling", 1), ("light", 134), *blocks,
    ]  # fmt: skip
    # Of a run by epochs, all but the last are light.
    found = windows(trial_of(device="cuda"), 300, 100)
    assert set(found[:200]) == {"light"}
    assert found.index("explained") == 274


def test_a_short_run_on_a_gpu_has_fewer_blocks_and_rather_gradients_than_a_fourth() -> None:
    sixty = windows(trial_of(device="cuda", gpus=2), 63, 1000)
    assert (sixty.count("explained"), sixty.count("gradients"), sixty[3:].count("light")) == (9, 8, 31)
    assert windows(trial_of(device="cuda"), 63, 1000).count("explained") == 12
    assert groups(windows(trial_of(device="cuda"), 30, 1000)) == [
        ("light", 22), ("explained", 3), ("settling", 1), ("attached", 4),
    ]  # fmt: skip


def test_gradient_steps_follow_where_a_step_has_two_batch_sizes() -> None:
    assert "gradients" not in windows(trial_of(), 200, 1000)
    for trial in (trial_of(gpus=2), trial_of(grad_accum=2)):
        found = windows(trial, 200, 1000)
        assert found.count("gradients") == 32
        explained = [step for step, window in enumerate(found) if window == "explained"]
        assert explained[3] < found.index("gradients") < explained[4]


def test_a_short_run_or_epoch_has_fewer_gradient_steps() -> None:
    assert windows(trial_of(gpus=2), 80, 1000).count("gradients") == 8
    assert windows(trial_of(gpus=2), 300, 30).count("gradients") == 8
    assert windows(trial_of(gpus=2), 300, 8).count("gradients") == 0


def test_a_pause_is_settled_by_a_step_for_each_batch_a_thread_has_in_hand() -> None:
    found = windows(trial_of(workers=3), 300, 1000)
    settled = [len(list(group)) for window, group in groupby(found) if window == "settling"]
    assert set(settled) == {4}
    halved = windows(trial_of(workers=3, grad_accum=2), 300, 1000)
    assert {len(list(group)) for window, group in groupby(halved) if window == "settling"} == {3}


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_blocks_look_at_every_place_of_the_loaders_bursts_equally_often(workers: int) -> None:
    """Threads that began together deliver together, every `workers` steps."""
    for steps in (40 * workers, 300):
        found = windows(trial_of(workers=workers), steps, 1000)
        places = [step % workers for step, window in enumerate(found) if window == "explained"]
        assert len(places) >= workers
        assert {places.count(place) for place in range(workers)} == {len(places) // workers}


def test_a_run_that_is_too_short_or_not_to_be_explained_is_light() -> None:
    assert set(windows(trial_of(), 8, 1000)) == {"light"}
    assert set(windows(trial_of(explain=False), 500, 1000)) == {"light"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_long_run_has_all_its_blocks(device: str) -> None:
    found = windows(trial_of(device=device), 1000, 5000)
    assert found.count("explained") == BLOCKS[device] * EXPLAINED_STEPS[device]


@given(trials, st.integers(0, 300), st.integers(1, 60))
def test_what_always_holds(trial: Trial, steps: int, steps_per_epoch: int) -> None:
    found = windows(trial, steps, steps_per_epoch)
    assert len(found) == steps
    warmup = trial.window.warmup_steps
    assert set(found[:warmup]) <= {"light"}
    rest = found[warmup:]
    assert rest.count("light") >= len(rest) / 2
    device = trial.train.device
    if device == "cuda" and "explained" in found:
        assert not {"light", "gradients"} & set(found[found.index("explained") :])
    else:
        assert "attached" not in found
    for step, window in enumerate(found):
        if window in ("explained", "gradients") and found[step - 1] != window:
            block = next(n for n in range(len(found) - step + 1) if (*found, "end")[step + n] != window)
            assert step % steps_per_epoch != 0
            assert step // steps_per_epoch == (step + block - 1) // steps_per_epoch
            assert found[step - 1] == ("attached" if "explained" in found[:step] and device == "cuda" else "light")
            assert found[step + block] == "settling"


def test_the_longest_stretch_of_timed_steps_of_an_epoch() -> None:
    found = windows(trial_of(), 120, 40)
    assert timed_stretch(found, 3, range(40)) == range(27, 40)  # after the early blocks
    assert timed_stretch(found, 3, range(40, 80)) == range(40, 80)
    assert timed_stretch(found, 3, range(80, 120)) == range(80, 96)  # before the late ones
    # Of the equally long stretches between two blocks the last.
    assert timed_stretch(found, 3, range(27)) == range(21, 25)


def test_a_stretch_keeps_to_its_epoch_and_to_what_is_timed() -> None:
    kinds: tuple[StepWindow, ...] = ("light", "light", "light", "explained", "settling", "light", "light", "light")
    assert timed_stretch(kinds, 1, range(8)) == range(5, 8)
    assert timed_stretch(kinds, 1, range(5)) == range(1, 3)
    assert timed_stretch(kinds, 3, range(4)) == range(4)  # it has none


# --- the shortest run ------------------------------------------------------------------------------------------------


@given(trials, st.sampled_from([30, 200, 1000]))
def test_the_shortest_run_has_twenty_timed_steps_and_two_explained_blocks_and_none_shorter_has(
    trial: Trial, per_epoch: int
) -> None:
    warmup = trial.window.warmup_steps

    def enough(steps: int) -> bool:
        kinds = windows(trial, steps + warmup, per_epoch)[warmup:]
        blocks = sum(window == "explained" for window, _ in groups(kinds))
        return kinds.count("light") >= FEWEST_LIGHT and blocks >= 2

    shortest = shortest_run(trial, per_epoch)
    assert enough(shortest)
    assert not any(map(enough, range(FEWEST_LIGHT, shortest)))


@given(trials)
def test_without_room_or_need_to_explain_it_is_twenty_timed_steps(trial: Trial) -> None:
    unexplained = trial.model_copy(update={"window": trial.window.model_copy(update={"explain": False})})
    assert shortest_run(unexplained, 1000) == FEWEST_LIGHT
    kinds = windows(trial, (shortest := shortest_run(trial, 1)) + trial.window.warmup_steps, 1)
    assert "explained" not in kinds  # no block fits into an epoch of one step
    assert shortest <= 2 * FEWEST_LIGHT + 32
