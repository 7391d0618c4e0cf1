"""What the Hugging Face integrations fill in, against their own sources, and what lint says of the rest."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lint_examples import QUIET, zero
from vitscale.deepspeed_lint import LintTarget, lint
from vitscale.deepspeed_lint.integrations import _TRAINER_UNTIL_4, FILLED, TRAINER

PAGE = Path(__file__).parents[2] / "docs/lint.md"


def source_of(package: str, file: str) -> ast.AST:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    return ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text())


def texts(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def functions(tree: ast.AST, *names: str) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]


def first_arguments(trees: list[ast.FunctionDef], *names: str) -> set[str]:
    """Texts that are the first arguments of calls to these methods."""
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in names]
    firsts = [call.args[0] for call in named if call.args]
    return {first.value for first in firsts if isinstance(first, ast.Constant) and isinstance(first.value, str)}


def filled_by_the_trainer() -> set[str]:
    tree = source_of("transformers", "integrations/deepspeed.py")
    process = functions(tree, "trainer_config_process", "trainer_config_finalize")
    return first_arguments(process, "fill_match", "fill_only")


def filled_by_accelerate() -> set[str]:
    tree = source_of("accelerate", "utils/dataclasses.py")
    plugin = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == "DeepSpeedPlugin")
    mapping = next(
        n.value
        for n in ast.walk(plugin)
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "plugin_to_config_mapping"
    )
    assert isinstance(mapping, ast.Dict)
    keys = {key for value in mapping.values for key in texts(value)}
    keys |= first_arguments(functions(plugin, "set_mixed_precision"), "fill_match")
    (prepare,) = functions(source_of("accelerate", "accelerator.py"), "_prepare_deepspeed")
    keys |= first_arguments([prepare], "fill_match")
    for node in ast.walk(prepare):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "config_kwargs":
            keys |= {text for key in getattr(node.value, "keys", []) for text in texts(key)}
        if isinstance(target, ast.Subscript) and ast.unparse(target.value) == "config_kwargs":
            keys |= texts(target.slice)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "config_kwargs.update":
            keys |= {text for key in getattr(node.args[0], "keys", []) for text in texts(key)}
    return keys


def test_the_table_is_what_the_installed_integrations_fill_in() -> None:
    trainer, accelerate = filled_by_the_trainer(), filled_by_accelerate()
    assert len(trainer) > 10
    assert len(accelerate) > 15
    assert set(FILLED) - set(_TRAINER_UNTIL_4) == trainer | accelerate
    assert {key for key, by in FILLED.items() if by == (TRAINER,)} - set(_TRAINER_UNTIL_4) == trainer - accelerate


def test_accelerate_itself_fails_on_what_the_table_lacks_and_fills_in_what_it_has() -> None:
    """Its own `fill_match`, on a file with "auto" under a name of each kind."""
    dataclasses = pytest.importorskip("accelerate.utils.dataclasses")
    config = {"zero_optimization": {"stage": 3, "prefetch_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}}
    plugin = dataclasses.DeepSpeedPlugin.__new__(dataclasses.DeepSpeedPlugin)
    plugin.hf_ds_config = pytest.importorskip("accelerate.utils.deepspeed").HfDeepSpeedConfig(config)
    plugin.deepspeed_config = plugin.hf_ds_config.config
    kwargs = {"zero_optimization.stage3_prefetch_bucket_size": 1000}
    with pytest.raises(ValueError, match="prefetch_bucket_size` not found in kwargs"):
        plugin.deepspeed_config_process(must_match=False, **kwargs)
    del plugin.hf_ds_config.config["zero_optimization"]["prefetch_bucket_size"]
    plugin.deepspeed_config_process(must_match=False, **kwargs)
    assert plugin.hf_ds_config.config["zero_optimization"]["stage3_prefetch_bucket_size"] == 1000


def of_auto(config: dict[str, Any], **setting: Any) -> set[tuple[str, str]]:
    found = lint(config, LintTarget(**setting))
    return {(finding.severity, finding.about.key) for finding in found if finding.kind == "auto-value"}


def test_auto_under_a_name_that_nothing_fills_in_is_an_error() -> None:
    part = zero(
        stage=3, reduce_bucket_size="auto", prefetch_bucket_size="auto", param_persistence_threshold="auto",
        max_reuse_distance=0,
    )  # fmt: skip
    assert of_auto(QUIET | part) == {
        ("error", "zero_optimization.prefetch_bucket_size"),
        ("error", "zero_optimization.param_persistence_threshold"),
        ("note", "zero_optimization.reduce_bucket_size"),
    }
    advice = {finding.about.key: finding.advice for finding in lint(QUIET | part, LintTarget())}
    assert '"stage3_prefetch_bucket_size": "auto"' in advice["zero_optimization.prefetch_bucket_size"]
    assert of_auto(QUIET | {"steps_per_print": "auto"}) == {("error", "steps_per_print")}


def test_auto_that_is_filled_in_or_is_deepspeeds_own_is_none() -> None:
    assert of_auto(QUIET | zero(stage=3, stage3_prefetch_bucket_size="auto", max_reuse_distance=0)) == {
        ("note", "zero_optimization.stage3_prefetch_bucket_size")
    }
    assert of_auto(QUIET | {"data_types": {"keep_in_fp32_modules": "auto"}, "pipeline": {"stages": "auto"}}) == set()


def test_in_a_study_nothing_but_a_note_is_said_of_auto() -> None:
    """There vitscale hands the file to DeepSpeed, without the keys that are "auto"."""
    part = zero(stage=3, prefetch_bucket_size="auto", max_reuse_distance=0)
    assert of_auto(QUIET | part, in_a_study=True) == {("note", "zero_optimization.prefetch_bucket_size")}


def test_the_page_names_every_key() -> None:
    section = PAGE.read_text().partition("## auto")[2].partition("\n## ")[0]
    assert [key for key in FILLED if f"{key.rpartition('.')[2]}`" not in section] == []
