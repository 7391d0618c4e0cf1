"""Advice that is followed ends its finding and raises none of its own: every piece of advice of every rule is tried."""

from __future__ import annotations

import ast
import inspect
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lint_examples import B16, BREAKS, QUIET, zero
from vitscale.deepspeed_lint import Setting, lint, rules
from vitscale.deepspeed_lint.advice import REMOVED, Advice, FileFinding, changed
from vitscale.deepspeed_lint.rules import batch, keys, memory, optimizer, overlap, parts, precision, timing, values
from vitscale.deepspeed_lint.view import Release, View

FULL = Setting(parameters=B16, gpus=8)
MODULES = (batch, keys, memory, optimizer, overlap, parts, precision, timing, values)


class Example(NamedTuple):
    """A configuration and what it is judged for."""

    config: dict[str, Any]
    setting: Setting


def old(version: str) -> Setting:
    return Setting(parameters=B16, gpus=8, deepspeed=version)


FP16 = {"torch_autocast": {}, "fp16": {"enabled": True}}
BF16 = {"torch_autocast": {}, "bf16": {"enabled": True}}
BATCHES: list[dict[str, Any]] = [
    {"train_batch_size": 33, "train_micro_batch_size_per_gpu": 16},
    {"train_batch_size": 33, "gradient_accumulation_steps": 2},
    {"train_batch_size": 36},
    {"train_batch_size": 3},
    {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 1},
    {"gradient_accumulation_steps": 2},
    {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 1},
    {"train_micro_batch_size_per_gpu": 0},
]
WITHOUT_BATCH = {key: value for key, value in QUIET.items() if key != "train_micro_batch_size_per_gpu"}

EXAMPLES = [
    *(Example(QUIET | part, FULL) for part, *_ in BREAKS),
    *(Example(QUIET | part, Setting()) for part, *_ in BREAKS),
    *(Example(WITHOUT_BATCH | sizes, FULL) for sizes in BATCHES),
    Example(WITHOUT_BATCH | {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 16,
                             "gradient_accumulation_steps": 1}, Setting()),
    Example(QUIET | {"train_batch_size": 128, "gradient_accumulation_steps": 3}, FULL),
    # of other releases, and with more of the file to stand beside
    Example(QUIET | zero(stage=2), old("0.18.2")),
    Example(QUIET | zero(stage=2, overlap_comm=False), old("0.18.2")),
    Example(QUIET | zero(stage=2), old("0.18.7")),
    Example(QUIET, old("0.17.3")),
    Example(QUIET | zero(stage=2), old("0.14.2")),
    Example(QUIET, old("0.12.6")),
    Example(QUIET | {"optimizer": {"type": "OneBitAdam", "params": {}}}, old("0.16.9")),
    Example(QUIET | zero(offload_optimizer={"device": "cpu"}) | {"optimizer": {"type": "OneBitAdam", "params": {}}},
            old("0.16.9")),
    Example({key: value for key, value in QUIET.items() if key != "gradient_clipping"}, old("0.16.9")),
    Example({key: value for key, value in QUIET.items() if key != "gradient_clipping"}, FULL),
    Example({key: value for key, value in QUIET.items() if key != "timers"}, old("0.13.5")),
    Example(QUIET | {"torch_autocast": {}}, old("0.15.4")),
    Example(QUIET, old("0.17.1")),
    Example(QUIET, Setting(installed=False)),
    Example(QUIET | {f"key_{number}": 1 for number in range(60)}, FULL),
    Example(QUIET | zero(prefetch_bucket_size="auto", stage=3, max_reuse_distance=0), FULL),
    Example(QUIET | {"steps_per_print": "auto"}, FULL),
    Example(QUIET | {"gradient_clipping": "auto"}, Setting(in_a_study=True)),
    Example(QUIET | BF16 | {"data_types": {"grad_accum_dtype": "fp32"}} | zero(), FULL),
    Example(QUIET | BF16 | {"data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1}}, FULL),
    Example(QUIET | zero(stage=0) | {"data_types": {"grad_accum_dtype": "int8"}}, FULL),
    Example(QUIET | zero(stage=2) | {"communication_data_type": "fp16"}, FULL),
    Example(QUIET | BF16 | {"communication_data_type": "fp16"}, FULL),
    Example(QUIET | BF16 | {"communication_data_type": "fp32"}, FULL),
    Example(QUIET | FP16 | {"fp16": {"enabled": True, "loss_scale": 128, "initial_scale_power": 32}}, FULL),
    Example(QUIET | zero(stage=1, reduce_bucket_size=5e8), Setting(parameters=400_000_000, gpus=8)),
    Example(QUIET | {"zero_optimization": {"stage": 1, "overlap_comm": True}}, Setting(gpus=8)),
    Example(QUIET | zero(cpu_offload=True), FULL),
    Example(QUIET | zero(stage=3, cpu_offload_param=True), FULL),
    Example(QUIET | zero(cpu_offload_use_pin_memory=True, offload_optimizer={}), FULL),
    Example(QUIET | {"cpu_offload": True}, FULL),
    Example(QUIET | {"pin_memory": True} | zero(offload_optimizer={"pin_memory": True}), FULL),
    Example(QUIET | {"cpu_offload": True} | zero(stage=2, offload_optimizer={"device": "cpu"}), FULL),
    Example(QUIET | zero(stage=0, offload_optimizer={"device": "cpu"}) | {"optimizer": {"type": "AdamW"}}, FULL),
    Example(QUIET | {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}, FULL),
    Example({key: value for key, value in QUIET.items() if key != "gradient_clipping"}
            | {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}, FULL),
    Example(QUIET | {"optimizer": {"type": "NoSuch"}}, FULL),
    Example(QUIET | {"scheduler": {"type": "Nothing like it", "params": {}}}, FULL),
    Example(QUIET | {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, FULL),
    Example(QUIET | {"wall_clock_breakdown": "false"}, FULL),
    Example(QUIET | {"fp16": False}, FULL),
    Example(QUIET | {"pipeline": {"seed_layers": True}}, FULL),
    Example(QUIET | {"fp16": "on"}, FULL),
]  # fmt: skip

NOT_OF_THE_FILE = {
    "deepspeed-version": "another release, or another table",
    "bf16-is-not-autocast": "how to read the curves",
    "stage-saves-little": "a study that measures the stages",
    "needs-the-program": "the program asks for it, not the file",
    "overlap-spoils-gradients": "another release",
    "auto-value": "values that the reader chooses",
    "refused-value": "a folder that the reader names",
    "scheduler-type": "parameters that the reader chooses",
    "synchronising-throughput-timer": "another release",
    "no-overlap": "another release",
    "wrong-value": "a value that the reader chooses, where it matters that the key is left out",
    "wrong-type": "a value that the reader chooses, where the key cannot be left out",
    "unknown-key": "the end of a long list",
    "gradients-sent-every-micro-step": "a larger micro-batch",
}
"""Rule -> what its advice without a change of the file is about."""


def judged(example: Example) -> tuple[FileFinding, ...]:
    return lint(example.config, example.setting)


def complaints(findings: tuple[FileFinding, ...]) -> set[tuple[str, str]]:
    return {(found.kind, found.about.key) for found in findings if found.severity != "note"}


def faults_of_advice(example: Example) -> Iterator[str]:
    """What goes wrong when each piece of advice on a file is followed alone."""
    findings = judged(example)
    for found in findings:
        if found.changes is None:
            continue
        followed = lint(changed(example.config, found.changes), example.setting)
        if (found.kind, found.about.key) in {(other.kind, other.about.key) for other in followed}:
            yield f"{found.kind} {found.about.key}: not ended by {found.advice!r}"
        new = complaints(followed) - complaints(findings)
        if ("unknown-key", "") in complaints(findings):  # then one more of the unknown keys has room
            new = {(kind, key) for kind, key in new if kind != "unknown-key"}
        for kind, key in sorted(new):
            yield f"{found.kind} {found.about.key}: {found.advice!r} raises {kind} {key}"


@pytest.mark.parametrize("position", range(len(EXAMPLES)))
def test_advice_that_is_followed_ends_its_finding_and_raises_none(position: int) -> None:
    assert list(faults_of_advice(EXAMPLES[position])) == []


def test_advice_holds_beside_whatever_else_a_file_has() -> None:
    """Two examples at a time in one file, by chance: what breaks one rule stands beside what breaks another."""
    chance = random.Random(2)
    faults: list[str] = []
    for _ in range(600):
        first, second = chance.choice(BREAKS)[0], chance.choice(BREAKS)[0]
        config = QUIET | first | second
        if {"zero_optimization"} <= first.keys() & second.keys() and isinstance(second["zero_optimization"], dict):
            merged = first["zero_optimization"]
            config["zero_optimization"] = (merged if isinstance(merged, dict) else {}) | second["zero_optimization"]
        faults += faults_of_advice(Example(config, chance.choice((FULL, Setting(), old("0.16.9")))))
    assert faults == []


@pytest.mark.parametrize("case", ["A01", "A02", "A07", "A09", "E01"])
def test_advice_on_the_files_of_others_holds(case: str) -> None:
    file = Path(__file__).parents[2] / f"../shared/cases/{case}/ds.json"
    if not file.exists():
        pytest.skip("the files of others are not here")
    from vitscale.engines.deepspeed.config import load

    config = load(file, next_step="").values
    for setting in (Setting(gpus=8), Setting(parameters=304_000_000, gpus=8), Setting(deepspeed="0.18.2")):
        assert list(faults_of_advice(Example(config, setting))) == []


def test_every_rule_has_an_example() -> None:
    views = [View(example.config, example.setting, Release(example.setting.deepspeed)) for example in EXAMPLES]
    silent = [rule.__name__ for rule in rules.RULES if not any(list(rule(view)) for view in views)]
    assert silent == []


NOTED = ("finding", "_finding", "Advice", "remove", "_Refusal")


def test_every_finding_in_the_source_has_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of `finding` in a rule's source, and each `Advice` or `remove` there, is reached by an example."""
    reached: set[tuple[str, int]] = set()
    written: set[tuple[str, int]] = set()
    for module in MODULES:
        path = inspect.getfile(module)
        for name in NOTED:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, _noting(getattr(module, name), path, reached))
        calls = [node for node in ast.walk(ast.parse(Path(path).read_text())) if isinstance(node, ast.Call)]
        written |= {(path, call.lineno) for call in calls if ast.unparse(call.func) in NOTED}
    for example in EXAMPLES:
        judged(example)
    keys.not_json()
    assert sorted((Path(path).name, line) for path, line in written - reached) == []


def _noting(function: Any, path: str, reached: set[tuple[str, int]]) -> Any:
    def noting(*arguments: Any, **keywords: Any) -> Any:
        frame = inspect.currentframe()
        caller = frame.f_back if frame else None
        if caller is not None and caller.f_code.co_filename == path:
            positions = list(caller.f_code.co_positions())
            line = positions[caller.f_lasti // 2][0]
            reached.add((path, line or caller.f_lineno))
        return function(*arguments, **keywords)

    return noting


def test_advice_without_a_change_is_not_about_the_file() -> None:
    kinds = {found.kind for example in EXAMPLES for found in judged(example) if found.changes is None}
    assert kinds - NOT_OF_THE_FILE.keys() == set()


def test_what_advice_changes_stands_in_its_words() -> None:
    """Each value that is written stands in the text, as JSON, as a figure with commas or as the name that is meant."""
    differ = []
    for example in EXAMPLES:
        for found in judged(example):
            for value in () if found.changes is None else found.changes.values():
                if value is REMOVED or value == {} or _is_of_the_file(value, example.config):
                    continue
                if not any(re.search(re.escape(form), found.advice) for form in _forms(value)):
                    differ.append((found.kind, found.advice, value))
    assert differ == []


def _is_of_the_file(value: Any, config: dict[str, Any]) -> bool:
    """Whether a value is only moved: it stands in the file already."""
    return json.dumps(value) in json.dumps(config)


def _forms(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [form for item in value.values() for form in _forms(item)]
    forms = [json.dumps(value), str(value)]
    if isinstance(value, bool):
        forms += ["in a run of its own"] if value is False else []
    elif isinstance(value, int):
        forms.append(f"{value:,}")
    return forms


def test_advice_that_fails_beside_the_rest_of_the_file_is_not_given() -> None:
    """A second name where the file has the first: "write it there" would be refused, so it is "remove it"."""
    config = QUIET | {"cpu_offload": True} | zero(stage=2, offload_optimizer={"device": "cpu"})
    (found,) = [found for found in lint(config, FULL) if found.about.key == "cpu_offload"]
    assert found.changes == {("cpu_offload",): REMOVED}
    assert found.advice.startswith("Remove it: the file has zero_optimization.offload_optimizer")
    (found,) = [found for found in lint(QUIET | {"cpu_offload": True}, Setting()) if found.about.key == "cpu_offload"]
    assert found.advice.startswith("Write zero_optimization.offload_optimizer")


def test_changes_leave_the_configuration_as_it_was() -> None:
    config: dict[str, Any] = {"a": {"b": 1}, "a.b": 2, "c": True}
    changes = {("a.b",): REMOVED, "a.b": 3, "c.d": {"e": 4}, "f.g": REMOVED}
    assert changed(config, changes) == {"a": {"b": 3}, "c": {"d": {"e": 4}}}
    assert config == {"a": {"b": 1}, "a.b": 2, "c": True}
    assert Advice("x").changes is None


def test_advice_that_is_followed_one_after_another_comes_to_an_end() -> None:
    """No two pieces of advice undo each other: what can be changed in a file is changed after some twenty steps."""
    chance = random.Random(3)
    for _ in range(150):
        config = QUIET | chance.choice(BREAKS)[0] | chance.choice(BREAKS)[0]
        steps: list[str] = []
        while len(steps) < 20:
            changes = [found for found in lint(config, FULL) if found.changes is not None and found.severity != "note"]
            if not changes:
                break
            config = changed(config, changes[0].changes or {})
            steps.append(changes[0].advice)
        assert len(steps) < 20, steps
