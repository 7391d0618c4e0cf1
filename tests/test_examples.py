"""Every example is executed, made small enough for two cores where it is not."""

from __future__ import annotations

import csv
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cifar_factory import pack, write_cifar10
from driving import vitscale
from image_files import blocks, encoded, photograph, write_scene
from vitscale import models, store
from vitscale.engines.shared.stages import Stage, stage_plan
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.parallel import ParallelSpec
from vitscale.trial.trial import DataSpec, TrainSpec, Trial, WindowSpec, World

pytestmark = [pytest.mark.long(1), pytest.mark.ranks]

EXAMPLES = Path(__file__).parent.parent / "examples"
PROMISED = {
    "trial", "outcome", "reason", "model", "dataset", "engine", "launcher", "mode", "nodes", "gpus", "micro_batch",
    "grad_accum", "global_batch", "precision", "repeats", "step_seconds", "step_seconds_low", "step_seconds_high",
    "images_per_second", "epoch_seconds", "speedup", "speedup_low", "speedup_high", "efficiency", "startup_seconds",
    "loss", "accuracy",
}  # fmt: skip


TINY = "layers = 1\nhidden_size = 64\nheads = 2\nmlp_size = 128"
"""Nearly all of an example's time is arithmetic."""


def changed(example: str, **changes: str) -> str:
    """An example's text with whole lines replaced; each must be there."""
    lines = (EXAMPLES / example).read_text().splitlines()
    for key, line in changes.items():
        places = [place for place, old in enumerate(lines) if old.startswith(f"{key} =")]
        assert len(places) == 1, key
        lines[places[0]] = line
    return "\n".join(lines)


def test_every_example_is_tested() -> None:
    """Those for several hosts under tests/lab and tests/runner."""
    assert {path.name for path in EXAMPLES.iterdir()} == {
        "models_by_name",  # tests/vision
        "own_models",
        "own_script",
        "packed_and_spread.toml",
        "two_hosts.toml",
        "quickstart.toml",
        "cifar10_vit_b16.toml",
        "batch_sizes.toml",
        "engines.toml",
        "imagenet100.toml",
        "long_sequence.toml",
        "resolution.toml",
        "thesis.toml",
    }


# --- own scripts -----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(1200)  # twelve ranks that each import everything anew; DeepSpeed may compile for minutes
@pytest.mark.xdist_group("probes of examples")
def test_each_way_to_tell_a_probe_leaves_the_same_steps(tmp_path: Path) -> None:
    """Plain, Accelerate, DeepSpeed, a Trainer's callback, Composer's events, torchtitan's loop: on two ranks each."""
    scripts = {path.name for path in (EXAMPLES / "own_script").glob("*.py")} - {"tiny.py", "with_lightning.py"}
    assert scripts_trained_alike(tmp_path) == scripts


@pytest.mark.timeout(600)
def test_lightning_s_callback_leaves_the_same_steps(tmp_path: Path) -> None:
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("Lightning is not installed: pip install lightning")
    alone = '"train.script" = ["with_lightning.py"]'
    assert scripts_trained_alike(tmp_path, **{'"train.script"': alone}) == {"with_lightning.py"}


def scripts_trained_alike(folder: Path, **changes: str) -> set[str]:
    """The scripts of the study, after each has left the steps and traffic of two ranks that it is to."""
    shutil.copytree(EXAMPLES / "own_script", folder / "own", ignore=shutil.ignore_patterns("__pycache__"))
    text = changed("own_script/study.toml", gpus="gpus = [2]", steps="steps = 9", repeats="repeats = 1", **changes)
    (folder / "own" / "study.toml").write_text(text)
    answer = vitscale("run", "own/study.toml", "-o", "results", cwd=folder, timeout=1100)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    runs = store.load(folder / "results").runs
    for run in runs:
        assert len(run.ranks) == 2
        for rank in run.ranks:
            assert [(line.step, line.images) for line in rank.steps] == [(step, 16) for step in range(12)]
            assert [line.step for line in rank.traffic] == [12, 13]
            assert all(line.collectives for line in rank.traffic)
    return {Path(str(run.header.trial.train.script)).name for run in runs}


# --- own models ------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_models(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of examples/own_models."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "own_models"))
    return importlib.import_module


@pytest.mark.parametrize("name", ["hsvit", "sparse_vit"])
def test_stages_of_an_own_model_are_its_forward(
    own_models: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Cut for two and three ranks into stages with all of its parameters and blocks, each once, that give the same
    logits."""
    torch.manual_seed(0)
    spec = ModelSpec(factory=f"{name}:tiny", image_size=16, num_classes=10)
    model = models.build(spec)
    images = torch.randn(2, 3, 16, 16)
    widths = set[tuple[int, ...]]()
    for ranks in (2, 3):
        split = ParallelSpec(pipeline=ranks, schedule="gpipe")
        world = World(ranks_per_node=ranks, threads_per_rank=1)
        train = TrainSpec(engine="ddp", precision="fp32", device="cpu", micro_batch=2)
        trial = Trial(
            model=spec, data=DataSpec(name="synthetic"), train=train, world=world, window=WindowSpec(), parallel=split,
            launcher="torchrun",
        )  # fmt: skip
        plan = stage_plan(model, trial)
        assert plan is not None
        cut = [Stage(model, plan, number) for number in range(len(plan.parts))]
        names = [name for stage in cut for name, _ in stage.named_parameters()]
        assert sorted(names) == sorted(name for name, _ in model.named_parameters())
        hidden, handed_on = images, [shape for (shape,) in plan.shapes(*images.shape[2:])]
        for stage, shape in zip(cut, [*handed_on, (10,)], strict=True):
            hidden = stage(hidden)
            assert hidden.shape[1:] == shape
        assert torch.equal(hidden, model(images))
        blocks = list[torch.nn.Module]()
        for rank in range(ranks):
            monkeypatch.setattr("vitscale.engines.shared.stages.dist.get_rank", lambda rank=rank: rank)
            blocks += plan.blocks_of(model, trial)
        assert blocks == [module for module in model.modules() if type(module).__name__ == "Block"]
        widths |= set(handed_on)
    assert len(widths) > 1 if name == "hsvit" else len(widths) == 1


def test_frames_of_a_sequence_on_two_ranks_give_its_logits(
    own_models: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    own = own_models("clip_sequence")
    model = own.tiny(num_classes=10, image_size=16, channels=12).eval()
    images = torch.randn(2, 12, 16, 16)
    whole, parts = model(images), list[torch.Tensor]()

    def summed(pooled: torch.Tensor, group: object) -> torch.Tensor:
        """What the ranks before this one have pooled, too."""
        parts.append(pooled)
        return sum(parts, torch.zeros_like(pooled))

    monkeypatch.setattr(own, "all_reduce", summed)
    for rank in range(2):
        model.split_tokens(SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank))
        logits = model(images)
    torch.testing.assert_close(logits, whole)
    with pytest.raises(ValueError, match="4 frames are too few for 5 ranks"):
        model.split_tokens(SimpleNamespace(size=lambda: 5))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["hsvit", "sparse_vit", "clip_sequence"])
def test_own_models_train_split_and_whole(tmp_path: Path, name: str) -> None:
    """Each study at its smallest: all of its trials complete, and the report explains them."""
    shutil.copytree(EXAMPLES / "own_models", tmp_path / "own")
    study = changed(
        f"own_models/{name}.toml", image_size="image_size = 16", source_size="source_size = 16",
        samples="samples = 64", classes="classes = 10", repeats="repeats = 1", steps="steps = 12",
    )  # fmt: skip
    for factory in ("build", "dense"):
        study = study.replace(f":{factory}", ":tiny")
    study = study.replace(', { factory = "sparse_vit:sparse" }', "")
    (tmp_path / "own" / "study.toml").write_text(study)
    answer = vitscale("run", "own/study.toml", "-o", "results", cwd=tmp_path, timeout=550)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert {run.outcome.kind for run in store.load(tmp_path / "results").runs} == {"completed"}
    answer = vitscale("report", "results", "--format", "json", cwd=tmp_path)
    trials = json.loads(answer.stdout)["trials"]
    assert {trial["drift"] for trial in trials} <= {"reference", "agrees", "unknown"}
    assert all(trial["breakdown"]["ranks"] for trial in trials)


# --- quickstart ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with one short repeat of a smaller model, and with the policy that its comment names too."""
    where = tmp_path_factory.mktemp("quickstart")
    modes = {'"scaling.mode"': '"scaling.mode" = ["strong-micro", "strong-global", "weak"]'}
    (where / "study.toml").write_text(
        changed("quickstart.toml", layers="layers = 1", epochs="epochs = 1", repeats="repeats = 1", **modes)
    )
    answer = vitscale("run", "study.toml", "-o", "results", cwd=where)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return where


def test_quickstart_runs_each_different_trial_once(quickstart: Path) -> None:
    """strong-micro and strong-global coincide at one rank; weak does not, for it trains on half of the images."""
    study = store.load(quickstart / "results").study
    points = {
        (curve.labels["train.engine"], curve.mode, point.gpus): point.trial_id
        for curve in study.curves
        for point in curve.points
    }
    for engine in ("none", "ddp", "deepspeed"):
        assert points[engine, "strong-micro", 1] == points[engine, "strong-global", 1]
        assert points[engine, "weak", 1] != points[engine, "strong-micro", 1]
    for engine in ("ddp", "deepspeed"):
        assert points[engine, "strong-micro", 2] != points[engine, "strong-global", 2]
    assert len(study.trials) == 10
    assert len(store.load(quickstart / "results").runs) == 10


def test_the_json_contract(quickstart: Path) -> None:
    answer = vitscale("report", "results", "--format", "json", cwd=quickstart)
    assert answer.returncode == 0
    content = json.loads(answer.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert content["version"] == 8
    trials = content["trials"]
    assert len(trials) == len({trial["trial"] for trial in trials}) == 10
    for trial in trials:
        assert trial.keys() >= PROMISED
        assert (trial["outcome"], trial["dataset"], trial["model"]) == ("completed", "digits", "vit-ti16")
        assert trial["global_batch"] == trial["gpus"] * trial["micro_batch"] * trial["grad_accum"]
        assert trial["step_seconds_low"] is None, "one run has no interval"
    points = {(c["mode"], c["labels"]["train.engine"]): c["points"] for c in content["curves"]}
    for (mode, engine), curve in points.items():
        assert [point["gpus"] for point in curve] == ([1] if engine == "none" else [1, 2]), (mode, engine)
        assert curve[0]["speedup"] == 1


def test_markdown_goes_to_standard_output(quickstart: Path) -> None:
    answer = vitscale("report", "results", "--format", "md", cwd=quickstart)
    assert answer.returncode == 0
    assert answer.stdout.startswith("#")
    assert "| " in answer.stdout


# --- where the time goes, by batch size ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batches", [(16, 64, 256), pytest.param((16, 32, 64, 128, 256), marks=pytest.mark.nightly)], ids=["some", "all"]
)
@pytest.mark.xdist_group("batch sizes of examples")
def test_batch_sizes_16_to_256_on_1_and_2_ranks_show_where_the_time_goes(
    tmp_path: Path, batches: tuple[int, ...]
) -> None:
    study = changed("batch_sizes.toml", layers=TINY, repeats="repeats = 1", steps="steps = 8")
    every = "[16, 32, 64, 128, 256]"
    assert every in study
    study = study.replace(every, str([*batches]))
    (tmp_path / "study.toml").write_text(study)
    answer = vitscale("run", "study.toml", "-o", "results", cwd=tmp_path)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    answer = vitscale("report", "results", "--format", "json,svg", "-o", "out", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    trials = json.loads((tmp_path / "out" / "report.json").read_text())["trials"]
    assert {(t["micro_batch"], t["gpus"]) for t in trials} == {(b, n) for b in batches for n in (1, 2)}
    for trial in trials:
        for rank in trial["breakdown"]["ranks"]:
            parts = {name: seconds for name, seconds in rank["parts"].items() if seconds is not None}
            assert {"data_wait", "forward", "backward", "wait", "wire", "optimizer", "other"} <= set(parts)
            assert sum(parts.values()) == pytest.approx(rank["seconds"], rel=1e-6)
    for batch in batches:
        drawn = (tmp_path / "out" / f"strong-micro-breakdown-{batch}.svg").read_text()
        assert f"micro-batch {batch}<" in drawn


# --- every engine ----------------------------------------------------------------------------------------------------


ELSEWHERE = (
    '{ engine = "none" }', '{ engine = "deepspeed", zero_stage = 2 }', '{ engine = "deepspeed", zero_stage = 3 }',
    '{ engine = "deepspeed", zero_stage = 2, offload = "optimizer" }',
)  # fmt: skip
"""Engines of the example whose losses and traffic on real ranks are held by tests/engines alone, to save a minute."""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example on two ranks, with one engine of each kind."""
    where = tmp_path_factory.mktemp("engines")
    study = changed("engines.toml", layers="layers = 1", gpus="gpus = [2]", steps="steps = 8")
    for engine in ELSEWHERE:
        assert f"  {engine},\n" in study
        study = study.replace(f"  {engine},\n", "")
    (where / "study.toml").write_text(study)
    answer = vitscale("run", "study.toml", "-o", "results", cwd=where, timeout=550)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    answer = vitscale("report", "results", "--format", "html,png,svg,pdf,csv,md,json", "-o", "out", cwd=where)
    assert answer.returncode == 0, answer.stderr
    return where


def test_the_whole_example_is_planned(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text((EXAMPLES / "engines.toml").read_text())
    answer = vitscale("plan", "study.toml", "--json", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    trials = json.loads(answer.stdout)["trials"]
    assert len(trials) == 21
    wrappers = {(t["resolved"]["train"]["engine"], t["resolved"]["train"]["accelerate_backend"]) for t in trials}
    assert wrappers == {
        ("none", None), ("ddp", None), ("fsdp2", None), ("deepspeed", None),
        ("accelerate", "ddp"), ("accelerate", "deepspeed"),
    }  # fmt: skip
    without_forecast = [t["name"] for t in trials if t["memory_bytes"] is None]
    assert without_forecast == []  # those that offload among them


def test_every_engine_that_runs_on_cpu_computes_the_same(engines: Path) -> None:
    trials = json.loads((engines / "out" / "report.json").read_text())["trials"]
    assert {trial["engine"] for trial in trials} == {"ddp", "fsdp2", "deepspeed", "accelerate"}
    assert len(trials) == 7
    assert sorted(trial["drift"] for trial in trials) == ["agrees"] * 6 + ["reference"]
    assert max(trial["drift_difference"] or 0.0 for trial in trials) < 1e-6


def test_every_format_is_written(engines: Path) -> None:
    written = {path.suffix: path for path in (engines / "out").rglob("*") if path.is_file()}
    assert set(written) == {".html", ".png", ".svg", ".pdf", ".csv", ".md", ".json"}
    assert written[".png"].read_bytes().startswith(b"\x89PNG")
    assert written[".pdf"].read_bytes().startswith(b"%PDF")
    assert b"<svg" in written[".svg"].read_bytes()
    with written[".csv"].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 7
    assert {row["engine"] for row in rows} == {"ddp", "fsdp2", "deepspeed", "accelerate"}


def test_what_every_engine_sends_is_counted(engines: Path) -> None:
    trials = json.loads((engines / "out" / "report.json").read_text())["trials"]
    by_curve = {(t["engine"], t["zero_stage"]): t for t in trials}
    whole = by_curve["ddp", None]["logical_bytes_per_step"]
    # An all-reduce of every gradient; ZeRO-1 gathers the weights too.
    assert by_curve["deepspeed", 0]["logical_bytes_per_step"] == whole
    assert by_curve["deepspeed", 1]["logical_bytes_per_step"] == pytest.approx(1.5 * whole, rel=1e-3)


def test_the_page_tells_all_engines_apart(engines: Path) -> None:
    page = (engines / "out" / "report.html").read_text()
    for name in (
        "fsdp2",
        "deepspeed ZeRO-3, parameters offloaded",
        "accelerate (DDP)",
        "accelerate (DeepSpeed ZeRO-2)",
    ):
        assert name in page


def test_what_accelerate_hides_is_unknown_and_not_nothing(engines: Path) -> None:
    """It takes DeepSpeed's optimizer step inside backward."""
    runs = store.load(engines / "results").runs
    hidden = {
        (run.header.trial.train.engine, run.header.trial.train.wrapper)
        for run in runs
        if any("optimizer" in line.unknown for line in run.ranks[0].explained)
    }
    assert all(run.ranks[0].explained for run in runs)
    assert hidden == {("accelerate", "deepspeed")}


# --- the published study's model -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "parameters"),
    [
        # Patches 590,592, positions and class token 152,064, a block 7,087,872, norm 1,536, head 7,690.
        (1, 7_839_754),
        # 86,567,656 less 990 classes of 768 weights and a bias.
        pytest.param(12, 85_806_346, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.xdist_group("vit-b16 of examples")
def test_vit_b16_at_224_trains_on_cifar_10_on_two_ranks_under_both_engines(
    tmp_path: Path, layers: int, parameters: int
) -> None:
    archive = pack(write_cifar10(tmp_path / "unpacked", per_batch=20))
    archive.rename(tmp_path / "cifar-10-python.tar.gz")
    study = changed(
        "cifar10_vit_b16.toml",
        root='root = "cifar-10-python.tar.gz"\nverify = false',
        micro_batch="micro_batch = 1",
        gpus="gpus = [2]",
        steps="steps = 1\nwarmup_steps = 1\nevaluate = false\nexplain = false",
        repeats="repeats = 1",
    )
    (tmp_path / "study.toml").write_text(study.replace('"vit-b16"', f'"vit-b16"\nlayers = {layers}'))
    answer = vitscale("run", "study.toml", "-o", "results", cwd=tmp_path, timeout=550)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    runs = store.load(tmp_path / "results").runs
    assert {run.header.trial.train.engine for run in runs} == {"ddp", "deepspeed"}
    losses = {}
    for run in runs:
        assert run.outcome.kind == "completed"
        assert run.header.trial.model.image_size == 224
        for rank in run.ranks:
            assert rank.model is not None
            assert rank.model.parameters == parameters
            assert rank.model.train_samples == 100
            assert [(step.images, step.warmup) for step in rank.steps] == [(1, True), (1, False)]
        per_rank = [[step.loss or 0.0 for step in rank.steps] for rank in run.ranks]
        losses[run.header.trial.train.engine] = [sum(pair) / 2 for pair in zip(*per_rank, strict=True)]
    # The same images, weights and arithmetic: what separates the engines is rounding.
    assert losses["ddp"] == pytest.approx(losses["deepspeed"], rel=0.02)


# --- segmentation ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in ADE20K's layout: 64 photographs to train on, 5 held out."""
    where = tmp_path_factory.mktemp("thesis")
    for split, kind, count in (("training", "train", 64), ("validation", "val", 5)):
        for number in range(count):
            labels = blocks(48, 64, 150, number)
            write_scene(where / "ADEChallengeData2016", split, f"ADE_{kind}_{number:08d}", labels)
    return where


def test_the_thesis_halves_its_steps_with_every_doubling(scenes: Path) -> None:
    eight_ranks = "\n[launch]\noversubscribe = true\n"
    (scenes / "whole.toml").write_text((EXAMPLES / "thesis.toml").read_text() + eight_ranks)
    answer = vitscale("plan", "whole.toml", "--json", cwd=scenes)
    assert answer.returncode == 0, answer.stderr
    trials = json.loads(answer.stdout)["trials"]
    assert [(t["resolved"]["world"]["ranks_per_node"], t["resolved"]["train"]["micro_batch"]) for t in trials] == [
        (1, 8), (2, 8), (4, 8), (8, 8),
    ]  # fmt: skip
    assert [trial["steps_per_epoch"] for trial in trials] == [8, 4, 2, 1]
    for trial in trials:
        train = trial["resolved"]["train"]
        assert (train["optimizer"], train["learning_rate"], train["batch_norm"]) == ("adamw", 6e-5, "synchronised")


@pytest.mark.xdist_group("thesis of examples")
def test_the_thesis_study_runs_from_jpeg_and_png_and_tells_what_the_thesis_could_not(scenes: Path) -> None:
    study = changed(
        "thesis.toml",
        image_size="image_size = 32\npatch_size = 2\nhidden_size = 8\nheads = 1\ndepths = [1, 1, 1]\n"
        "window_size = 4\ndecoder_size = 16",
        source_size="source_size = 64",
        workers="workers = 0",
        gpus="gpus = [1, 2]",
        steps="steps = 12\nwarmup_steps = 1",
        repeats="repeats = 1",
    )
    (scenes / "study.toml").write_text(study)
    answer = vitscale("run", "study.toml", "-o", "results", cwd=scenes)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    answer = vitscale("report", "--like", "thesis", "results", "--json", cwd=scenes)
    assert answer.returncode == 0, answer.stderr
    content = json.loads(answer.stdout)
    assert all(figure["drawn"] for figure in content["figures"]), content["figures"]
    ((doubling),) = content["claims"]["doublings"]
    assert (doubling["base_gpus"], doubling["gpus"], doubling["hardly_shortens"]) == (1, 2, "not decided")
    assert doubling["transfer_seconds"] > 0
    training, parts = content["tables"]
    assert {row["cells"][training["columns"].index("GPU utilisation")] for row in training["rows"]} == {"unavailable"}
    by_part = [dict(zip(parts["columns"], row["cells"], strict=True)) for row in parts["rows"]]
    for name in ("start-up", "loading", "decoding", "synchronised norm", "transfer", "evaluation", "checkpoint"):
        assert all(name in row for row in by_part)
    # Nothing is read ahead: every step waits for its images, and most of that for pixels.
    assert all(not row["decoding"].startswith("0") for row in by_part)


# --- image sets, and large images -------------------------------------------------------------------------------------


@pytest.mark.xdist_group("imagenet-100 of examples")
def test_imagenet_100_trains_alike_from_files_from_the_cache_and_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real JPEG files of three classes, two of which are named, and one file that is broken."""
    monkeypatch.setenv("VITSCALE_CACHE", str(tmp_path / "cache"))
    for split, images in (("train", 9), ("val", 4)):
        for kind in ("n01440764", "n02 ü", "n03"):
            folder = tmp_path / "imagenet" / split / kind
            folder.mkdir(parents=True)
            for number in range(images):
                (folder / f"{number}.JPEG").write_bytes(encoded(photograph(60, 45, number), "JPEG"))
    (tmp_path / "imagenet" / "train" / "n03" / "0.JPEG").write_bytes(b"no image")
    (tmp_path / "imagenet100.txt").write_text("n03 some kind\nn01440764 tench\n")
    study = changed(
        "imagenet100.toml",
        source_size="source_size = 32",
        workers="workers = 1",
        micro_batch="micro_batch = 2",
        gpus="gpus = [2]",
        steps="steps = 3\nwarmup_steps = 1\nexplain = false",
        repeats="repeats = 1",
    ).replace('"vit-s16"', f'"vit-ti16"\nimage_size = 32\n{TINY}')
    (tmp_path / "study.toml").write_text(study)
    answer = vitscale("run", "study.toml", "-o", "results", cwd=tmp_path, timeout=550)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "1 broken image(s) left out: '" in answer.stdout + answer.stderr
    runs = {run.header.trial.data.source: run for run in store.load(tmp_path / "results").runs}
    assert set(runs) == {"jpeg", "cache", "memory"}
    losses = {}
    for source, run in runs.items():
        assert run.outcome.kind == "completed", run.outcome.reason
        assert run.header.trial.data.classes == ("n03 some kind", "n01440764 tench")
        assert run.header.trial.model.num_classes == 2
        for rank in run.ranks:
            assert rank.model is not None
            assert (rank.model.train_samples, rank.model.held_out_samples) == (17, 8)
            assert (rank.epochs[0].loader_images_per_second or 0.0) > 0.0
            assert (rank.epochs[0].loader_reading_seconds or 0.0) > 0.0
            assert ((rank.epochs[0].loader_decoding_seconds or 0.0) > 0.0) == (source == "jpeg")
        losses[source] = [[step.loss for step in rank.steps] for rank in run.ranks]
    assert losses["jpeg"] == losses["cache"] == losses["memory"]
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1


def test_every_resolution_is_planned_with_its_memory(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text((EXAMPLES / "resolution.toml").read_text())
    answer = vitscale("plan", "study.toml", "--json", "--gpu-memory", "24GB", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    planned = json.loads(answer.stdout)
    needed = {
        (t["resolved"]["model"]["image_size"], t["resolved"]["train"]["activation_checkpointing"]): t["memory_bytes"]
        for t in planned["trials"]
    }
    (largest,) = planned["largest_image_sizes"]
    assert len(largest["trials"]) == 8
    assert 1024 < largest["largest_image_size"] < 2048 < largest["largest_image_size_with_activation_checkpointing"]
    assert {size for size, _ in needed} == {224, 512, 1024, 2048}
    kept, again = ([needed[size, checkpointing] for size in (224, 512, 1024, 2048)] for checkpointing in (False, True))
    assert kept == sorted(kept)
    assert all(less < more for less, more in zip(again, kept, strict=True))


def test_ranks_share_the_tokens_of_one_image(tmp_path: Path) -> None:
    """Two ranks with an image each, and with one image for both, of 17 tokens."""
    study = changed(
        "long_sequence.toml",
        samples="samples = 16",
        gpus="gpus = [2]",
        steps="steps = 2",
        repeats="repeats = 1\nexplain = false",
        **{'"model.image_size"': "", '"parallel.sequence"': '"parallel.sequence" = [1, 2]'},
    ).replace('"vit-b16"', f'"vit-ti16"\nimage_size = 32\npatch_size = 8\n{TINY}')
    study += "\n[launch]\nthreads_per_rank = 1\noversubscribe = true\n"
    (tmp_path / "study.toml").write_text(study)
    answer = vitscale("run", "study.toml", "-o", "results", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    runs = store.load(tmp_path / "results").runs
    images = {run.header.trial.parallel.sequence: [sum(r.steps[0].images for r in run.ranks)] for run in runs}
    assert {run.outcome.kind for run in runs} == {"completed"}
    assert [run.header.trial.global_batch for run in sorted(runs, key=lambda run: run.header.trial.layout.data)] == [
        1,
        2,
    ]
    assert images == {1: [2], 2: [2]}  # each of two ranks tells of the image that both hold


def test_models_train_on_twelve_channels_of_16_bits(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(12):
        folder = tmp_path / "images" / ("low", "high")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 30_000, (8, 8, 12)) + 30_000 * (number % 2)
        np.save(folder / f"{number}.npy", pixels.astype(np.uint16))
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef build(num_classes, image_size, channels):\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(channels * image_size**2, num_classes))\n"
    )
    (tmp_path / "study.toml").write_text(
        """
name = "channels"
[model]
image_size = 8
[data]
name = "folder"
root = "images"
source_size = 8
channels = 12
dtype = "uint16"
[train]
micro_batch = 4
precision = "fp32"
epochs = 6
learning_rate = 0.01
[sweep]
model = [
  { factory = "mine:build" },
  { name = "vit-ti16", patch_size = 4, hidden_size = 24, layers = 1 },
]
[measure]
repeats = 1
warmup_steps = 1
explain = false
"""
    )
    answer = vitscale("run", "study.toml", "-o", "results", cwd=tmp_path)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    runs = store.load(tmp_path / "results").runs
    assert [run.header.trial.model.channels for run in runs] == [12, 12]
    accuracies = [run.ranks[0].epochs[-1].held_out_accuracy for run in runs]
    assert accuracies == [1.0, 1.0]  # bright or dark: what a linear model of normalised pixels tells at once
