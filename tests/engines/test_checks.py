from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any

import pytest

import vitscale
from engines.jobs import ENGINE_FIELDS
from results_factory import make_trial
from study_factory import EIGHT_CORES, expanded
from vitscale.base.distribution import install_command
from vitscale.engines import ENGINES, checks
from vitscale.engines.checks import why_no_gradient_norms
from vitscale.engines.deepspeed.config import as_number
from vitscale.engines.facts import ONE_PROCESS
from vitscale.engines.megatron import facts as megatron
from vitscale.engines.step_schedule import windows
from vitscale.errors import RequestError
from vitscale.trial.trial import TrainSpec


def train(engine: str, **changes: Any) -> TrainSpec:
    backend = {"accelerate_backend": "ddp"} if engine == "accelerate" else {}
    given: dict[str, Any] = {"engine": engine, "precision": "fp32", "device": "cpu", "micro_batch": 8}
    return TrainSpec(**(given | backend | changes))


def refusal(engine: str, **changes: Any) -> str:
    with pytest.raises(RequestError) as caught:
        checks.check(train(engine, **changes))
    return str(caught.value)


@pytest.mark.parametrize("engine", ["none", "ddp", "fsdp2", "deepspeed", "accelerate"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-params"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_what_every_engine_can_do_on_cpu(engine: str, precision: str, optimizer: str) -> None:
    options = {"activation_checkpointing": True, "compile": True, "gradient_clipping": 1.0, "grad_accum": 3}
    checks.check(train(engine, precision=precision, optimizer=optimizer, **options))


@pytest.mark.parametrize(
    ("engine", "changes"),
    [
        ("ddp", {"bucket_mib": 4, "gradient_as_bucket_view": True, "static_graph": True, "gradient_dtype": "fp16"}),
        ("ddp", {"gradient_dtype": "bf16", "device": "cuda"}),
        ("ddp", {"precision": "fp16", "device": "cuda"}),
        ("ddp", {"optimizer": "lamb"}),
        ("accelerate", {"bucket_mib": 4, "gradient_as_bucket_view": True, "static_graph": True, "optimizer": "lamb"}),
        ("fsdp2", {"reshard_after_forward": False, "gradient_dtype": "bf16"}),
        ("fsdp2", {"precision": "bf16-params", "master_weights": True, "gradient_dtype": "fp32"}),
        ("fsdp2", {"offload": "parameters", "device": "cuda"}),
        ("accelerate", {"accelerate_backend": "fsdp2", "device": "cuda", "reshard_after_forward": False}),
        ("deepspeed", {"zero_stage": 0, "optimizer": "lamb", "gradient_dtype": "bf16"}),
        ("deepspeed", {"zero_stage": 1, "overlap_comm": True, "bucket_mib": 4}),
        ("deepspeed", {"zero_stage": 3, "gather_bucket_mib": 4}),
        ("deepspeed", {"zero_stage": 1, "gather_bucket_mib": 4}),  # `plan` says that it has no effect
        ("deepspeed", {"zero_stage": 3, "hpz": 8}),
        ("deepspeed", {"zero_stage": 2, "hpz": 1}),
        ("accelerate", {"accelerate_backend": "deepspeed", "zero_stage": 3, "hpz": 8}),
        ("deepspeed", {"zero_stage": 1, "offload": "optimizer"}),
        ("deepspeed", {"zero_stage": 3, "gradient_dtype": "bf16"}),
        ("deepspeed", {"zero_stage": 0, "precision": "bf16", "gradient_dtype": "bf16"}),
        ("deepspeed", {"zero_stage": 2, "precision": "bf16-params", "gradient_dtype": "fp32"}),
        ("deepspeed", {"zero_stage": 3, "offload": "parameters"}),
        ("accelerate", {"accelerate_backend": "deepspeed", "zero_stage": 3, "offload": "parameters"}),
    ],
)
def test_an_option_goes_with_the_engines_that_have_it(engine: str, changes: dict[str, Any]) -> None:
    checks.check(train(engine, **changes))


@pytest.mark.parametrize(
    ("engine", "changes", "said"),
    [
        ("ddp", {"zero_stage": 2}, "train.zero_stage = 2 has no meaning under train.engine = 'ddp'. Remove it, or set"),
        ("none", {"bucket_mib": 4}, "Remove it, or set engine = 'ddp' or 'deepspeed' or 'megatron'"),
        ("fsdp2", {"static_graph": True}, "train.static_graph = True has no meaning under train.engine = 'fsdp2'"),
        ("ddp", {"reshard_after_forward": False}, "train.reshard_after_forward = False has no meaning"),
        ("ddp", {"master_weights": True, "precision": "bf16-params"}, "master_weights = True has no meaning under"),
        (
            "fsdp2", {"master_weights": True, "precision": "bf16"},
            "train.master_weights has no meaning with precision = 'bf16': its weights are fp32",
        ),
        (
            "accelerate",
            {"accelerate_backend": "fsdp2", "device": "cuda", "master_weights": True, "precision": "bf16-params"},
            "train.master_weights has no meaning under accelerate with FSDP2",
        ),
        ("ddp", {"accelerate_backend": "ddp"}, "accelerate_backend has no meaning under train.engine = 'ddp'"),
        (
            "accelerate", {"zero_stage": 1},
            "has no meaning under train.engine = 'accelerate' with accelerate_backend = 'ddp'",
        ),
        ("deepspeed", {"offload": "optimizer"}, "offload = 'optimizer' has no effect under DeepSpeed at zero_stage"),
        ("deepspeed", {"overlap_comm": True}, "overlap_comm = True has no effect under DeepSpeed at zero_stage = 0"),
        ("deepspeed", {"offload": "parameters", "zero_stage": 2}, "needs zero_stage = 3, and this is 2"),
        ("deepspeed", {"hpz": 8, "zero_stage": 2}, "and gathers none in forward. Valid: zero_stage = 3, hpz = 1."),
        ("fsdp2", {"hpz": 8}, "hpz = 8 has no meaning under train.engine = 'fsdp2'. Remove it, or set engine"),
        ("fsdp2", {"offload": "optimizer"}, "offloads weights, gradients and optimizer together"),
        ("fsdp2", {"offload": "parameters"}, "has no meaning under FSDP2 on the CPU"),
        ("accelerate", {"accelerate_backend": "fsdp2"}, "on CPU Accelerate drops its FSDP plugin without a word"),
        (
            "accelerate", {"accelerate_backend": "fsdp2", "gradient_dtype": "bf16", "device": "cuda"},
            "train.gradient_dtype has no meaning under accelerate with FSDP2",
        ),
        ("ddp", {"static_graph": True, "grad_accum": 3}, "static_graph does not go with train.grad_accum = 3"),
        ("ddp", {"gradient_dtype": "bf16"}, "torch's bf16_compress_hook refuses gloo"),
        ("ddp", {"gradient_dtype": "fp32", "precision": "bf16-params"}, "that is not fp32"),
        (
            "deepspeed", {"zero_stage": 2, "precision": "bf16", "gradient_dtype": "fp32"},
            "train.gradient_dtype = 'fp32' has no effect under DeepSpeed with precision = 'bf16' at zero_stage = 2",
        ),
        ("fsdp2", {"optimizer": "lamb"}, "it would train something else"),
        ("deepspeed", {"optimizer": "lamb", "zero_stage": 1}, "hands the optimizer flat pieces of them"),
        ("ddp", {"precision": "fp16"}, "fp16 training needs a GPU, and this trial computes on the CPU"),
        ("megatron", {}, "cannot run here: Megatron-Core needs a CUDA GPU: it allocates its gradient buffers"),
        ("megatron", {}, "Use another engine; engine = 'fsdp2' takes [parallel] tensor too, by torch's DTensor"),
        ("fairscale", {}, "unknown engine 'fairscale'. Valid: accelerate, ddp, deepspeed, fsdp2, megatron, none."),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_its_reason(engine: str, changes: dict[str, Any], said: str) -> None:
    assert said in refusal(engine, **changes)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 12])
def test_ranks_of_one_group_or_of_equal_groups_take_hpz(ranks: int) -> None:
    """As DeepSpeed makes groups: of all ranks where there are fewer than asked for."""
    checks.check_ranks(train("deepspeed", zero_stage=3, hpz=4), ranks)


@pytest.mark.parametrize(
    ("fields", "ranks", "said"),
    [
        (
            {"hpz": 4}, 6,
            "train.hpz = 4 does not divide 6 ranks: groups that share a second copy of the weights have equally many. "
            "Valid: hpz = 3 or 6. Set it, or take 4 or 8 ranks",
        ),
        ({"hpz": 5}, 7, "Valid: hpz = 1 or 7. Set it, or take 5 or 10 ranks"),
        (
            {"deepspeed_config": {"zero_optimization": {"zero_hpz_partition_size": 4}}}, 6,
            "zero_hpz_partition_size = 4 in the DeepSpeed configuration does not divide 6 ranks",
        ),
    ],
)  # fmt: skip
def test_unequal_groups_are_refused_with_what_divides(fields: dict[str, Any], ranks: int, said: str) -> None:
    uneven = train("deepspeed", zero_stage=3, **fields)
    with pytest.raises(RequestError) as caught:
        checks.check_ranks(uneven, ranks)
    assert said in str(caught.value)
    assert not checks.takes_ranks(uneven, ranks)


def test_megatron_asks_for_its_package_where_there_is_a_gpu() -> None:
    if util.find_spec("megatron") is not None:
        pytest.skip("megatron-core is installed")
    missing = f"megatron-core is not installed ({install_command('megatron')})"
    assert missing in refusal("megatron", device="cuda")


def test_megatron_has_adam_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "versions_of", lambda names: dict.fromkeys(names, "0.16"))
    checks.check(train("megatron", device="cuda", overlap_comm=True, bucket_mib=8))
    assert "shards the states of Adam alone" in refusal("megatron", device="cuda", optimizer="sgd")
    assert "keeps fp16 weights" in refusal("megatron", device="cuda", precision="fp16")


def test_a_study_is_held_against_its_engine_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"train.zero_stage = 2 has no meaning under train.engine = 'fsdp2'"):
        expanded(tmp_path, {"train": {"engine": "fsdp2", "zero_stage": 2}}, EIGHT_CORES)


@pytest.mark.parametrize(
    ("engine", "changes", "said"),
    [
        ("deepspeed", {"optimizer": "deepspeed_config"}, "the optimizer is that of the DeepSpeed file"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_it_is_trained(engine: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        checks.check_checkpoint(train(engine, **changes))


def test_a_checkpoint_is_asked_for_by_the_study(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"optimizer": {"type": "Adam"}}')
    file = {"engine": "deepspeed", "deepspeed_config": "ds.json"}
    with pytest.raises(RequestError, match=r"measure\.checkpoint cannot be done"):
        expanded(tmp_path, {"train": file, "measure": {"checkpoint": True}})
    found = expanded(tmp_path, {"train": {"engine": "fsdp2"}, "measure": {"checkpoint": True}})
    assert all(trial.window.checkpoint for trial in found.trials.values())


def test_accelerate_stands_for_ddp_unless_told(tmp_path: Path) -> None:
    trials = expanded(tmp_path, {"train": {"engine": "accelerate"}}, EIGHT_CORES).trials.values()
    assert {(trial.train.accelerate_backend, trial.train.wrapper) for trial in trials} == {("ddp", "ddp")}


GRAPHS: dict[str, Any] = {"compile": True, "compile_mode": "reduce-overhead", "device": "cuda"}


@pytest.mark.parametrize(
    ("engine", "changes", "said"),
    [
        ("ddp", {"device": "cpu"}, "records CUDA graphs, and this trial computes on the CPU"),
        ("ddp", {"grad_accum": 2}, "does not go with train.grad_accum = 2: gradients of one micro-step lie where"),
        ("fsdp2", {}, "needs weights that stay in place, and FSDP2 gathers them anew"),
        ("accelerate", {"accelerate_backend": "fsdp2"}, "needs weights that stay in place, and FSDP2"),
        ("deepspeed", {"zero_stage": 3}, "needs weights that stay in place, and ZeRO-3 gathers them anew"),
    ],
)
def test_cuda_graphs_are_refused_where_they_would_train_otherwise(
    engine: str, changes: dict[str, Any], said: str
) -> None:
    assert f"train.compile_mode = 'reduce-overhead' {said}" in refusal(engine, **GRAPHS | changes)


@pytest.mark.parametrize(
    ("engine", "changes"), [("none", {}), ("ddp", {}), ("deepspeed", {"zero_stage": 2}), ("accelerate", {})]
)
def test_cuda_graphs_go_with_engines_whose_weights_stay_in_place(engine: str, changes: dict[str, Any]) -> None:
    checks.check(train(engine, **GRAPHS | changes))


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "deepspeed", "accelerate"])
def test_every_engine_takes_unequal_shares(engine: str) -> None:
    checks.check(train(engine, micro_batches=(11, 5), grad_accum=3, compile=True, optimizer="sgd"))


def test_a_deepspeed_file_that_says_what_every_gpu_takes_is_refused_where_they_take_unequal_shares() -> None:
    fixed, left_open = ({"train_micro_batch_size_per_gpu": value} for value in (8, "auto"))
    assert refusal("deepspeed", micro_batches=(11, 5), deepspeed_config=fixed) == (
        "train.rank_speeds gives ranks 11 + 5 images, and the DeepSpeed configuration says "
        'train_micro_batch_size_per_gpu = 8 for all of them. Remove that key from the file (or set it to "auto"), or '
        "leave rank_speeds out."
    )
    checks.check(train("deepspeed", deepspeed_config=fixed))
    checks.check(train("deepspeed", micro_batches=(11, 5), deepspeed_config=left_open))
    # What it says of all ranks together stays true.
    together = {"train_batch_size": 16, "gradient_accumulation_steps": 1}
    checks.check(train("deepspeed", micro_batches=(11, 5), deepspeed_config=together))


@pytest.mark.parametrize(
    ("engine", "train", "reason"),
    [
        ("ddp", {}, None),
        ("none", {"precision": "bf16"}, None),
        ("deepspeed", {}, None),
        ("deepspeed", {"zero_stage": 3, "precision": "bf16-params"}, None),
        ("deepspeed", {"zero_stage": 0, "deepspeed_config": {"optimizer": {"type": "Muon"}}}, None),
        ("deepspeed", {"zero_stage": 2, "deepspeed_config": {"zero_optimization": {"compute_grad_norm": True}}}, None),
        ("deepspeed", {"zero_stage": 2, "deepspeed_config": {"optimizer": "adam", "zero_optimization": []}}, None),
        ("accelerate", {"accelerate_backend": "ddp"}, None),
        ("deepspeed", {"precision": "fp16"}, "fp16 scales the gradients by a factor that changes as training goes on"),
        ("ddp", {"precision": "fp16"}, "fp16 scales the gradients by a factor that changes as training goes on"),
        ("fsdp2", {}, "FSDP2 scatters gradients before a rank's own can be seen whole"),
        (
            "accelerate",
            {"accelerate_backend": "fsdp2"},
            "FSDP2 scatters gradients before a rank's own can be seen whole",
        ),
        ("megatron", {}, "Megatron-Core scatters gradients into buffers of its own"),
        (
            "accelerate",
            {"accelerate_backend": "deepspeed"},
            "Accelerate takes DeepSpeed's optimizer step, and with it the gradients, inside its backward",
        ),
        (
            "deepspeed",
            {"deepspeed_config": {"optimizer": {"type": "ZeroOneAdam"}}},
            "the optimizer exchanges no gradients once it compresses",
        ),
        (
            "deepspeed",
            {"zero_stage": 1, "deepspeed_config": {"optimizer": {"type": "Muon"}}},
            "under Muon DeepSpeed takes the norm of the update, not of the gradient",
        ),
        (
            "deepspeed",
            {"zero_stage": 2, "deepspeed_config": {"zero_optimization": {"compute_grad_norm": False}}},
            "the DeepSpeed file sets compute_grad_norm to false",
        ),
    ],
)
def test_where_the_gradients_norms_are_unknown_it_says_why_and_no_step_takes_them(
    engine: str, train: dict[str, Any], reason: str | None
) -> None:
    trial = make_trial(engine, 2, **train)
    assert why_no_gradient_norms(trial) == reason
    assert ("gradients" in windows(trial, 200, 1000)) == (reason is None)
    assert "explained" in windows(trial, 200, 1000)


@pytest.mark.parametrize(("text", "number"), [(" 5.00 ", 5), ("1_000", 1000), ("5 .0", None), ("5. 0", None)])
def test_a_text_is_the_number_that_pydantic_makes_of_it(text: str, number: int | None) -> None:
    assert as_number(text) == number


def comparisons(tree: ast.AST) -> Iterator[ast.Compare]:
    """Comparisons of an engine, by its attribute or variable, with a name of one of vitscale's engines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            parts = list(ast.walk(node))
            named = {getattr(part, "attr", getattr(part, "id", None)) for part in parts}
            texts = {part.value for part in parts if isinstance(part, ast.Constant)}
            if named & {"engine", "wrapper", "accelerate_backend"} and texts & set(ENGINES):
                yield node


def test_nothing_outside_compares_an_engine_s_name() -> None:
    """It asks the engine's facts, so that a new engine need not be looked for."""
    package = Path(vitscale.__file__).parent
    found = [
        f"{file.relative_to(package)}:{node.lineno}"
        for file in sorted(package.rglob("*.py"))
        if "engines" not in file.relative_to(package).parts
        for node in comparisons(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert found == []


@pytest.mark.parametrize(
    "code", ['train.engine == "ddp"', 'wrapper != "fsdp2"', '"deepspeed" in (train.engine, train.accelerate_backend)']
)
def test_such_a_comparison_is_seen(code: str) -> None:
    assert list(comparisons(ast.parse(code)))


TRAINS_LIKE_ONE_PROCESS = [
    name for name, facts in ENGINES.items() if facts.trains_like == ONE_PROCESS or facts.stands_for
]


@pytest.mark.parametrize("engine", [name for name in TRAINS_LIKE_ONE_PROCESS if not ENGINES[name].alone])
def test_every_engine_that_computes_here_has_a_job_that_holds_its_losses(engine: str) -> None:
    jobs = {job["engine"] for job in ENGINE_FIELDS.values()}
    assert engine in jobs or ENGINES[engine].unavailable("cpu")
