"""One rank without an engine, trained in this process: when it ends, and what it does in which step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from vitscale import models, sources, store
from vitscale.engines.base import LossOf
from vitscale.engines.plain.wrap import PlainEngine
from vitscale.engines.step_schedule import GRADIENT_STEPS, windows
from vitscale.errors import RequestError
from vitscale.models.batch_norm import over_real_images
from vitscale.probes.resources import ResourceProbe
from vitscale.probes.steps import Explainer, Phase, no_phase
from vitscale.processes.heartbeat import PROGRESS
from vitscale.store.records import RankRecord, ResourcesLine
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.trial import DataSpec, TrainSpec, Trial, WindowSpec, World
from vitscale.worker.extensions import BLOCKS
from vitscale.worker.passes import MicroBatch, Passes
from vitscale.worker.rank_process import RankInfo
from vitscale.worker.training import Training

CPU = torch.device("cpu")
MODEL = ModelSpec(
    name="vit-ti16", image_size=16, patch_size=8, layers=1, hidden_size=32, heads=2, mlp_size=64, num_classes=10
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Steps of milliseconds: on a busy machine threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trial_of(explain: bool = False, **train: object) -> Trial:
    """Digits, a fifth of the training images: 288, nine steps of 32 to an epoch."""
    fields = {"engine": "none", "precision": "fp32", "device": "cpu", "micro_batch": 16, "grad_accum": 2}
    return Trial(
        model=MODEL,
        data=DataSpec(name="digits", fraction=0.2),
        train=TrainSpec.model_validate(fields | {"learning_rate": 0.003} | train),
        world=World(ranks_per_node=1, threads_per_rank=1),
        window=WindowSpec(warmup_steps=1, explain=explain),
        launcher="local",
    )


class WatchedEngine(PlainEngine):
    """Notes for each step how many parameters had hooks on their gradients, and how its update was asked for."""

    def __init__(self, model: nn.Module, trial: Trial, device: torch.device) -> None:
        super().__init__(model, trial, device)
        self.hooks: list[int] = []
        self.steps = 0
        self.steps_with_norm: list[int] = []
        self.rates: list[float] = []
        """The learning rate at the start of each micro-step."""

    @override
    def micro_step(self, images: Tensor, loss_of: LossOf, *, last: bool, phase: Phase = no_phase) -> Tensor:
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        loss = super().micro_step(images, loss_of, last=last, phase=phase)
        if last:
            self.hooks.append(sum(parameter._backward_hooks is not None for parameter in self.module.parameters()))
        return loss

    @override
    def step(self) -> None:
        super().step()
        self.steps += 1

    @override
    def step_with_norm(self) -> float:
        self.steps_with_norm.append(self.steps)
        return super().step_with_norm()


def trained(
    folder: Path, trial: Trial, seed: int = 0, kind: type[WatchedEngine] = WatchedEngine
) -> tuple[RankRecord, WatchedEngine]:
    torch.manual_seed(seed)
    engine = kind(models.build(trial.model), trial, CPU)
    log = store.RankLog(folder, 0)
    own = RankInfo(rank=0, world_size=1, local_rank=0, launch_seconds=None)
    Training(trial, own, sources.load(trial.data), engine, CPU, log, seed).run()
    log.close()
    return store.read_rank(log.path), engine


class Meter:
    """A meter that reads what it is given, an epoch each; an exception is raised, in `begin` where it is OSError."""

    def __init__(self, *readings: Any) -> None:
        self.readings = [*readings]

    def begin(self, device: torch.device) -> None:
        assert device == CPU
        if isinstance(self.readings[0], OSError):
            raise self.readings.pop(0)

    def end(self) -> Any:
        reading = self.readings.pop(0)
        if isinstance(reading, Exception):
            raise reading
        return reading


def test_a_meter_that_fails_ends_nothing_and_its_figure_is_unavailable_with_the_reason(tmp_path: Path) -> None:
    trial = trial_of(epochs=6)
    engine = WatchedEngine(models.build(trial.model), trial, CPU)
    log = store.RankLog(tmp_path, 0)
    own = RankInfo(rank=0, world_size=1, local_rank=0, launch_seconds=None)
    training = Training(trial, own, sources.load(trial.data), engine, CPU, log, 0)
    nan, one = {"power_watts": float("nan"), "fan_rpm": 900}, {"power_watts": torch.tensor(2.5)}
    training.meters = {"meter": Meter(OSError("unplugged"), KeyError("no such"), nan, None, {"a": "high"}, one)}
    training.run()
    log.close()
    record = store.read_rank(log.path)
    assert len(record.steps) == 6 * 9
    told = [(line.meter, line.epoch, line.values, line.reason) for line in record.meters]
    assert [line[:2] for line in told] == [("meter", epoch) for epoch in range(6)]
    assert [line[2] for line in told] == [
        {}, {}, {"power_watts": None, "fan_rpm": 900.0}, {}, {"a": None}, {"power_watts": 2.5},
    ]  # fmt: skip
    reasons = [line[3] or "" for line in told]
    assert reasons[0].startswith("meter 'meter': begin: OSError: unplugged (test_training.py, line ")
    assert reasons[1].startswith("meter 'meter': end: KeyError: 'no such' (test_training.py, line ")
    assert reasons[2:] == [
        "meter 'meter': 'power_watts' is nan, and no finite number",
        "meter 'meter': end returned None, and no mapping of names to numbers",
        "meter 'meter': 'a' is 'high', and no finite number",
        "",
    ]


def accuracies(record: RankRecord) -> list[float | None]:
    return [line.held_out_accuracy for line in record.epochs]


def test_training_ends_after_the_first_epoch_that_reaches_its_target(tmp_path: Path) -> None:
    (tmp_path / "free").mkdir()
    (tmp_path / "stopped").mkdir()
    reference = [accuracy or 0.0 for accuracy in accuracies(trained(tmp_path / "free", trial_of(epochs=6))[0])]
    target = max(reference[:5])
    last = reference.index(target)
    assert 0 < last < 5  # so that there is something to stop
    record, _ = trained(tmp_path / "stopped", trial_of(epochs=6, target_accuracy=target))
    assert accuracies(record) == reference[: last + 1]
    assert len(record.steps) == (last + 1) * 9


def test_a_target_out_of_reach_leaves_the_epochs_as_the_limit(tmp_path: Path) -> None:
    record, _ = trained(tmp_path, trial_of(epochs=2, target_accuracy=1.0))
    assert len(record.epochs) == 2
    assert all(accuracy is not None and accuracy < 1.0 for accuracy in accuracies(record))


def test_a_model_of_other_classes_than_the_data_is_refused_in_its_first_step(tmp_path: Path) -> None:
    trial = trial_of(epochs=1)
    engine = WatchedEngine(models.build(trial.model.model_copy(update={"num_classes": 17})), trial, CPU)
    log = store.RankLog(tmp_path, 0)
    own = RankInfo(rank=0, world_size=1, local_rank=0, launch_seconds=None)
    training = Training(trial, own, sources.load(trial.data), engine, CPU, log, 0)
    with pytest.raises(RequestError, match=r"tells 17 classes apart, and model\.num_classes is 10"):
        training.run()
    log.close()
    assert engine.steps == 0


def test_the_learning_rate_of_a_step_is_set_before_its_first_micro_step(tmp_path: Path) -> None:
    """An engine may take its optimizer step inside the last backward."""
    trial = trial_of(epochs=1, learning_rate_warmup_steps=4, learning_rate_scaling="sqrt", learning_rate_base_batch=8)
    _, engine = trained(tmp_path, trial)
    peak = 0.003 * 2  # a global batch of 32 is four times the base
    expected = [peak / 4, peak / 2, peak * 3 / 4, *[peak] * 6]
    assert engine.rates == pytest.approx([rate for rate in expected for _ in range(2)])


def test_without_warm_up_the_learning_rate_is_left_to_the_engine(tmp_path: Path) -> None:
    """As where the scheduler of a DeepSpeed file begins with 0: the first step moves no weight."""

    class Scheduled(WatchedEngine):
        def __init__(self, model: nn.Module, trial: Trial, device: torch.device) -> None:
            super().__init__(model, trial, device)
            self.set_learning_rate(0.0)

    _, engine = trained(tmp_path, trial_of(epochs=1), kind=Scheduled)
    assert engine.rates == [0.0] * 18
    torch.manual_seed(0)
    assert all(map(torch.equal, engine.module.parameters(), models.build(MODEL).parameters()))


def test_another_seed_is_another_training(tmp_path: Path) -> None:
    losses = []
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir()
        record, _ = trained(tmp_path / str(seed), trial_of(epochs=1), seed)
        losses.append([line.loss for line in record.steps])
    assert all(one != other for one, other in zip(*losses, strict=True))


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trial, RankRecord, WatchedEngine]:
    """Twelve epochs of 287 images: the last of nine steps has 31, which two micro-steps cannot share evenly."""
    trial = trial_of(explain=True, epochs=12)
    uneven = trial.model_copy(update={"data": trial.data.model_copy(update={"fraction": 287 / 1438})})
    return uneven, *trained(tmp_path_factory.mktemp("explained"), uneven)


def test_norms_are_taken_in_the_steps_meant_for_it_and_no_other_step_pays(
    explained: tuple[Trial, RankRecord, WatchedEngine],
) -> None:
    trial, record, engine = explained
    meant = [step for step, window in enumerate(windows(trial, 108, 9)) if window == "gradients"]
    assert len(meant) == GRADIENT_STEPS[-1]
    assert [line.step for line in record.gradients] == meant
    assert [line.step for line in record.steps if line.window == "gradients"] == meant
    assert engine.steps_with_norm == meant
    parameters = len(list(engine.module.parameters()))
    assert engine.hooks == [parameters if step in meant else 0 for step in range(108)]


def test_ranks_meet_between_the_profilers_start_and_the_explained_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the profiler takes to start differs from rank to rank, and is no waiting of the step."""
    seen: list[str] = []

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: object) -> object:
            seen.append(name)
            return original(*arguments)

        return noted

    monkeypatch.setattr(Explainer, "begin_block", noting("begin", Explainer.begin_block))
    monkeypatch.setattr(Explainer, "step", noting("step", Explainer.step))
    monkeypatch.setattr("vitscale.worker.recorder.barrier", noting("barrier", lambda: None))
    for device in ("cpu", "cuda"):  # whose schedule it is; all of it is computed here
        seen.clear()
        (tmp_path / device).mkdir()
        record, _ = trained(tmp_path / device, trial_of(explain=True, epochs=6, device=device))
        begins = [at for at, name in enumerate(seen) if name == "begin"]
        assert len(begins) == len({line.block for line in record.explained}) > 0
        assert all(seen[at + 1 : at + 3] == ["barrier", "step"] for at in begins)
    first = min(line.step for line in record.explained)
    assert {line.window for line in record.steps[:first]} == {"light", "gradients", "settling"}
    assert {line.window for line in record.steps[first:]} == {"explained", "settling", "attached"}


def test_a_mean_gradient_is_shorter_than_what_it_is_the_mean_of(
    explained: tuple[Trial, RankRecord, WatchedEngine],
) -> None:
    known = [line for line in explained[1].gradients if line.reason is None]
    assert len(known) == GRADIENT_STEPS[-1] - 1
    for line in known:
        assert (line.small_images, line.big_images) == (16, 32)
        assert line.small_squared_norm is not None
        assert line.big_squared_norm is not None
        assert 0 < line.big_squared_norm < line.small_squared_norm


def test_a_step_with_padding_has_no_norms_and_says_why(explained: tuple[Trial, RankRecord, WatchedEngine]) -> None:
    padded = [line for line in explained[1].gradients if line.step % 9 == 8]
    assert [line.small_squared_norm for line in padded] == [None]
    assert [line.big_squared_norm for line in padded] == [None]
    assert [line.reason for line in padded] == ["the step holds padding: its gradients are not of equally many images"]


@pytest.mark.parametrize("explain", [True, False])
def test_without_two_batch_sizes_or_without_leave_no_norms_are_taken(tmp_path: Path, explain: bool) -> None:
    record, engine = trained(tmp_path, trial_of(explain=explain, epochs=12, grad_accum=1 if explain else 2))
    assert record.gradients == ()
    assert engine.steps_with_norm == []
    assert set(engine.hooks) == {0}


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Dynamo as it is, over code that nothing is made of: what it traces, and when, is what counts here.

    Yields the phases that were told meanwhile. Each graph counts as one that Inductor does not find on disk.
    """
    original = nn.Module.compile
    phases: list[str] = []

    def as_it_is(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        phases.append(PROGRESS.phase)
        torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"] += 1
        return graph.forward

    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: original(self, backend=as_it_is, **options))
    torch._dynamo.reset()
    yield phases
    torch._dynamo.reset()


class CompiledEngine(WatchedEngine):
    """Notes how many graphs were compiled when each micro-step was over; draws a number and counts in each forward."""

    def __init__(self, model: nn.Module, trial: Trial, device: torch.device) -> None:
        super().__init__(model, trial, device)
        model.register_buffer("forwards", torch.zeros(()))
        model.register_forward_pre_hook(self._seen)
        self.graphs: list[int] = []
        self.drawn: list[float] = []

    def _seen(self, model: nn.Module, _: object) -> None:
        self.drawn.append(float(torch.rand(())))
        model.get_buffer("forwards").add_(1.0)

    @override
    def micro_step(self, images: Tensor, loss_of: LossOf, *, last: bool, phase: Phase = no_phase) -> Tensor:
        loss = super().micro_step(images, loss_of, last=last, phase=phase)
        self.graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return loss


def compiled(
    folder: Path, rehearses: bool, model: nn.Module | None = None, images: int = 288
) -> tuple[RankRecord, CompiledEngine]:
    """Record and engine of two epochs of eight steps: of 288 images the last step takes 8, and the others 40."""
    folder.mkdir()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    trial = trial_of(epochs=2, micro_batch=20, compile=True)
    data = trial.data.model_copy(update={"fraction": images / 1438})
    trial = trial.model_copy(update={"model": MODEL.model_copy(update={"layers": 2}), "data": data})
    torch.manual_seed(0)
    engine = CompiledEngine(model or models.build(trial.model), trial, CPU)
    log = store.RankLog(folder, 0)
    own = RankInfo(rank=0, world_size=1, local_rank=0, launch_seconds=None)
    training = Training(trial, own, sources.load(trial.data), engine, CPU, log, 0)
    assert training.rehearses
    training.rehearses = rehearses
    training.run()
    log.close()
    return store.read_rank(log.path), engine


def test_compiled_blocks_know_the_last_steps_shape_before_the_first_step_and_train_alike(
    tmp_path: Path, quick_compiler: list[str]
) -> None:
    record, engine = compiled(tmp_path / "rehearsed", rehearses=True)
    rehearsal, *graphs = engine.graphs
    assert len(graphs) == 2 * 16
    assert 0 < rehearsal < graphs[0]  # the one small micro-batch, then the first full one
    assert set(graphs[:16]) == {graphs[0]}  # and nothing at the epoch's end
    assert [(line.name, line.compiled) for line in record.phases] == [("first_step", (BLOCKS,))]
    assert set(quick_compiler[: graphs[0]]) == {f"compiling {BLOCKS}"}
    plain_record, plain = compiled(tmp_path / "plain", rehearses=False)
    assert plain.graphs[13] < plain.graphs[14]  # where it would have been compiled
    assert [line.loss for line in record.steps] == [line.loss for line in plain_record.steps]
    assert engine.drawn[0] == engine.drawn[1]  # its random numbers are given back
    assert engine.drawn[1:] == plain.drawn
    assert engine.module.get_buffer("forwards") == plain.module.get_buffer("forwards")


class Convolutions(nn.Module):
    """Classifies by blocks that hold batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) for _ in range(2)))
        self.classifier = nn.Linear(3, 10)

    @override
    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.blocks(images).mean((2, 3)))
        return logits


def test_compiled_norms_know_what_the_last_step_pads_before_the_first_step(
    tmp_path: Path, quick_compiler: list[str]
) -> None:
    """Of 287 images the last step takes 7, of which 4 count in its first micro-step and 3 in its second."""
    model = Convolutions()
    over_real_images(model, synchronised=False)
    _, engine = compiled(tmp_path / "rehearsed", rehearses=True, model=model, images=287)
    first, second, *graphs = engine.graphs
    assert len(graphs) == 2 * 16
    assert 0 < first < second < graphs[0]
    assert set(graphs[:16]) == {graphs[0]}


class AskedProbe(ResourceProbe):
    """Notes beside which step its counters are asked, and of which steps each line tells."""

    def __init__(self, training: Training) -> None:
        super().__init__(CPU, local_rank=1)
        self.training = training
        self.asked: list[tuple[int, int]] = []
        self.order: list[str] = []

    @override
    def begin(self) -> None:
        self.began = self.training.step
        self.order.append("asked")
        super().begin()

    @override
    def end(self, epoch: int, steps: range) -> ResourcesLine:
        self.asked.append((self.began, self.training.step))
        return super().end(epoch, steps)


def test_counters_are_asked_outside_the_timed_steps_they_tell_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine steps an epoch: the first warms up, so that asking falls into it; then whole epochs, asked of before the
    ranks meet: one whose driver is slow to answer would start late, and the others wait for it in a step."""
    trial = trial_of(epochs=3)
    torch.manual_seed(0)
    engine = WatchedEngine(models.build(trial.model), trial, CPU)
    log = store.RankLog(tmp_path, 0)
    own = RankInfo(rank=0, world_size=1, local_rank=0, launch_seconds=None)
    training = Training(trial, own, sources.load(trial.data), engine, CPU, log, 0)
    training.recorder.resources = probe = AskedProbe(training)
    for module in ("training", "recorder"):
        monkeypatch.setattr(f"vitscale.worker.{module}.barrier", lambda: probe.order.append("met"))
    training.run()
    log.close()
    lines = store.read_rank(log.path).resources
    assert [line.steps for line in lines] == [(1, 8), (9, 17), (18, 26)]
    assert probe.asked == [(0, 9), (9, 18), (18, 27)]
    assert probe.order == ["met", "asked", "met", *["asked", "met", "met"] * 2]
    assert all((line.peak_rss_bytes or 0) > 0 for line in lines)


def test_an_explained_run_tells_of_what_it_used_in_timed_steps_alone(tmp_path: Path) -> None:
    trial = trial_of(explain=True, epochs=6)
    record, _ = trained(tmp_path, trial)
    timed = {line.step for line in record.steps if line.window == "light" and not line.warmup}
    spans = [set(range(line.steps[0], line.steps[1] + 1)) for line in record.resources if line.steps]
    assert len(spans) == 6
    assert all(span <= timed for span in spans)
    assert any(len(span) < 9 for span in spans)


def test_no_batch_is_left_on_the_device_at_the_optimizers_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would lie beside what the optimizer takes, and memory is predicted without it."""
    labels: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    original = Passes._on_device

    def noted(*arguments: Any, **options: Any) -> MicroBatch:
        batch = original(*arguments, **options)
        labels.append(weakref.ref(batch.labels))
        return batch

    class Watching(WatchedEngine):
        @override
        def step(self) -> None:
            alive.append(sum(label() is not None for label in labels))
            super().step()

    monkeypatch.setattr(Passes, "_on_device", noted)
    trained(tmp_path, trial_of(epochs=1), kind=Watching)
    assert len(labels) > 18  # the evaluation has some too
    assert alive == [0] * 9


def test_segmentation_records_its_scores_and_the_images_of_an_epoch(tmp_path: Path) -> None:
    """Two micro-steps of three images, the last step short; losses are means over pixels, of which images differ."""
    model = ModelSpec(
        task="segmentation", name="swinv2-t", image_size=16, patch_size=2, hidden_size=8, heads=1, depths=(1, 1, 1),
        window_size=4, decoder_size=8, auxiliary_weight=0.4, num_classes=4,
    )  # fmt: skip
    trial = trial_of(epochs=2, micro_batch=3, batch_norm="synchronised").model_copy(
        update={
            "model": model,
            "data": DataSpec(name="synthetic-masks", samples=16, classes=4, source_size=16, held_out=0.5),
        }
    )
    record, engine = trained(tmp_path, trial)
    assert [line.images for line in record.epochs] == [16, 16]
    assert (len(record.steps), engine.steps) == (6, 6)
    for line in record.epochs:
        assert line.train_accuracy is None
        assert line.mean_iou is not None
        assert line.held_out_accuracy is not None
        assert 0 < line.mean_iou <= line.held_out_accuracy < 1
        assert line.train_loss is not None
        # The step's losses hold the auxiliary head's too, which begins as the other: 1.4 times as much.
        own = [step.loss or 0.0 for step in record.steps if step.epoch == line.epoch]
        assert sum(own) / len(own) == pytest.approx(1.4 * line.train_loss, rel=0.1)
