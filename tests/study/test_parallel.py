"""What a study may ask of ranks that share a model, and what it is refused, before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from study_factory import EIGHT_CORES, expanded, gpus, summary, write_study
from vitscale import sources
from vitscale.analysis.scaling import curve_name, trial_name
from vitscale.engines import checks
from vitscale.engines.checks import why_no_gradient_norms
from vitscale.engines.megatron import facts as megatron
from vitscale.errors import RequestError
from vitscale.prediction.memory.forecast import forecast, forecast_bytes, unavailable
from vitscale.prediction.step.messages import messages, norm_messages
from vitscale.study.expand import expand
from vitscale.study.file import StudyFile
from vitscale.trial.parallel import NO_SPLIT
from vitscale.trial.trial import Trial

MODEL = {"name": "vit-ti16", "image_size": 32, "patch_size": 8, "layers": 2, "hidden_size": 48, "heads": 6}


def study(folder: Path, parallel: dict[str, Any], **sections: dict[str, Any]) -> Any:
    given: dict[str, dict[str, Any]] = {
        "model": MODEL, "train": {"engine": "fsdp2"}, "scaling": {"gpus": [2, 4]}, "parallel": parallel,
    }  # fmt: skip
    for section, keys in sections.items():
        given[section] = given.get(section, {}) | keys
    return expanded(folder, given)


def test_ranks_of_one_model_take_the_same_images(tmp_path: Path) -> None:
    """Of four ranks that share models by twos two are data parallel."""
    found = study(tmp_path, {"tensor": 2}).trials.values()
    assert [(trial.world.size, trial.layout.data, trial.global_batch) for trial in found] == [(2, 1, 32), (4, 2, 64)]
    last = list(found)[-1]
    assert trial_name(last) == "fsdp2 on 4 ranks, tensor 2"
    # Nothing answers as if each rank had a model for itself: half of the matrices, and exchanges of its own.
    whole = last.model_copy(update={"parallel": NO_SPLIT})
    held = [forecast(trial) for trial in (last, whole)]
    assert held[0] != held[1]
    assert {one.group for one in messages(last) or ()} == {"replicas", "tensor"}
    assert {one.group for one in messages(whole) or ()} == {"replicas"}
    # What is not known of it is not told.
    unknown = last.model_copy(update={"train": last.train.model_copy(update={"optimizer": "deepspeed_config"})})
    assert forecast(unknown) is None
    assert "the states of" in unavailable(unknown)
    assert "hold parts of the gradient" in str(why_no_gradient_norms(last))


@pytest.mark.parametrize(
    ("schedule", "train", "said"),
    [
        ("1f1b", {"micro_batch": 8, "global_batch": 32}, (4, 32)), ("1f1b", {"micro_batch": 8}, (1, 8)),
        ("1f1b", {"micro_batch": 2, "global_batch": 4}, (1, 8)),
        ("interleaved", {"micro_batch": 4, "global_batch": 80}, (2, 80)),
        ("interleaved", {"micro_batch": 4, "global_batch": 20}, (3, 24)),
    ],
)  # fmt: skip
def test_stages_of_a_divided_global_batch_are_told_the_micro_batch_that_leaves_enough(
    tmp_path: Path, schedule: str, train: dict[str, Any], said: tuple[int, int]
) -> None:
    """Set as told, all rank counts of the curve are taken; grad_accum, which has no effect, is not advised."""
    sections: dict[str, dict[str, Any]] = {
        "scaling": {"gpus": [2, 4, 8], "mode": "strong-global"}, "model": {"layers": 4}, "train": train,
    }  # fmt: skip
    split = {"pipeline": 2, "schedule": schedule}
    with pytest.raises(RequestError) as refused:
        study(tmp_path, split, **sections)
    size, images = said
    exactly = "=" if schedule == "interleaved" else "of at most"
    assert f"Valid: train.micro_batch {exactly} {size} with train.global_batch = {images}. Set it" in str(refused.value)
    assert "grad_accum of" not in str(refused.value)
    sections["train"] = {"micro_batch": size, "global_batch": images}
    assert [trial.world.size for trial in study(tmp_path, split, **sections).trials.values()] == [2, 4, 8]


@pytest.mark.parametrize("split", [{"sequence": 2}, {"pipeline": 2, "schedule": "gpipe"}, {"tensor": 2}])
def test_a_split_beside_no_engine_is_told_how_to_be_swept(tmp_path: Path, split: dict[str, Any]) -> None:
    """In tables that are taken as they are told, whatever scaling.gpus holds."""
    for counts in ([2, 4], [1, 2, 4]):
        with pytest.raises(RequestError, match="'none' trains on one rank and takes no split, and parallel") as refused:
            study(tmp_path, split, sweep={"train.engine": ["none", "fsdp2"]}, scaling={"gpus": counts})
    tables = str(refused.value).partition("[parallel]: ")[2].partition(". Or use")[0]
    path = write_study(tmp_path, {"model": MODEL, "scaling": {"gpus": [1, 2, 4]}})
    path.write_text(f"{path.read_text()}[sweep]\n{tables}\n")
    found = expand(StudyFile.read(path), EIGHT_CORES, lambda _: summary())
    assert [[point.gpus for point in curve.points] for curve in found.curves] == [[1], [2, 4]]


def test_splits_are_swept_and_named(tmp_path: Path) -> None:
    """At a split of one it is the trial that it was before there were any."""
    swept = {"parallel.tensor": [1, 2], "parallel.sequence": [1, 2]}
    found = study(tmp_path, {}, sweep=swept, scaling={"gpus": [4]}, model={"heads": 12})
    names = [curve_name(curve.labels, found.trials[curve.points[-1].trial_id]) for curve in found.curves]
    assert names[0] == "fsdp2, tensor 1, sequence 1"
    assert [found.trials[curve.points[0].trial_id].layout.data for curve in found.curves] == [4, 2, 2, 1]
    (plain,) = study(tmp_path, {}, scaling={"gpus": [4]}, model={"heads": 12}).trials
    assert found.curves[0].points[0].trial_id == plain


def test_replicas_are_swept_and_named(tmp_path: Path) -> None:
    """No rank shares a model by them; one replica is the trial that it was before there were any."""
    swept = {"parallel.replicate": [1, 2, 4]}
    found = study(tmp_path, {}, sweep=swept, scaling={"gpus": [1, 2, 4]})
    names = [curve_name(curve.labels, found.trials[curve.points[-1].trial_id]) for curve in found.curves]
    assert names == ["fsdp2, replicas 1", "fsdp2, replicas 2", "fsdp2, replicas 4"]
    assert [[point.gpus for point in curve.points] for curve in found.curves] == [[1, 2, 4], [2, 4], [4]]
    of_four = [found.trials[curve.points[-1].trial_id] for curve in found.curves]
    assert [(trial.layout.data, trial.layout.sharding_ranks, trial.global_batch) for trial in of_four] == [
        (4, 4, 4 * 32), (4, 2, 4 * 32), (4, 1, 4 * 32),
    ]  # fmt: skip
    assert trial_name(of_four[1]) == "fsdp2 on 4 ranks, replicas 2"
    (plain,) = study(tmp_path, {}, scaling={"gpus": [4]}).trials
    assert found.curves[0].points[-1].trial_id == plain


def test_replicas_under_accelerate_are_those_of_what_it_wraps(tmp_path: Path) -> None:
    of_four = replace(EIGHT_CORES, gpus=gpus(4))

    def own(replicas: int, backend: str) -> Trial:
        given: dict[str, dict[str, Any]] = {
            "model": MODEL, "train": {"engine": "accelerate", "accelerate_backend": backend},
            "scaling": {"gpus": [4]}, "parallel": {"replicate": replicas},
        }  # fmt: skip
        (trial,) = expanded(tmp_path, given, of_four).trials.values()
        return trial

    assert own(2, "fsdp2").layout.sharding_ranks == 2
    with pytest.raises(RequestError, match=r"not taken by train.engine = 'accelerate' with accelerate_backend = 'ddp'"):
        own(2, "ddp")
    with pytest.raises(RequestError, match=r"leaves replicas of one rank, which train\.engine = 'accelerate' does not"):
        own(4, "fsdp2")


def test_replicas_beside_no_engine_are_told_how_to_be_swept(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"has no replicas, and parallel.replicate = 2\. To sweep") as refused:
        study(tmp_path, {"replicate": 2}, sweep={"train.engine": ["none", "fsdp2"]}, scaling={"gpus": [1, 2]})
    assert '{ engine = "fsdp2", "parallel.replicate" = 2 }' in str(refused.value)


def test_counts_below_a_swept_split_are_those_of_other_points(tmp_path: Path) -> None:
    """One study holds one GPU alone and models that two share; a count that is no multiple is refused as ever."""
    swept = {"parallel.tensor": [1, 2]}
    found = study(tmp_path, {}, sweep=swept, scaling={"gpus": [1, 2, 4]}, model={"heads": 12})
    assert [[point.gpus for point in curve.points] for curve in found.curves] == [[1, 2, 4], [2, 4]]
    with pytest.raises(RequestError, match="gpus holds 3"):
        study(tmp_path, {}, sweep=swept, scaling={"gpus": [1, 2, 3]}, model={"heads": 12})
    with pytest.raises(RequestError, match="gpus holds 1"):
        study(tmp_path, {}, sweep=swept, scaling={"gpus": [1]}, model={"heads": 12})


def test_a_factory_may_be_split_as_its_ranks_will_tell(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def build(num_classes, image_size): ...\n")
    model: dict[str, Any] = {"name": None, "patch_size": None, "factory": "mine:build"}

    def own(parallel: dict[str, Any], gpus: int) -> Any:
        given: dict[str, dict[str, Any]] = {
            "model": model, "train": {"engine": "fsdp2"}, "scaling": {"gpus": [gpus]}, "parallel": parallel,
        }  # fmt: skip
        return expanded(tmp_path, given)

    stages = {"pipeline": 2, "schedule": "gpipe"}
    for split in ({"tensor": 2}, {"sequence": 2}, stages):
        (trial,) = own(split, 2).trials.values()
        assert forecast(trial) is None
        assert messages(trial) is None
    with pytest.raises(RequestError, match="do not go together for model"):
        own(stages | {"sequence": 2}, 4)
    model |= {"task": "segmentation"}
    with pytest.raises(
        RequestError, match=r"'mine:build' with model.task = 'segmentation' cannot be.*swinv2-t and its"
    ):
        own({"tensor": 2}, 2)


def test_pixels_are_labelled_by_ranks_that_share_a_model(tmp_path: Path) -> None:
    """Vision transformers and Swin V2 along all axes; norms of ranks that share images are over all of these.
    In stages, of which the heads may be one, norms are among the ranks that hold the same."""
    swin = {"name": "swinv2-t", "image_size": 64, "heads": 4, "hidden_size": 32, "depths": [1, 1, 1]}
    splits: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"sequence": 2}, MODEL), ({"tensor": 2}, MODEL), ({"tensor": 2, "shard_norms": True}, MODEL),
        ({"tensor": 2}, swin), ({"tensor": 3, "sequence": 2}, MODEL), ({"sequence": 2}, swin),
        ({"pipeline": 3, "schedule": "gpipe"}, MODEL), ({"pipeline": 2, "schedule": "gpipe"}, swin),
    ]  # fmt: skip
    for split, model in splits:
        sections: dict[str, Any] = {
            "model": model | {"task": "segmentation", "decoder_size": 8}, "data": {"name": "synthetic-masks"},
            "train": {"engine": "fsdp2"}, "scaling": {"gpus": [6]}, "parallel": split,
        }  # fmt: skip
        study_file = StudyFile.read(write_study(tmp_path, sections))
        (trial,) = expand(study_file, EIGHT_CORES, sources.check).trials.values()
        whole = trial.model_copy(update={"parallel": NO_SPLIT})
        assert trial.layout.replicas == 6 // split.get("tensor", 1) // split.get("pipeline", 1)
        assert (forecast_bytes(trial) or 0) < (forecast_bytes(whole) or 0)
        assert {one.group for one in messages(trial) or ()} == {
            "replicas", *(split.keys() - {"shard_norms", "schedule"}),
        }  # fmt: skip
        local = trial.model_copy(update={"train": trial.train.model_copy(update={"batch_norm": "local"})})
        assert {one.group for one in norm_messages(trial) or ()} == {"replicas"}
        assert {one.group for one in norm_messages(local) or ()} == ({"sequence"} if "sequence" in split else set())


def test_stages_are_named_and_take_the_micro_batches(tmp_path: Path) -> None:
    """Of four ranks that hold stages by twos two are data parallel; a step's micro-batches are those that flow."""
    swept = {"parallel.schedule": ["gpipe", "1f1b"]}
    found = study(tmp_path, {"pipeline": 2}, sweep=swept, scaling={"gpus": [4]}, train={"grad_accum": 6})
    trials = [found.trials[curve.points[0].trial_id] for curve in found.curves]
    assert [curve_name(curve.labels, trials[0]) for curve in found.curves] == ["fsdp2, gpipe", "fsdp2, 1f1b"]
    assert [trial_name(trial) for trial in trials] == [
        "fsdp2 on 4 ranks, pipeline 2, gpipe, accumulation 6", "fsdp2 on 4 ranks, pipeline 2, accumulation 6",
    ]  # fmt: skip
    assert [trial.layout.data for trial in trials] == [2, 2]
    assert {one.group for one in messages(trials[0]) or ()} == {"replicas", "pipeline"}


def test_tensor_ranks_of_megatron_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs; what it cannot do is refused with what can. Its classifier is whole; blocks send what DTensor's do."""
    monkeypatch.setattr(megatron, "versions_of", lambda names: dict.fromkeys(names, "0.16"))
    of_four = replace(EIGHT_CORES, gpus=gpus(4))

    def own(parallel: dict[str, Any], model: dict[str, Any] = MODEL) -> Trial:
        given: dict[str, dict[str, Any]] = {
            "model": model, "train": {"engine": "megatron", "precision": "fp32"},
            "scaling": {"gpus": [4]}, "parallel": parallel,
        }  # fmt: skip
        (trial,) = expanded(tmp_path, given, of_four).trials.values()
        return trial

    trial = own({"tensor": 2})
    assert (trial.layout.data, forecast(trial)) == (2, None)
    checks.check_checkpoint(trial.train)
    by_dtensor = trial.model_copy(update={"train": trial.train.model_copy(update={"engine": "fsdp2"})})
    sent = [[one for one in messages(of) or () if one.group == "tensor"] for of in (trial, by_dtensor)]
    blocks, ends = sent[0], sent[1][len(sent[0]) :]
    assert blocks == sent[1][: len(blocks)]
    assert [(one.operation, one.phase) for one in ends] == [("all_gather", "forward"), ("all_reduce", "backward")]
    for split, said in (
        ({"tensor": 2, "shard_norms": True}, "equal parts alone"),
        ({"sequence": 2}, r"not taken by train.engine = 'megatron'\. Valid: train.engine = 'ddp'"),
        ({"tensor": 4}, "6 heads, which they do not divide"),
    ):
        with pytest.raises(RequestError, match=said):
            own(split)
    (tmp_path / "mine.py").write_text("def build(num_classes, image_size): ...\n")
    with pytest.raises(RequestError, match=r"a module says how DTensor cuts it\. Valid: train.engine = 'fsdp2'"):
        own({"tensor": 2}, {"name": None, "patch_size": None, "factory": "mine:build"})
    with pytest.raises(RequestError, match=r"Megatron-Core needs a CUDA GPU.*fsdp2' takes \[parallel\] tensor too"):
        study(tmp_path, {"tensor": 2}, train={"engine": "megatron"})


@pytest.mark.parametrize(
    ("parallel", "sections", "said"),
    [
        ({"tensor": 3}, {}, ["scaling.gpus holds 2, and parallel.tensor = 3 ranks share one model", "multiples of it"]),
        ({"tensor": 4}, {"scaling": {"gpus": [4]}}, ["6 heads, which they do not divide", "1, 2, 3, 6"]),
        (
            {"tensor": 2, "sequence": 2}, {"scaling": {"gpus": [4]}},
            ["parallel.sequence = 2 x parallel.tensor = 2 ranks share vit-ti16's 6 heads"],
        ),
        (
            {"tensor": 2}, {"train": {"engine": "ddp"}},
            ["parallel.tensor = 2 is not taken by train.engine = 'ddp'", "Valid: train.engine = 'fsdp2'."],
        ),
        (
            {"sequence": 2}, {"train": {"engine": "accelerate"}},
            ["not taken by train.engine = 'accelerate'", "Valid: train.engine = 'ddp', train.engine = 'fsdp2', "],
        ),
        ({"sequence": 2}, {"train": {"engine": "deepspeed", "zero_stage": 2, "offload": "optimizer"}}, ["offload"]),
        (
            {"pipeline": 2}, {"train": {"engine": "deepspeed", "grad_accum": 4}},
            ["parallel.pipeline = 2 is not taken by", "Valid: train.engine = 'ddp', train.engine = 'fsdp2'."],
        ),
        ({"pipeline": 3}, {"train": {"grad_accum": 4}}, ["parallel.pipeline = 3 ranks share one model"]),
        (
            {"pipeline": 4}, {"train": {"grad_accum": 4}, "scaling": {"gpus": [4]}},
            ["4 stages, and vit-ti16 has 2 blocks", "pipeline of 1 to 2"],
        ),
        (
            {"pipeline": 2, "schedule": "interleaved"}, {"train": {"grad_accum": 4}},
            ["parallel.pipeline = 2 with 2 stages each is 4 stages, and vit-ti16 has 2 blocks"],
        ),
        ({"pipeline": 2}, {}, ["train.grad_accum = 1 micro-batches are too few", "grad_accum of 2 or more", "gpipe"]),
        (
            {"pipeline": 2, "schedule": "interleaved"}, {"train": {"grad_accum": 5}, "model": MODEL | {"layers": 4}},
            ["5 micro-batches do not divide into 2 equal rounds", "multiples of 2, such as 4 or 6"],
        ),
        (
            {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 1}, {"train": {"grad_accum": 4}},
            ["stages_per_rank is 1", "2 or more"],
        ),
        ({"schedule": "gpipe"}, {}, ["parallel.schedule = 'gpipe' has no meaning with parallel.pipeline = 1"]),
        ({"schedule": "zigzag"}, {}, ["parallel.schedule is 'zigzag'", "'gpipe', '1f1b'"]),
        ({"pipeline": 2, "stages_per_rank": 3}, {"train": {"grad_accum": 4}}, ["stages_per_rank has no meaning with"]),
        (
            {"pipeline": 2, "tensor": 2, "shard_norms": True}, {"train": {"grad_accum": 4}, "scaling": {"gpus": [4]}},
            ["parallel.shard_norms does not go with parallel.pipeline"],
        ),
        (
            {"pipeline": 2, "schedule": "gpipe"}, {"train": {"engine": "ddp", "static_graph": True}},
            ["train.static_graph = true does not go with parallel.pipeline = 2"],
        ),
        ({"shard_norms": True}, {}, ["parallel.shard_norms has no meaning with parallel.tensor = 1"]),
        ({"tensor": 2}, {"train": {"compile": True}}, ["train.compile = true does not go with parallel.tensor = 2"]),
        ({"tensor": 2}, {"train": {"rank_speeds": [1.0, 0.5, 1.0, 0.5]}}, ["rank_speeds", "share one model"]),
        (
            {"tensor": 2, "shard_norms": True}, {"model": {"name": "swinv2-b", "image_size": 64}},
            ["parallel.tensor = 2 with shard_norms cannot be trained of swinv2-b: windows", "shard_norms = false"],
        ),
        (
            {"sequence": 4}, {"model": {"name": "swinv2-b", "image_size": 128}, "scaling": {"gpus": [4]}},
            ["are 2 rows of tokens in swinv2-b's last stage, too few to share by parallel.seq", "up to 2 ranks"],
        ),
        (
            {"sequence": 2, "tensor": 4}, {"model": {"name": "swinv2-b", "image_size": 64}, "scaling": {"gpus": [8]}},
            ["parallel.sequence = 2 x parallel.tensor = 4 ranks share swinv2-b's 4 heads of its first", "1, 2, 4"],
        ),
        (
            {"tensor": 2}, {"model": {"name": "swinv2-s", "image_size": 64}},
            ["parallel.tensor = 2 ranks share swinv2-s's 3 heads of its first stage", "tensor x sequence of 1, 3"],
        ),
        (
            {"pipeline": 4},
            {
                "model": {"name": "swinv2-t", "image_size": 64, "depths": [1, 2]}, "scaling": {"gpus": [4]},
                "train": {"grad_accum": 4},
            },
            ["4 stages, and swinv2-t has 3 blocks", "pipeline of 1 to 3", "model.depths"],
        ),
        (
            {"pipeline": 4},
            {
                "model": MODEL | {"task": "segmentation"}, "data": {"name": "synthetic-masks"},
                "scaling": {"gpus": [4]}, "train": {"grad_accum": 4},
            },
            ["4 stages, and vit-ti16 has 2 blocks and heads that may be a stage", "pipeline of 1 to 3"],
        ),
        (
            {"sequence": 2},
            {
                "model": {"task": "segmentation", "name": "swinv2-t", "image_size": 64},
                "data": {"name": "synthetic-masks"},
            },
            ["share swinv2-t's 3 heads of its first stage", "tensor x sequence of 1, 3"],
        ),
        (
            {"sequence": 2, "pipeline": 2, "schedule": "gpipe"},
            {
                "model": {"task": "segmentation", "name": "swinv2-b", "image_size": 128}, "scaling": {"gpus": [4]},
                "data": {"name": "synthetic-masks"},
            },
            ["parallel.pipeline = 2 x parallel.sequence = 2 do not go together for swinv2-b with model.task = 'segm"],
        ),
        (
            {"replicate": 4}, {"scaling": {"gpus": [4, 6]}},
            ["parallel.replicate = 4 does not divide scaling.gpus = 6", "Valid: replicate = 3 or 6", "gpus to 4 or 8"],
        ),
        (
            {"replicate": 8}, {"scaling": {"gpus": [4]}},
            ["parallel.replicate = 8 does not divide scaling.gpus = 4", "Valid: replicate = 4", "gpus to 8"],
        ),
        (
            {"replicate": 2}, {"train": {"engine": "ddp"}},
            ["parallel.replicate = 2 is not taken by train.engine = 'ddp'", "Valid: train.engine = 'fsdp2'."],
        ),
        (
            {"replicate": 2}, {"train": {"engine": "deepspeed", "zero_stage": 3}},
            ["parallel.replicate = 2 is not taken by train.engine = 'deepspeed' with zero_stage = 3"],
        ),
        (
            {"replicate": 2, "tensor": 2}, {"scaling": {"gpus": [4]}},
            ["parallel.replicate = 2 does not go with parallel.tensor = 2", "has not been tried together"],
        ),
        ({"replicate": 0}, {}, ["parallel.replicate is 0"]),
        ({"tensor": 0}, {}, ["parallel.tensor is 0"]),
        ({"tensors": 2}, {}, ["unknown key 'tensors' in [parallel]", "Did you mean 'tensor'?"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(
    tmp_path: Path, parallel: dict[str, Any], sections: dict[str, dict[str, Any]], said: list[str]
) -> None:
    given: dict[str, dict[str, Any]] = {"model": MODEL, "train": {"engine": "fsdp2"}, "scaling": {"gpus": [2, 4]}}
    for section, keys in sections.items():
        given[section] = keys if section == "model" else given.get(section, {}) | keys
    with pytest.raises(RequestError) as caught:
        expanded(tmp_path, given | {"parallel": parallel})
    for words in said:
        assert words in str(caught.value)
