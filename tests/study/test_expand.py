from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from study_factory import EIGHT_CORES, expanded, summary, write_study
from vitscale.errors import RequestError
from vitscale.sources import Summary
from vitscale.study.expand import Expansion, expand
from vitscale.study.file import StudyFile
from vitscale.trial.trial import DataSpec, Trial


def points(found: Expansion) -> list[tuple[str, dict[str, Any], list[int]]]:
    """Each curve with the ranks of its points."""
    return [(curve.mode, curve.labels, [point.gpus for point in curve.points]) for curve in found.curves]


def trials_of(found: Expansion, mode: str) -> list[Trial]:
    (curve,) = (curve for curve in found.curves if curve.mode == mode)
    return [found.trials[point.trial_id] for point in curve.points]


def refusal(folder: Path, changes: dict[str, dict[str, Any]]) -> str:
    with pytest.raises(RequestError) as caught:
        expanded(folder, changes)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def test_a_plain_study_is_one_curve(tmp_path: Path) -> None:
    found = expanded(tmp_path)
    assert points(found) == [("strong-micro", {}, [1, 2])]
    one, two = trials_of(found, "strong-micro")
    assert (one.world.size, two.world.size) == (1, 2)
    assert (one.train.micro_batch, two.train.micro_batch) == (32, 32)
    assert one.model.num_classes == 10
    assert (one.train.precision, one.train.device, one.launcher) == ("fp32", "cpu", "torchrun")


def test_rank_counts_are_sorted_and_each_once(tmp_path: Path) -> None:
    assert points(expanded(tmp_path, {"scaling": {"gpus": [4, 1, 2, 1]}})) == [("strong-micro", {}, [1, 2, 4])]


def test_the_strong_policies_share_their_smallest_trial_and_weak_does_not(tmp_path: Path) -> None:
    sweep = {"scaling.mode": ["strong-micro", "strong-global", "weak"]}
    found = expanded(tmp_path, {"sweep": sweep})
    micro, strong, weak = (trials_of(found, mode) for mode in sweep["scaling.mode"])
    assert micro[0].identity() == strong[0].identity() != weak[0].identity()
    assert [t.train.micro_batch for t in strong] == [32, 16]
    assert [t.data.fraction for t in weak] == [0.5, 1.0]
    # Of six points four are different: at the largest world weak scaling is strong-micro.
    assert len(found.trials) == 4
    assert micro[1].identity() == weak[1].identity()
    # The mode is what a curve is, and no label.
    assert all(curve.labels == {} for curve in found.curves)


def test_curves_are_labelled_by_what_is_swept(tmp_path: Path) -> None:
    found = expanded(tmp_path, {"sweep": {"train.engine": ["ddp", "deepspeed"], "train.micro_batch": [8, 16]}})
    assert points(found) == [
        ("strong-micro", {"train.engine": engine, "train.micro_batch": size}, [1, 2])
        for engine in ("ddp", "deepspeed")
        for size in (8, 16)
    ]


def test_the_plain_engine_adds_its_one_rank_point_alone(tmp_path: Path) -> None:
    found = expanded(tmp_path, {"sweep": {"train.engine": ["none", "ddp"]}})
    assert points(found) == [
        ("strong-micro", {"train.engine": "none"}, [1]),
        ("strong-micro", {"train.engine": "ddp"}, [1, 2]),
    ]
    assert found.notes == ()
    # It computes with the threads of a rank of the largest world.
    assert {trial.world.threads_per_rank for trial in found.trials.values()} == {4}


def test_the_plain_engine_alone_says_which_rank_counts_it_leaves_out(tmp_path: Path) -> None:
    found = expanded(tmp_path, {"train": {"engine": "none"}, "scaling": {"gpus": [1, 2, 4]}})
    assert points(found) == [("strong-micro", {}, [1])]
    told = "train.engine = 'none' trains on one rank: 2 and 4 of scaling.gpus left out. Name an engine"
    assert found.notes == (told,)


def test_the_plain_engine_without_one_rank_is_refused(tmp_path: Path) -> None:
    assert "Add 1 to scaling.gpus" in refusal(tmp_path, {"train": {"engine": "none"}, "scaling": {"gpus": [2, 4]}})


def test_what_is_known_of_the_data_goes_with_each_trial(tmp_path: Path) -> None:
    found = expanded(tmp_path)
    assert set(found.fingerprints) == set(found.train_samples) == set(found.trials)
    assert set(found.train_samples.values()) == {1437}
    assert set(found.fingerprints.values()) == {"f" * 16}


def test_each_dataset_is_checked_once_and_its_notes_are_told_once(tmp_path: Path) -> None:
    asked = []

    def check(spec: DataSpec) -> Summary:
        asked.append(spec.name)
        plain = summary()
        return Summary(
            plain.train_samples, 1, plain.classes, plain.image_shape, spec.name, (f"about {spec.name}", "both")
        )

    sweep = {"train.engine": ["ddp", "deepspeed"], "data.name": ["digits", "synthetic"]}
    file = StudyFile.read(write_study(tmp_path, {"sweep": sweep}))
    found = expand(file, EIGHT_CORES, check)
    assert sorted(asked) == ["digits", "synthetic"]
    assert found.notes == ("about digits", "both", "about synthetic")
    assert {found.fingerprints[t] == found.trials[t].data.name for t in found.trials} == {True}


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"engine": "dpd"}},
        {"train": {"micro_batch": None}},
        {"train": {"epochs": None}},
        {"train": {"zero_stage": 1}},
        {"train": {"device": "cuda"}},
        {"train": {"precision": "fp16"}},
        {"scaling": {"gpus": [9]}},
        {"scaling": {"mode": "strong-global", "gpus": [1, 3]}},
        {"scaling": {"mode": "weak", "fraction_per_gpu": 0.9}},
        {"model": {"name": "vit-x"}},
        {"model": {"image_size": 33}},
        {"sweep": {"train.engine": ["ddp", "dpd"]}},
    ],
)
def test_data_are_asked_for_only_when_all_else_is_right(tmp_path: Path, changes: dict[str, dict[str, Any]]) -> None:
    """They may have to be downloaded."""

    def check(_: DataSpec) -> Summary:
        raise AssertionError("the data were asked for")

    file = StudyFile.read(write_study(tmp_path, changes))
    with pytest.raises(RequestError):
        expand(file, EIGHT_CORES, check)


# --- paths ---------------------------------------------------------------------------------------------------------


def test_a_relative_root_starts_at_the_study_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for root, expected in (
        ("images", f"{tmp_path}/images"),
        ("/abs", "/abs"),
        ("~/images", "/home/someone/images"),
    ):
        (trial, _) = expanded(tmp_path, {"data": {"root": root}}).trials.values()
        assert trial.data.root == expected


def test_a_file_of_classes_becomes_their_names(tmp_path: Path) -> None:
    """Read beside the study; a trial holds the names, wherever the file lies when it is run."""
    (tmp_path / "some.txt").write_text("\n n01440764 tench\r\nn02 b\n\nn01440764 tench\n")
    data = {"name": "folder", "root": "images", "classes": "some.txt"}
    found = expand(StudyFile.read(write_study(tmp_path, {"data": data})), EIGHT_CORES, lambda _: summary())
    (names,) = {trial.data.classes for trial in found.trials.values()}
    assert names == ("n01440764 tench", "n02 b")
    (tmp_path / "some.txt").unlink()
    with pytest.raises(RequestError, match=r"file of classes '.*some\.txt' cannot be read: No such file"):
        expand(StudyFile.read(write_study(tmp_path, {"data": data})), EIGHT_CORES, lambda _: summary())


def test_the_model_takes_the_channels_of_the_data(tmp_path: Path) -> None:
    def check(_: DataSpec) -> Summary:
        return dataclasses.replace(summary(), image_shape=(8, 8, 12))

    data = {"name": "folder", "root": "images", "channels": 12, "dtype": "float32"}
    found = expand(StudyFile.read(write_study(tmp_path, {"data": data})), EIGHT_CORES, check)
    assert {trial.model.channels for trial in found.trials.values()} == {12}


def test_a_home_that_does_not_exist_is_named(tmp_path: Path) -> None:
    message = refusal(tmp_path, {"data": {"root": "~nosuchuser/x"}})
    assert "the path '~nosuchuser/x'" in message
    assert "Write it out" in message


def test_hf_is_a_folder_beside_the_study_or_else_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shape = '{"model_type": "vit", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, '
    (folder / "config.json").write_text(shape + '"intermediate_size": 128, "image_size": 32, "patch_size": 8}')
    plain = {"name": None, "patch_size": None}
    (trial, _) = expanded(tmp_path, {"model": {**plain, "hf": "model"}}).trials.values()
    assert (trial.model.hf, trial.model.hidden_size) == (str(folder), 64)


def test_a_local_model_is_known_by_its_configuration_and_not_by_its_place(tmp_path: Path) -> None:
    """Moved it is the same trial; with a single key of its configuration changed it is another."""
    plain = dict.fromkeys(("name", "image_size", "patch_size", "layers", "hidden_size", "heads", "mlp_size"))
    identities: list[list[str]] = []
    for folder, config in (("a", {}), ("b", {}), ("b", {"hidden_dropout_prob": 0.5})):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "config.json").write_text(json.dumps({"model_type": "vit", "hidden_size": 48} | config))
        identities.append(list(expanded(tmp_path, {"model": {**plain, "hf": folder}}).trials))
    assert identities[0] == identities[1]
    assert not set(identities[1]) & set(identities[2])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train": {"momentum": 0.5}}, "train.momentum has no meaning under train.optimizer = 'adamw'"),
        (
            {"train": {"compile_mode": "reduce-overhead"}},
            "train.compile_mode has no meaning under train.compile = false. Remove it, or set compile = true",
        ),
        (
            {"scaling": {"mode": "weak", "fraction_per_gpu": 0.1}, "data": {"fraction": 0.5}},
            "data.fraction has no meaning under scaling.mode = 'weak' with scaling.fraction_per_gpu",
        ),
    ],
)
def test_a_value_that_has_nothing_to_do_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert said in refusal(tmp_path, changes)


@pytest.mark.parametrize("hf", ["a" * 200_000, "a/b\u0000", "", "~nosuchuser/x", "a\u001b[2J"])
def test_a_model_that_is_neither_is_refused_in_one_message(tmp_path: Path, hf: str) -> None:
    refusal(tmp_path, {"model": {"name": None, "patch_size": None, "hf": hf}})


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train": {"engine": "dpd"}}, "unknown engine 'dpd'. Did you mean 'ddp'? Valid: accelerate, ddp, deepspeed,"),
        ({"train": {"epochs": None}}, "train.epochs or measure.steps, and neither is given. Give one: epochs = 3"),
        ({"measure": {"steps": 5}}, "and both are given"),
        ({"measure": {"steps": "auto"}}, "and both are given"),
        ({"train": {"epochs": None}, "measure": {"steps": "some"}}, "measure.steps is 'some'"),
        ({"train": {"zero_stage": 2}}, "train.zero_stage = 2 has no meaning under train.engine = 'ddp'"),
        (
            {"sweep": {"train.engine": ["deepspeed", "ddp"], "train.zero_stage": [1]}},
            "Remove it, or set engine = 'deepspeed'. To sweep only what goes together, list tables in [sweep]: "
            "train = [{ engine = 'ddp', zero_stage = 1 }, ...].",
        ),
        ({"train": {"micro_batch": None}}, "train.micro_batch is missing"),
        ({"train": {"global_batch": 64}}, "train.global_batch = 64 has no meaning under scaling.mode = 'strong-micro'"),
        ({"scaling": {"fraction_per_gpu": 0.1}}, "scaling.fraction_per_gpu = 0.1 has no meaning under scaling.mode"),
        (
            {"sweep": {"train.global_batch": [32, 64], "scaling.mode": ["strong-global", "weak"]}},
            "varies nothing under other batch policies than strong-global",
        ),
        ({"sweep": {"train.global_batch": [32, 64]}}, "sweep.'train.global_batch' has no meaning under scaling.mode"),
        (
            {"train": {"drop_last": True, "micro_batch": 1000, "epochs": 9}},
            "1437 training images do not fill one global batch of 2000",
        ),
        ({"train": {"epochs": 1, "micro_batch": 512}}, "1 epoch of 3 steps on 1 rank: all of it is warm-up"),
        ({"model": {"num_classes": 9}}, "model.num_classes = 9 is fewer than the dataset's 10 classes"),
        ({"scaling": {"gpus": [1, 16]}}, "16 ranks need 16 cores, and this machine offers 8"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(tmp_path: Path, changes: dict[str, dict[str, Any]], said: str) -> None:
    assert said in refusal(tmp_path, changes)


def test_a_swept_global_batch_makes_a_curve_each(tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "scaling": {"mode": "strong-global"},
        "sweep": {"train.global_batch": [32, 128]},
    }
    found = expanded(tmp_path, changes)
    batches = [[found.trials[point.trial_id].global_batch for point in curve.points] for curve in found.curves]
    assert batches == [[32, 32], [128, 128]]


def test_automatic_steps_are_those_of_the_shortest_run_and_the_same_trial_as_with_that_number(tmp_path: Path) -> None:
    def identities(steps: int | str) -> dict[str, Trial]:
        train: dict[str, Any] = {"epochs": None}
        return expanded(tmp_path, {"train": train, "measure": {"steps": steps}, "scaling": {"gpus": [1, 2]}}).trials

    chosen = identities("auto")
    one, two = (trial.window.steps for trial in chosen.values())
    assert one is not None
    assert two is not None
    assert 20 < one <= two  # with two ranks steps take the gradients' norms as well
    assert next(iter(identities(one))) == next(iter(chosen))
    assert [*identities(two)][1] == [*chosen][1]


def test_a_run_may_be_as_long_as_its_steps_whatever_the_warm_up(tmp_path: Path) -> None:
    found = expanded(tmp_path, {"train": {"epochs": None}, "measure": {"steps": 1, "warmup_steps": 100}})
    assert len(found.trials) == 2


def test_speeds_become_shares_and_equal_ones_leave_the_trial_as_it_was(tmp_path: Path) -> None:
    scaling = {"gpus": [1, 2, 3]}
    equal = expanded(tmp_path, {"scaling": scaling})
    found = expanded(tmp_path, {"train": {"rank_speeds": [1.0, 1, 0.31]}, "scaling": scaling})
    assert [trial.train.micro_batches for trial in found.trials.values()] == [None, None, (42, 41, 13)]
    assert [trial.global_batch for trial in found.trials.values()] == [32, 64, 96]
    assert [identity in equal.trials for identity in found.trials] == [True, True, False]


def test_speeds_can_be_swept(tmp_path: Path) -> None:
    found = expanded(tmp_path, {"sweep": {"train.rank_speeds": [[1.0, 1.0], [1.0, 0.5]]}})
    assert [trial.train.micro_batches for trial in found.trials.values()] == [None, None, (43, 21)]


@pytest.mark.parametrize(
    ("speeds", "said"),
    [
        ([1.0], "train.rank_speeds holds 1 speeds for 2 ranks"),
        ([], "train.rank_speeds"),
        ([1.0, 0.0], "train.rank_speeds"),
        ([1.0, "fast"], "train.rank_speeds"),
    ],
)
def test_speeds_that_are_none_are_refused(tmp_path: Path, speeds: list[Any], said: str) -> None:
    assert said in refusal(tmp_path, {"train": {"rank_speeds": speeds}})


# --- hosts ---------------------------------------------------------------------------------------------------------


def shapes(found: Expansion) -> list[list[tuple[int, int, str]]]:
    """Nodes, ranks per node and trial of each point of each curve."""
    worlds = {trial_id: trial.world for trial_id, trial in found.trials.items()}
    return [
        [(worlds[p.trial_id].nodes, worlds[p.trial_id].ranks_per_node, p.trial_id) for p in curve.points]
        for curve in found.curves
    ]


def test_packed_against_spread_is_one_sweep_that_shares_its_one_rank_trial(tmp_path: Path) -> None:
    """Eight ranks on one host against one on each of eight; threads alike, or spread ranks would have eight times as
    many."""
    found = expanded(
        tmp_path, {"scaling": {"gpus": [1, 2, 8]}, "sweep": {"scaling.gpus_per_node": [8, 1], "train.engine": ["ddp"]}}
    )
    packed, spread = shapes(found)
    assert [shape[:2] for shape in packed] == [(1, 1), (1, 2), (1, 8)]
    assert [shape[:2] for shape in spread] == [(1, 1), (2, 1), (8, 1)]
    assert packed[0] == spread[0]
    assert len(found.trials) == 5
    assert {trial.world.threads_per_rank for trial in found.trials.values()} == {1}
    assert [curve.labels["scaling.gpus_per_node"] for curve in found.curves] == [8, 1]


def test_hosts_without_a_sweep_leave_the_trial_of_one_host_as_it_was(tmp_path: Path) -> None:
    threads = {"launch": {"threads_per_rank": 1}}
    plain, named = (
        expanded(tmp_path, threads | {"scaling": {"gpus": [1, 2], "gpus_per_node": per_node}}).trials
        for per_node in (None, 2)
    )
    assert list(plain) == list(named)


@pytest.mark.parametrize(
    ("slots", "per_node", "shape"), [(None, None, (1, 4)), (2, None, (2, 2)), (2, 4, (1, 4)), (8, 1, (4, 1))]
)
def test_a_host_takes_what_the_study_says_and_else_as_many_as_it_has_slots(
    tmp_path: Path, slots: int | None, per_node: int | None, shape: tuple[int, int]
) -> None:
    file = StudyFile.read(write_study(tmp_path, {"scaling": {"gpus": [4], "gpus_per_node": per_node}}))
    found = expand(file, EIGHT_CORES, lambda _: summary(), slots)
    assert [[point[:2] for point in curve] for curve in shapes(found)] == [[shape]]


def test_hosts_that_would_not_be_full_are_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, {"scaling": {"gpus": [1, 2, 3], "gpus_per_node": 2}})
    assert "3 ranks do not fill hosts of 2. Valid: scaling.gpus in multiples of 2, or below it" in message
    assert expanded(tmp_path, {"scaling": {"gpus": [1, 2, 4], "gpus_per_node": 2}})


def test_the_plain_engine_computes_with_the_threads_of_the_fullest_host(tmp_path: Path) -> None:
    sweep = {"sweep": {"train.engine": ["none", "ddp"]}}
    found = expanded(tmp_path, sweep | {"scaling": {"gpus": [1, 16], "gpus_per_node": 4}})
    assert {trial.world.threads_per_rank for trial in found.trials.values()} == {2}


# --- the user's own DeepSpeed file ---------------------------------------------------------------------------------


def with_file(
    folder: Path, config: str, train: dict[str, Any] | None = None, scaling: dict[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    (folder / "ds.json").write_text(config)
    return {
        "train": {"engine": "deepspeed", "deepspeed_config": "ds.json"} | (train or {}),
        "scaling": scaling or {},
    }


PUBLISHED = """{
  "train_batch_size": 32, "gradient_accumulation_steps": 1, "micro_batch_per_gpu": 16,
  "fp16": {"enabled": false}, "zero_optimization": {"stage": 0}, "wall_clock_breakdown": true,
  "prescale_gradients": false, "pipeline": {"pipe_partitioned": false}, "pin_memory": true
}"""
"""Appendix B of arXiv 2602.21081; `micro_batch_per_gpu` is no key of DeepSpeed's."""


def test_the_published_study_s_file_is_accepted(tmp_path: Path) -> None:
    scaling = {"mode": "strong-global", "gpus": [2]}
    (trial,) = expanded(tmp_path, with_file(tmp_path, PUBLISHED, {"micro_batch": 16}, scaling)).trials.values()
    assert (trial.train.micro_batch, trial.train.grad_accum, trial.global_batch) == (16, 1, 32)
    assert trial.train.deepspeed_config is not None
    assert trial.train.deepspeed_config["micro_batch_per_gpu"] == 16
    assert (trial.train.precision, trial.train.optimizer) == ("fp32", "adamw")


def test_the_published_study_s_file_under_strong_micro_names_the_keys_to_remove(tmp_path: Path) -> None:
    message = refusal(tmp_path, with_file(tmp_path, PUBLISHED, {"micro_batch": 16}))
    assert "train_batch_size is 32, but under scaling.mode = 'strong-micro' the global batch follows" in message
    assert "Remove train_batch_size, gradient_accumulation_steps from the file" in message


def test_a_batch_that_does_not_fit_names_both_values(tmp_path: Path) -> None:
    """On one rank a global batch of 32 in micro-batches of 16 takes two micro-steps, and the file says one."""
    scaling = {"mode": "strong-global", "gpus": [1, 2]}
    message = refusal(tmp_path, with_file(tmp_path, PUBLISHED, {"micro_batch": 16}, scaling))
    assert "gradient_accumulation_steps is 1 in the file but 2 in the study" in message


def test_what_the_study_leaves_open_is_taken_from_the_file(tmp_path: Path) -> None:
    config = """{
      "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3, "gradient_clipping": 0.5,
      "zero_optimization": {"stage": 1}, "bf16": {"enabled": true},
      "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": "auto", "betas": [0.9, 0.95]}}
    }"""
    found = expanded(tmp_path, with_file(tmp_path, config, {"micro_batch": None}))
    train = next(iter(found.trials.values())).train
    assert (train.micro_batch, train.grad_accum, train.gradient_clipping) == (4, 3, 0.5)
    assert (train.zero_stage, train.precision) == (1, "bf16-params")
    assert (train.optimizer, train.learning_rate, train.weight_decay) == ("deepspeed_config", 0.01, 0.05)


def test_auto_in_the_file_leaves_everything_to_the_study(tmp_path: Path) -> None:
    config = """{
      "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
      "gradient_clipping": "auto", "zero_optimization": {"stage": "auto"}, "bf16": {"enabled": "auto"},
      "fp16": {"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": "auto"}
    }"""
    train = next(iter(expanded(tmp_path, with_file(tmp_path, config)).trials.values())).train
    assert (train.micro_batch, train.gradient_clipping, train.zero_stage, train.precision) == (32, 0.0, 0, "fp32")


def test_a_global_batch_in_the_file_alone_is_that_of_strong_global(tmp_path: Path) -> None:
    scaling = {"mode": "strong-global", "gpus": [1, 2, 4]}
    found = expanded(tmp_path, with_file(tmp_path, '{"train_batch_size": 64}', scaling=scaling))
    assert [(t.train.micro_batch, t.train.grad_accum) for t in found.trials.values()] == [(32, 2), (32, 1), (16, 1)]


@pytest.mark.parametrize("mode", ["strong-micro", "weak"])
def test_a_fitting_micro_batch_in_the_file_is_accepted(tmp_path: Path, mode: str) -> None:
    found = expanded(tmp_path, with_file(tmp_path, '{"train_micro_batch_size_per_gpu": 32}', scaling={"mode": mode}))
    assert len(found.trials) == 2


@pytest.mark.parametrize(
    ("config", "train", "said"),
    [
        ('{"train_micro_batch_size_per_gpu": 8}', {}, "train_micro_batch_size_per_gpu is 8 in the file but 32"),
        (
            '{"gradient_clipping": 1.0}', {"gradient_clipping": 0.5},
            "train.gradient_clipping is 0.5 in the study but 1.0 in the DeepSpeed configuration",
        ),
        ('{"zero_optimization": {"stage": 3}}', {"zero_stage": 1}, "train.zero_stage is 1 in the study but 3"),
        ('{"bf16": {"enabled": true}}', {"precision": "bf16"}, "is 'bf16' in the study but 'bf16-params'"),
        ('{"torch_autocast": {"enabled": false}}', {"precision": "bf16"}, "is 'bf16' in the study but 'fp32'"),
        (
            '{"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}', {"learning_rate": 0.2},
            "train.learning_rate is 0.2 in the study but 0.1",
        ),
        ('{"optimizer": {"type": "Lamb"}}', {"optimizer": "sgd"}, "train.optimizer is 'sgd' in the study but 'Lamb'"),
        ('{"optimizer": {"type": "Adam"}}', {"learning_rate": 0.2}, 'leaves lr to DeepSpeed (say "lr": "auto" there'),
        ('{"train_batch_size": 64}', {}, "Remove train_batch_size from the file (or set to \"auto\")"),
        ('{"fp16": {"enabled": true}}', {}, "fp16 training needs a GPU"),
        ('{"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}', {"learning_rate_scaling": "linear"}, "leaves lr to"),
        ('{"scheduler": {"type": "WarmupLR"}}', {"learning_rate_warmup_steps": 9}, "configuration sets scheduler"),
        (
            '{"zero_optimization": {"stage": 2, "reduce_bucket_size": 1e6}}', {"bucket_mib": 4},
            "train.bucket_mib is 4 in the study, and the DeepSpeed configuration sets "
            "zero_optimization.reduce_bucket_size too",
        ),
        (
            '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}', {"offload": "parameters"},
            "the DeepSpeed configuration sets zero_optimization.offload_param too",
        ),
        (
            '{"communication_data_type": "fp16"}', {"gradient_dtype": "bf16"},
            "train.gradient_dtype is 'bf16' in the study but 'fp16' in the DeepSpeed configuration",
        ),
        ("{}", {"engine": "ddp"}, "train.deepspeed_config is set, but train.engine is 'ddp'"),
        ('{"train_micro_batch_size_per_gpu": 100000000}', {"micro_batch": None}, "should be at most 1000000"),
    ],
)  # fmt: skip
def test_a_contradiction_names_both_values(tmp_path: Path, config: str, train: dict[str, Any], said: str) -> None:
    assert said in refusal(tmp_path, with_file(tmp_path, config, train))


def test_an_optimizer_of_the_same_kind_is_no_contradiction(tmp_path: Path) -> None:
    config = '{"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}'
    found = expanded(tmp_path, with_file(tmp_path, config, {"optimizer": "adamw", "learning_rate": 0.2}))
    assert {t.train.learning_rate for t in found.trials.values()} == {0.2}


def test_the_file_s_content_is_part_of_a_trial_and_its_layout_is_not(tmp_path: Path) -> None:
    def identities(config: str) -> set[str]:
        return set(expanded(tmp_path, with_file(tmp_path, config)).trials)

    first = identities('{"pin_memory": true, "steps_per_print": 5}')
    assert identities('{\n "steps_per_print": 5,\n "pin_memory": true}') == first
    assert not identities('{"pin_memory": false, "steps_per_print": 5}') & first


@pytest.mark.parametrize(
    ("changes", "lacking"),
    [
        ({"train": {"target_accuracy": 0.9, "epochs": None}, "measure": {"steps": 50}}, "train.epochs is not given"),
        ({"train": {"target_accuracy": 0.9}, "measure": {"evaluate": False}}, "measure.evaluate is false"),
    ],
)
def test_a_target_accuracy_needs_epochs_and_evaluation(
    tmp_path: Path, changes: dict[str, dict[str, Any]], lacking: str
) -> None:
    assert lacking in refusal(tmp_path, changes)


def test_what_is_explained_reaches_the_trial(tmp_path: Path) -> None:
    (default, _) = trials_of(expanded(tmp_path), "strong-micro")
    assert (default.window.explain, default.window.traces) == (True, False)
    (set_by_hand, _) = trials_of(expanded(tmp_path, {"measure": {"explain": False, "traces": True}}), "strong-micro")
    assert (set_by_hand.window.explain, set_by_hand.window.traces) == (False, True)


def test_a_share_that_divides_badly_is_told_before_anything_runs(tmp_path: Path) -> None:
    """148 images: 37 on each of 4 ranks, which divides by nothing."""
    batch: dict[str, dict[str, Any]] = {
        "train": {"micro_batch": 16, "global_batch": 148},
        "scaling": {"gpus": [2, 4], "mode": "strong-global"},
    }
    notes = expanded(tmp_path, batch).notes
    assert len(notes) == 2
    assert notes[1].startswith("4 ranks take 37 x 1 of 37 images a rank, where 3 micro-steps would hold them: small")
    even: dict[str, dict[str, Any]] = {
        "train": {"micro_batch": 16, "global_batch": 128},
        "scaling": {"gpus": [2, 4], "mode": "strong-global"},
    }
    assert expanded(tmp_path, even).notes == ()
