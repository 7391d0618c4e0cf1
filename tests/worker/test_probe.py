"""A Probe: nothing outside a study; inside one, the steps of the user's loop as records."""

from __future__ import annotations

import inspect
import json
import os
import re
import runpy
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from typing_extensions import override

from forks import prepared_here
from study_factory import expanded
from vitscale import Probe, composer_callback, lightning_callback
from vitscale.engines.step_schedule import windows
from vitscale.probes import resources
from vitscale.probes import steps as step_clock
from vitscale.store import RankLog
from vitscale.store.lines import read_lines
from vitscale.store.records import EnergyReading, RankRecord
from vitscale.store.results import RunHeader
from vitscale.trial.trial import Trial
from vitscale.worker.probe import Current
from vitscale.worker.rank_process import RankInfo
from vitscale.worker.script_steps import ScriptSteps


class Loop:
    """A script's rank without its script."""

    def __init__(
        self, folder: Path, accumulate: int = 1, steps: int = 24, micro_batch: int = 4, **measure: Any
    ) -> None:
        (folder / "train.py").write_text("pass")
        train = {"script": "train.py", "precision": "fp32", "grad_accum": accumulate, "epochs": None}
        train["micro_batch"] = micro_batch
        changes: dict[str, dict[str, Any]] = {
            "model": {"name": None, "image_size": None, "patch_size": None},
            "train": train,
            "scaling": {"gpus": [1]},
            "measure": {"steps": steps, "warmup_steps": 2} | measure,
        }
        (self.trial,) = expanded(folder, changes, train_samples=40).trials.values()
        identity = self.trial.identity()
        header = RunHeader(
            trial_id=identity, repeat=0, attempt=0, trial=self.trial, command=(), dataset_fingerprint="f"
        )
        self.log = RankLog(folder, 0)
        place = RankInfo(rank=0, world_size=1, local_rank=0, launch_seconds=None)
        self.script_steps = ScriptSteps(header, place, self.log, time.perf_counter())
        Current.script_steps = self.script_steps
        self.probe = Probe()
        self.loader = [torch.zeros(4, 1) for _ in range(10)]

    def record(self) -> RankRecord:
        self.script_steps.end()
        self.log.close()
        return read_lines(self.log.path, RankRecord, lambda *_: None)


@pytest.fixture(autouse=True)
def outside() -> Iterator[None]:
    yield
    if Current.script_steps is not None:
        Current.script_steps.drop_step()  # a first step left open would watch torch's compiler from here on
    Current.script_steps = Current.start = None


def planned(trial: Trial, per_epoch: int = 10) -> list[tuple[int, str, bool]]:
    """(Step, window, whether it is warm-up), as vitscale's own loop has them."""
    last = (trial.window.steps or 0) + trial.window.warmup_steps
    return [(n, window, n < trial.window.warmup_steps) for n, window in enumerate(windows(trial, last, per_epoch))]


# --- outside a study -------------------------------------------------------------------------------------------------


def test_outside_a_study_it_is_nothing() -> None:
    probe, loader = Probe(), [1, 2, 3]
    assert probe.steps(loader, accumulate=2, images=7) is loader
    with probe.step(images=3), probe.phase("forward"), probe.pause():
        probe.loss(1.0)
    probe.describe(parameters=3, precision="no such")
    assert not probe.done


def test_it_imports_nothing_heavy() -> None:
    program = (
        "import sys; from vitscale import Probe; Probe().describe(parameters=1)\n"
        "heavy = {'torch', 'numpy', 'polars', 'pydantic', 'deepspeed', 'rich', 'typer'}\n"
        "print(sorted(heavy & {name.partition('.')[0] for name in sys.modules}))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def run_example(folder: Path) -> dict[str, Any]:
    """Runs the script in the docstring of `Probe`; returns what its names are in the end."""
    (script,) = re.findall(r"^    import torch$.*\Z", inspect.getdoc(Probe) or "", re.DOTALL | re.MULTILINE)
    path = folder / "example.py"
    path.write_text(textwrap.dedent(script), encoding="utf-8")
    return runpy.run_path(str(path))


def test_the_example_of_its_docstring_trains_outside_a_study(tmp_path: Path) -> None:
    names = run_example(tmp_path)
    assert not names["probe"].done
    assert names["epoch"] == 2
    assert names["loss"].item() < 10


def test_the_example_of_its_docstring_is_measured_in_a_study(tmp_path: Path) -> None:
    loop = Loop(tmp_path, micro_batch=8)
    assert run_example(tmp_path)["probe"].done
    record = loop.record()
    assert [(s.step, s.window, s.warmup) for s in record.steps] == planned(loop.trial)
    assert {s.images for s in record.steps} == {8}
    assert [s.epoch for s in record.steps] == [0] * 20 + [1] * 6
    assert all(s.loss is not None for s in record.steps)
    assert record.model is not None
    assert record.model.parameters == 12 * 10 + 10


# --- inside one ------------------------------------------------------------------------------------------------------


def test_its_steps_are_those_that_vitscale_s_own_loop_would_record(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    passes = 0
    while not loop.probe.done:
        for batch in loop.probe.steps(loop.loader):
            loop.probe.loss(batch.sum() + 2.5)
        passes += 1
    record = loop.record()
    assert [(s.step, s.window, s.warmup) for s in record.steps] == planned(loop.trial)
    assert {s.images for s in record.steps} == {4}
    assert {s.loss for s in record.steps} == {2.5}
    assert passes == 3  # 26 steps, 10 to a pass
    assert [line.step for line in record.explained] == [
        n for n, window, _ in planned(loop.trial) if window == "explained"
    ]
    assert record.start is not None
    assert record.start.trial == loop.trial.identity()
    assert [phase.name for phase in record.phases] == ["script", "first_step"]
    assert record.resources[0].steps is not None


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that goes on where a test says."""
    moment = [0.0]
    monkeypatch.setattr(
        step_clock, "time", SimpleNamespace(perf_counter=lambda: moment[0], monotonic=time.monotonic, sleep=time.sleep)
    )
    return moment


def test_each_pass_over_a_loader_is_an_epoch_of_its_own(tmp_path: Path, now: list[float]) -> None:
    """Their clocks start anew, so that what lies between two passes is in no step."""
    loop = Loop(tmp_path)
    for _ in range(3):
        for _batch in loop.probe.steps(loop.loader):
            now[0] += 0.25
        now[0] += 100.0
    record = loop.record()
    assert [s.epoch for s in record.steps] == [0] * 10 + [1] * 10 + [2] * 6
    assert {s.seconds for s in record.steps} == {0.25}


def test_a_step_is_timed_from_the_end_of_the_one_before(tmp_path: Path, now: list[float]) -> None:
    """So the wait for data counts though it lies outside of the block, and what is in a pause does not."""
    loop = Loop(tmp_path, steps=3, explain=False)
    for number in range(5):
        if number == 3:
            with loop.probe.pause():
                now[0] += 100.0
        now[0] += 0.5  # the next batch
        with loop.probe.step(images=4):
            now[0] += 1.0
    # The first step is taken for one from its own beginning: what was before it is start-up.
    assert [s.seconds for s in loop.record().steps] == [1.0, 1.5, 1.5, 1.5, 1.5]


def test_accumulation_makes_one_step_of_several_batches(tmp_path: Path) -> None:
    loop = Loop(tmp_path, accumulate=2, steps=8)
    while not loop.probe.done:
        for number, _ in enumerate(loop.probe.steps(loop.loader, accumulate=2)):
            loop.probe.loss(float(number))
    record = loop.record()
    assert [s.step for s in record.steps] == list(range(10))
    assert {s.images for s in record.steps} == {8}
    assert [s.loss for s in record.steps][:2] == [0.5, 2.5]  # the means over (0, 1) and (2, 3)


def test_a_loss_told_after_enough_is_measured_is_not_kept(tmp_path: Path) -> None:
    class Loss(float):
        """One that can be looked for."""

    loop, loss = Loop(tmp_path, steps=2), Loss(2.5)
    while not loop.probe.done:
        with loop.probe.step(images=4):
            loop.probe.loss(1.0)
    kept = weakref.ref(loss)
    loop.probe.loss(loss)
    del loss
    assert kept() is None


def test_batches_that_fill_no_step_are_in_none(tmp_path: Path) -> None:
    loop = Loop(tmp_path, accumulate=2, steps=8)
    while not loop.probe.done:
        for _ in loop.probe.steps(loop.loader[:5], accumulate=2):
            pass
    assert {s.images for s in loop.record().steps} == {8}


def test_the_last_step_of_a_loader_may_be_short_and_no_other(tmp_path: Path) -> None:
    loop = Loop(tmp_path, steps=4)
    last = torch.zeros(3, 1)
    while not loop.probe.done:
        for _ in loop.probe.steps([*loop.loader[:2], last]):
            pass
    assert [s.images for s in loop.record().steps] == [4, 4, 3, 4, 4, 3]


def test_a_short_step_before_the_last_is_refused(tmp_path: Path) -> None:
    loop = Loop(tmp_path, steps=4)
    with pytest.raises(ValueError, match="trains 3 images in this optimizer step of rank 0, and the study says 4"):
        for _ in loop.probe.steps([torch.zeros(3, 1), *loop.loader]):
            pass


@pytest.mark.parametrize("images", [3, 5, 8])
def test_other_images_than_the_study_says_are_refused_by_both_numbers(tmp_path: Path, images: int) -> None:
    loop = Loop(tmp_path)
    with (
        pytest.raises(ValueError, match=rf"{images} images .* says 4 \(train.micro_batch = 4 x train.grad_accum = 1\)"),
        loop.probe.step(images=images),
    ):
        pass


def test_another_accumulation_is_refused_by_both_numbers(tmp_path: Path) -> None:
    loop = Loop(tmp_path, accumulate=2)
    with pytest.raises(ValueError, match=r"probe.steps\(accumulate=1\), and this trial has train.grad_accum = 2"):
        list(loop.probe.steps(loop.loader))


@pytest.mark.parametrize("name", ["forwrd", "bubble", ["forward"]])
def test_a_phase_that_there_is_not_is_refused_with_the_five(tmp_path: Path, name: Any) -> None:
    loop = Loop(tmp_path)
    five = "one of 'data', 'h2d', 'forward', 'backward', 'optimizer'"
    with pytest.raises(ValueError, match=re.escape(f"probe.phase({name!r}): a phase is {five}")):
        loop.probe.phase(name).__enter__()
    for phase in ("data", "h2d", "forward", "backward", "optimizer"):
        loop.probe.phase(phase).__enter__()


def test_images_are_counted_in_the_first_tensor_or_as_it_is_told(tmp_path: Path) -> None:
    loop = Loop(tmp_path, steps=9)
    batch = {"name": "x", "pixels": [torch.zeros(4, 3), torch.zeros(9)]}
    list(zip(loop.probe.steps([batch] * 2), range(2), strict=False))
    list(zip(loop.probe.steps(["four"] * 2, images=len), range(2), strict=False))
    list(zip(loop.probe.steps(["?"] * 2, images=4), range(2), strict=False))
    with pytest.raises(ValueError, match=r"give probe\.steps"):
        list(loop.probe.steps(["four"]))


def test_what_a_script_does_not_name_is_unknown_and_what_it_names_is_not(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    while not loop.probe.done:
        for _ in loop.probe.steps(loop.loader):
            with loop.probe.phase("forward"):
                torch.zeros(3).sum()
    (line, *_) = loop.record().explained
    assert {"backward", "optimizer"} <= line.unknown.keys()
    assert "probe.phase('backward')" in line.unknown["backward"]
    assert not {"forward", "data_wait"} & line.unknown.keys()
    assert {name for name, _, _ in line.phases} == {"data", "forward"}


def test_a_pause_before_a_profiled_step_only_puts_its_profile_off(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    for _ in range(40):
        with loop.probe.step(images=4):
            pass
        with loop.probe.pause():
            pass
    record = loop.record()
    assert [(s.step, s.window, s.warmup) for s in record.steps] == planned(loop.trial)
    assert [line.step for line in record.explained] == [
        n for n, window, _ in planned(loop.trial) if window == "explained"
    ]


def train(batch: torch.Tensor, now: list[float]) -> None:
    layer = torch.nn.Linear(1, 1)
    layer(batch).sum().backward()
    torch.optim.SGD(layer.parameters(), 0.1).step()
    now[0] += 0.25


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("every", [1, 3])
def test_a_pause_after_a_step_s_optimizer_ends_it(
    tmp_path: Path, now: list[float], accumulate: int, every: int
) -> None:
    loop, steps = Loop(tmp_path, accumulate=accumulate, steps=5, explain=False), 0
    for _epoch in range(3):
        for number, batch in enumerate(loop.probe.steps(loop.loader, accumulate=accumulate)):
            if number % accumulate == accumulate - 1:
                train(batch, now)
                steps += 1
                if steps % every == 0:
                    with loop.probe.pause():
                        now[0] += 100.0
    record = loop.record()
    assert [(s.step, s.seconds) for s in record.steps] == [(n, 0.25) for n in range(7)]
    assert steps == 7


def test_a_pause_before_a_step_s_optimizer_gives_it_up(tmp_path: Path, now: list[float]) -> None:
    """As of loops that evaluate before they train the batch in hand, which is in no step then: not in the next one."""
    loop, steps = Loop(tmp_path, steps=5, explain=False), 0
    for _epoch in range(3):
        for batch in loop.probe.steps(loop.loader):
            if steps % 3 == 0:
                with loop.probe.pause():
                    now[0] += 100.0
            train(batch, now)
            steps += 1
    assert [(s.step, s.seconds) for s in loop.record().steps] == [(n, 0.25) for n in range(7)]
    assert steps == 11  # without the first, fourth, seventh and tenth


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_counts_whose_loop_is_left_after_its_optimizer(
    tmp_path: Path, now: list[float], capsys: pytest.CaptureFixture[str], accumulate: int
) -> None:
    loop = Loop(tmp_path, accumulate=accumulate, steps=7, explain=False)
    for _epoch in range(3):
        for number, batch in enumerate(loop.probe.steps(loop.loader, accumulate=accumulate)):
            loop.probe.loss(2.5)
            if number % accumulate == accumulate - 1:
                train(batch, now)
            if number == 3 * accumulate - 1:
                break
        now[0] += 100.0
    assert loop.probe.done
    record = loop.record()
    assert [(s.step, s.seconds, s.loss, s.epoch) for s in record.steps] == [(n, 0.25, 2.5, n // 3) for n in range(9)]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_is_dropped_and_said_to_be_whose_loop_is_left_before_its_optimizer(
    tmp_path: Path, now: list[float], capsys: pytest.CaptureFixture[str], accumulate: int
) -> None:
    loop = Loop(tmp_path, accumulate=accumulate, steps=4, explain=False)
    for _epoch in range(3):
        for number, batch in enumerate(loop.probe.steps(loop.loader, accumulate=accumulate)):
            if number == 2 * accumulate:
                now[0] += 100.0
                break
            if number % accumulate == accumulate - 1:
                train(batch, now)
    assert [(s.step, s.seconds) for s in loop.record().steps] == [(n, 0.25) for n in range(6)]
    assert "vitscale: 2 optimizer step(s) of rank 0 are not in the record" in capsys.readouterr().err


def test_a_profile_whose_last_step_leaves_its_loop_is_kept(tmp_path: Path, now: list[float]) -> None:
    """Each loop takes one step, so that also the last one of each block of explained steps is left by `break`."""
    loop = Loop(tmp_path)
    for _ in planned(loop.trial):
        for batch in loop.probe.steps(loop.loader):
            train(batch, now)
            break
    record = loop.record()
    assert [(s.step, s.window, s.warmup) for s in record.steps] == planned(loop.trial)
    assert [line.step for line in record.explained] == [
        n for n, window, _ in planned(loop.trial) if window == "explained"
    ]


def test_leaving_a_loop_waits_for_no_other_rank(
    tmp_path: Path, now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error may have ended it on this rank alone, here in the last of a block of explained steps."""
    loop = Loop(tmp_path)
    explained = [n for n, window, _ in planned(loop.trial) if window == "explained"]
    (last, *_) = [n for n in explained if n + 1 not in explained]
    meetings: list[int] = []
    monkeypatch.setattr("vitscale.worker.recorder.barrier", lambda: meetings.append(loop.script_steps.step))
    with suppress(KeyError):
        for batch in loop.probe.steps(loop.loader * 3):
            train(batch, now)
            if loop.script_steps.step == last:
                meetings.clear()
                raise KeyError("a metric")
    assert loop.script_steps.step == last + 1
    assert meetings == []


def test_a_loop_that_is_held_after_it_was_left_disturbs_no_later_one(tmp_path: Path, now: list[float]) -> None:
    loop = Loop(tmp_path, steps=6, explain=False)
    first = iter(loop.probe.steps(loop.loader))
    for _ in range(2):
        train(next(first), now)
    for number, batch in enumerate(loop.probe.steps(loop.loader)):
        if number == 1:
            del first
        train(batch, now)
    assert [(s.step, s.seconds, s.epoch) for s in loop.record().steps] == [(n, 0.25, int(n > 1)) for n in range(8)]


def test_too_many_images_in_the_step_that_leaves_its_loop_are_refused_at_the_end(
    tmp_path: Path, now: list[float]
) -> None:
    """Where the loop is left nothing can be raised: Python closes its generator there."""
    loop = Loop(tmp_path)
    for batch in loop.probe.steps([torch.zeros(8, 1)]):
        train(batch, now)
        break
    with pytest.raises(ValueError, match="trains 8 images in this optimizer step of rank 0, and the study says 4"):
        loop.script_steps.end()


def test_the_time_of_a_pause_that_fails_is_in_no_step(tmp_path: Path, now: list[float]) -> None:
    loop = Loop(tmp_path, steps=4, explain=False)
    for number in range(6):
        with loop.probe.step(images=4):
            now[0] += 0.25
        if number == 3:
            with suppress(OSError), loop.probe.pause():
                now[0] += 100.0
                raise OSError("no space left for a checkpoint")
    assert [s.seconds for s in loop.record().steps] == [0.25] * 6


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch, now: list[float]) -> list[float]:
    """That clock, also for what a rank uses: it computes all the time."""
    clocks = SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: now[0])
    monkeypatch.setattr(resources, "time", clocks)
    return now


def test_resources_are_of_steps_without_a_pause(tmp_path: Path, used: list[float]) -> None:
    """Two steps warm up; a pause of 100 s divides the others into five and three."""
    loop = Loop(tmp_path, steps=8, explain=False)
    for number, batch in enumerate(loop.probe.steps(loop.loader)):
        train(batch, used)
        if number == 6:
            with loop.probe.pause():
                used[0] += 100.0
    (line,) = loop.record().resources
    assert line.steps == (2, 6)
    assert (line.seconds, line.cpu_seconds) == (5 * 0.25, 5 * 0.25)


def test_resources_are_of_steps_without_what_lies_between_two_loops(tmp_path: Path, used: list[float]) -> None:
    loop = Loop(tmp_path, steps=8, explain=False)
    while not loop.probe.done:
        for batch in loop.probe.steps(loop.loader[:7]):
            train(batch, used)
        used[0] += 100.0
    (line,) = loop.record().resources
    assert line.steps == (2, 6)
    assert (line.seconds, line.cpu_seconds) == (5 * 0.25, 5 * 0.25)


def test_resources_are_of_steps_without_one_that_fails(tmp_path: Path, used: list[float]) -> None:
    loop = Loop(tmp_path, steps=8, explain=False)
    for number in range(11):
        with suppress(KeyError), loop.probe.step(images=4):
            used[0] += 0.25
            if number == 7:
                used[0] += 100.0
                raise KeyError("an image that cannot be read")
    (line,) = loop.record().resources
    assert line.steps == (7, 9)
    assert line.seconds == 3 * 0.25


class JoulePerSecond(resources.EnergyMeter):
    """An energy meter that counts one joule in each second of a test's clock."""

    def __init__(self, now: list[float]) -> None:
        super().__init__(reason="")
        self._now = now
        self._began = 0.0

    def begin(self) -> None:
        self._began = self._now[0]

    def end(self) -> EnergyReading:
        return EnergyReading(joules=self._now[0] - self._began, source="a test", reason=None)


@pytest.fixture
def joules(monkeypatch: pytest.MonkeyPatch, used: list[float]) -> list[float]:
    """That clock, which the energy meter follows."""
    monkeypatch.setattr(resources, "energy_meter", lambda *_: JoulePerSecond(used))
    return used


def train_in_steps_of_four_batches(loop: Loop, loader: Iterable[torch.Tensor], now: list[float]) -> None:
    while not loop.probe.done:
        for number, batch in enumerate(loop.probe.steps(loader, accumulate=4)):
            if number % 4 == 3:
                train(batch, now)
            else:
                now[0] += 0.25


def test_energy_of_batches_that_fill_no_step_is_in_no_stretch(tmp_path: Path, joules: list[float]) -> None:
    """Of each ten batches two fill no step: their quarter of a second each would make J/image 25 % too high."""
    loop = Loop(tmp_path, accumulate=4, steps=7, explain=False)
    train_in_steps_of_four_batches(loop, loop.loader, joules)
    (line,) = loop.record().resources
    assert line.steps == (6, 7)
    assert line.energy is not None
    assert line.energy.joules == 2 * 4 * 0.25
    assert (line.seconds, line.cpu_seconds) == (2 * 4 * 0.25, 2 * 4 * 0.25)


def test_a_loader_without_a_length_leaves_no_stretch_that_ends_in_batches_of_no_step(
    tmp_path: Path, joules: list[float]
) -> None:
    """Nobody knows before its ninth batch that it has ten. The last pass is cut by the end of the measurement."""

    class Stream(list[torch.Tensor]):
        def __len__(self) -> int:
            raise TypeError("a stream")

    loop = Loop(tmp_path, accumulate=4, steps=7, explain=False)
    train_in_steps_of_four_batches(loop, Stream(loop.loader), joules)
    (line,) = loop.record().resources
    assert line.steps == (8, 8)
    assert line.energy is not None
    assert line.energy.joules == 4 * 0.25


@pytest.mark.parametrize("length", [2, 6, 9, 17, 400])
def test_a_loader_with_a_wrong_length_has_usual_steps(tmp_path: Path, now: list[float], length: int) -> None:
    class Wrong(list[torch.Tensor]):
        def __len__(self) -> int:
            return length

    loop = Loop(tmp_path, accumulate=4, steps=7, explain=False)
    train_in_steps_of_four_batches(loop, Wrong(loop.loader * 2), now)
    assert [(s.step, s.images, s.seconds) for s in loop.record().steps] == [(step, 16, 1.0) for step in range(9)]


@pytest.mark.parametrize(("seconds", "steps"), [(0.01, (2, 6)), (0.02, (7, 9))])
def test_a_stretch_is_kept_that_ends_in_hardly_any_work_of_no_step(
    tmp_path: Path, used: list[float], seconds: float, steps: tuple[int, int]
) -> None:
    """As of loops that take a batch and are left before they train it: one percent of the stretch's time may be so."""
    loop = Loop(tmp_path, steps=8, explain=False)
    for number in range(11):
        with loop.probe.step(images=4):
            if number == 7:
                used[0] += seconds
                with loop.probe.pause():
                    pass
            else:
                used[0] += 0.25
    (line,) = loop.record().resources
    assert line.steps == steps


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one rank, in this process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("batches", [3, 7])
def test_an_epoch_that_ends_before_a_counted_step_leaves_it_to_the_next(tmp_path: Path, batches: int) -> None:
    """Of six recorded steps and two counted ones, before one of which an epoch ends: it has begun, and sent nothing."""
    loop = Loop(tmp_path, steps=4, explain=False)
    while not loop.probe.done:
        for _ in loop.probe.steps(loop.loader[:batches]):
            dist.all_reduce(torch.zeros(5))
    traffic = loop.record().traffic
    assert [(line.step, [c.input_elements for c in line.collectives or ()]) for line in traffic] == [(6, [5]), (7, [5])]


def test_what_is_described_is_recorded_and_another_precision_refused(tmp_path: Path) -> None:
    loop = Loop(tmp_path, steps=2)
    loop.probe.describe(torch.nn.Linear(3, 5), flops_per_image=120.0, precision="fp32")
    with pytest.raises(ValueError, match=r"precision='bf16'.*train.precision = 'fp32'"):
        loop.probe.describe(precision="bf16")
    while not loop.probe.done:
        with loop.probe.step(images=4):
            pass
    model = loop.record().model
    assert model is not None
    assert (model.parameters, model.flops_per_image, model.train_samples) == (20, 120, 40)


def test_the_flops_of_a_described_module_are_counted_from_its_first_call(tmp_path: Path) -> None:
    """Layers of 3 x 5 and 5 x 2: the first needs no gradient of its input. 12 rows in batches of 4."""
    loop = Loop(tmp_path, steps=2)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    loop.probe.describe(model)
    while not loop.probe.done:
        with loop.probe.step(images=4):
            model(torch.zeros(4, 3)).sum().backward()
    described = loop.record().model
    assert described is not None
    assert described.parameters == 3 * 5 + 5 + 5 * 2 + 2
    assert described.flops_per_image == 2 * (2 * 3 * 5 + 3 * 5 * 2)
    assert not model._forward_pre_hooks


class Reading(torch.nn.Linear):
    """It reads a value, which a meta tensor does not have."""

    @override
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images) * float(images.sum() == 0)


def test_a_module_that_cannot_be_counted_is_measured_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = Loop(tmp_path, steps=2)
    model = Reading(3, 5)
    loop.probe.describe(model)
    while not loop.probe.done:
        with loop.probe.step(images=4):
            model(torch.zeros(4, 3)).sum().backward()
    described = loop.record().model
    assert described is not None
    assert (described.parameters, described.flops_per_image) == (20, None)
    assert "vitscale: the model's FLOPs are not counted" in capsys.readouterr().err


class WithoutStandIn(torch.Tensor):
    """A tensor of a user's that has no other of its shape."""

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty_like:
            raise TypeError("there is no other")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch's


def test_arguments_without_a_stand_in_do_not_end_the_script(tmp_path: Path) -> None:
    loop = Loop(tmp_path, steps=2)
    model = torch.nn.Linear(3, 5)
    loop.probe.describe(model)
    while not loop.probe.done:
        with loop.probe.step(images=4):
            model(torch.zeros(4, 3).as_subclass(WithoutStandIn)).sum().backward()
    described = loop.record().model
    assert described is not None
    assert (described.parameters, described.flops_per_image) == (20, None)


def test_an_end_before_enough_is_measured_is_an_error(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    for _ in zip(loop.probe.steps(loop.loader), range(5), strict=False):
        pass
    with pytest.raises(RuntimeError, match="the script ended after 5 of 26 optimizer steps"):
        loop.script_steps.end()


def test_an_exception_in_a_step_leaves_it_out(tmp_path: Path) -> None:
    loop = Loop(tmp_path, steps=2)
    with pytest.raises(KeyError), loop.probe.step(images=4):
        raise KeyError("x")
    while not loop.probe.done:
        with loop.probe.step(images=4):
            pass
    assert [s.step for s in loop.record().steps] == [0, 1, 2, 3]


def test_the_time_of_a_step_that_fails_is_in_no_step(tmp_path: Path, now: list[float]) -> None:
    """A loop that skips what it cannot train, and goes on."""
    loop = Loop(tmp_path, steps=4, explain=False)
    for number in range(7):
        with suppress(KeyError), loop.probe.step(images=4):
            now[0] += 0.25
            if number == 3:
                now[0] += 100.0
                raise KeyError("an image that cannot be read")
    assert [s.seconds for s in loop.record().steps] == [0.25] * 6


def test_steps_that_pauses_gave_up_are_told_when_there_are_too_few(tmp_path: Path) -> None:
    """Behind an optimizer that is not torch's, nobody tells that the step in hand is over."""
    loop = Loop(tmp_path, steps=4, explain=False)
    for _batch in loop.probe.steps(loop.loader):
        with loop.probe.pause():
            pass
    with pytest.raises(
        RuntimeError, match=r"ended after 0 of 6 .*: 10 more were left out because probe.pause\(\) came"
    ):
        loop.script_steps.end()


def test_pauses_between_whole_steps_leave_out_none(tmp_path: Path) -> None:
    loop = Loop(tmp_path, steps=4, explain=False)
    for _ in range(3):
        with loop.probe.step(images=4):
            pass
        with loop.probe.pause():
            pass
    with pytest.raises(RuntimeError, match=r"ended after 3 of 6 .*: let it train until probe\.done"):
        loop.script_steps.end()


def test_what_a_script_trains_in_a_step_after_a_pause_within_it_is_in_no_step(tmp_path: Path, now: list[float]) -> None:
    """Of seven steps the fourth is dropped by a pause in its block; the rest of the block is not in the fifth."""
    loop = Loop(tmp_path, steps=4, explain=False)
    for number in range(7):
        with loop.probe.step(images=4):
            now[0] += 0.25
            if number == 3:
                with loop.probe.pause():
                    now[0] += 100.0
                now[0] += 10.0
    assert [s.seconds for s in loop.record().steps] == [0.25] * 6


# --- callbacks -------------------------------------------------------------------------------------------------------


def test_an_evaluation_within_a_step_leaves_that_step_out(tmp_path: Path) -> None:
    """By the hooks of loops with Composer's events: the third of seven is given up, and its images are in no step."""
    loop, ended = Loop(tmp_path, steps=4), []
    callback = composer_callback()
    for number in range(8):
        state = SimpleNamespace(batch=torch.zeros(4, 1), stop_training=lambda number=number: ended.append(number))
        callback.batch_start(state, None)
        if number == 2:
            callback.eval_start(state, None)
            callback.eval_end(state, None)
        callback.batch_end(state, None)
        if number % 2:
            callback.eval_start(state, None)  # between two steps, which both stay
            callback.eval_end(state, None)
    assert ended == [6, 7]
    assert [(s.step, s.images) for s in loop.record().steps] == [(n, 4) for n in range(6)]


def hear_composer(sizes: list[int], now: list[float], *, lengths: bool = True) -> None:
    """Fires Composer's events in their order, for batches of these sizes, until the callback ends training."""
    ended: list[bool] = []
    callback = composer_callback()
    while not ended:
        state = SimpleNamespace(stop_training=lambda: ended.append(True), dataloader_len=None)
        callback.epoch_start(state, None)
        for number, size in enumerate(sizes):
            state.batch = torch.zeros(size, 1)
            if lengths:
                state.dataloader_len, state.timestamp = len(sizes), SimpleNamespace(batch_in_epoch=number)
            callback.batch_start(state, None)
            now[0] += 0.25
            callback.batch_end(state, None)
            if ended:
                break
        now[0] += 100.0  # a checkpoint, the workers of the next epoch's loader


def hear_lightning(sizes: list[int], now: list[float], *, lengths: bool = True, accumulate: int = 1) -> None:
    """Calls Lightning's hooks in their order, for batches of these sizes, until the callback ends training."""
    callback, batches = lightning_callback(), len(sizes) if lengths else float("inf")
    trainer = SimpleNamespace(accumulate_grad_batches=accumulate, num_training_batches=batches, should_stop=False)
    callback.on_train_start(trainer, torch.nn.Linear(1, 1))
    while not trainer.should_stop:
        callback.on_train_epoch_start(trainer, None)
        for number, size in enumerate(sizes):
            callback.on_train_batch_start(trainer, None, torch.zeros(size, 1), number)
            now[0] += 0.25
            callback.on_train_batch_end(trainer, None, None, None, number)
            if trainer.should_stop:
                break
        now[0] += 100.0  # a checkpoint, the workers of the next epoch's loader


@pytest.fixture(params=[hear_composer, hear_lightning])
def hear(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What calls a library's hooks, which need not be installed."""
    stub = SimpleNamespace(Callback=object)
    stubs = {"composer": stub, "lightning": SimpleNamespace(pytorch=stub), "lightning.pytorch": stub}
    for name, module in stubs.items():
        monkeypatch.setitem(sys.modules, name, module)
    return request.param


def test_callbacks_leave_out_what_lies_between_two_epochs(tmp_path: Path, now: list[float], hear: Any) -> None:
    loop = Loop(tmp_path, steps=9)
    hear([4] * 5, now)
    record = loop.record()
    assert [s.epoch for s in record.steps] == [0] * 5 + [1] * 5 + [2]
    assert {s.seconds for s in record.steps} == {0.25}


def test_callbacks_let_the_last_batch_of_a_loader_be_short(tmp_path: Path, now: list[float], hear: Any) -> None:
    loop = Loop(tmp_path, steps=5)
    hear([4, 4, 3], now)
    assert [s.images for s in loop.record().steps] == [4, 4, 3, 4, 4, 3, 4]


@pytest.mark.parametrize(("sizes", "lengths"), [([4, 3, 4], True), ([4, 4, 3], False), ([4, 4, 5], True)])
def test_callbacks_refuse_other_short_batches_and_what_cannot_be_told(
    tmp_path: Path, now: list[float], hear: Any, sizes: list[int], *, lengths: bool
) -> None:
    Loop(tmp_path, steps=5)
    with pytest.raises(ValueError, match=r"trains [35] images in this optimizer step of rank 0, and the study says 4"):
        hear(sizes, now, lengths=lengths)


@pytest.mark.parametrize("hear", [hear_lightning], indirect=True)
def test_lightning_s_callback_counts_all_batches_of_a_step(tmp_path: Path, now: list[float], hear: Any) -> None:
    loop = Loop(tmp_path, accumulate=2, steps=3)
    hear([4, 4, 4, 3], now, accumulate=2)
    assert [(s.images, s.seconds) for s in loop.record().steps] == [(8, 0.5), (7, 0.5)] * 2 + [(8, 0.5)]


def fit_with_lightning(loader: Any, folder: Path, **how: Any) -> int:
    """Trains and evaluates on a loader, in steps of two batches, for 90 epochs unless the callback ends it; returns
    how many batches were trained on."""
    lightning = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed: pip install lightning")

    class Model(lightning.LightningModule):  # type: ignore[misc,name-defined]  # where there is none it is of any type
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.batches = 0

        def training_step(self, batch: torch.Tensor, _number: int) -> torch.Tensor:
            self.batches += 1
            loss: torch.Tensor = self.layer(batch).sum()
            return loss

        def validation_step(self, batch: torch.Tensor, _number: int) -> None:
            self.layer(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = lightning.Trainer(
        accelerator="cpu", accumulate_grad_batches=2, max_epochs=90, callbacks=[lightning_callback()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        **how,
    )  # fmt: skip
    model = Model()
    trainer.fit(model, loader, loader)
    return model.batches


def test_lightning_s_callback_tells_the_same_steps(tmp_path: Path) -> None:
    """Of each two batches one; an evaluation after every pass is in no step; training ends when enough is measured."""
    loop = Loop(tmp_path, accumulate=2, steps=12)
    loader: Any = torch.utils.data.DataLoader([torch.zeros(1)] * 40, batch_size=4)  # type: ignore[arg-type]  # of any
    fit_with_lightning(loader, tmp_path)
    record = loop.record()
    assert [(s.step, s.images) for s in record.steps] == [(n, 8) for n in range(14)]
    assert [s.epoch for s in record.steps] == [0] * 5 + [1] * 5 + [2] * 4
    assert record.model is not None
    assert record.model.parameters == 2


def test_lightning_s_evaluations_and_last_batches_are_in_no_step(tmp_path: Path) -> None:
    """Of nine batches, in steps of two, the last fills none; of evaluations after each third the first is within the
    second step, so that the steps of an epoch are the first, the third and the fourth."""
    loop = Loop(tmp_path, accumulate=2, steps=7)
    loader: Any = torch.utils.data.DataLoader([torch.zeros(1)] * 36, batch_size=4)  # type: ignore[arg-type]  # of any
    # The ninth step ends with the eighth batch of the third epoch.
    assert fit_with_lightning(loader, tmp_path, val_check_interval=3) == 9 + 9 + 8
    assert [(s.step, s.images) for s in loop.record().steps] == [(n, 8) for n in range(9)]


TRAINER = """
import contextlib
import json
import sys
import torch
from transformers import Trainer, TrainingArguments
from vitscale import trainer_callback
from vitscale.worker.probe import Current

told = []


class Told:
    done = False

    def begin_step(self):
        pass

    def end_step(self, images, *, allow_fewer_images):
        told.append(images)

    def pause(self):
        return contextlib.nullcontext()

    def describe(self, *_, **__):
        pass


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.layer(x), labels)}


Current.script_steps = Told()
data = [{"x": torch.ones(2), "labels": torch.tensor(0)} for _ in range(17)]
settings = TrainingArguments(
    sys.argv[1], per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=2, report_to=[],
    save_strategy="no", use_cpu=True, disable_tqdm=True,
)
Trainer(model=Net(), args=settings, train_dataset=data, callbacks=[trainer_callback()]).train()
print(json.dumps(told))
"""


def test_the_trainer_s_callback_tells_the_images_that_each_step_had(tmp_path: Path) -> None:
    """Of 17 in batches of 4, two to a step: 8, 8 and the one that is left."""
    pytest.importorskip("transformers")
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    request = {"kind": "script", "argv": [str(script), str(tmp_path / "output")], "environment": alone}
    answer = prepared_here().run(request, 300)
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert json.loads(answer.stdout.splitlines()[-1]) == [8, 8, 1] * 2
