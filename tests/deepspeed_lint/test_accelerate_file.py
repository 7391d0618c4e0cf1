"""Files of `accelerate launch`: what lint finds in them, and that Accelerate itself agrees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import vitscale
from driving import vitscale as vitscale_command
from vitscale.deepspeed_lint.accelerate_file import accelerate_findings
from vitscale.errors import RequestError

Found = set[tuple[str, str, str]]


def found(tmp_path: Path, text: str) -> Found:
    """Severity, kind and key of each finding but those on what a study leaves out."""
    path = tmp_path / "default_config.yaml"
    path.write_text(text)
    findings = [finding for finding in accelerate_findings(path) if finding.kind != "not-in-a-study"]
    return {(finding.severity, finding.kind, finding.about.key) for finding in findings}


FSDP = "distributed_type: FSDP\nfsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
DEEPSPEED = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
FILE_NOTE = ("note", "another-file", "deepspeed_config.deepspeed_config_file")
OLD = ("note", "old-fsdp", "fsdp_config.fsdp_version")
STRATEGY = "fsdp_config.fsdp_sharding_strategy"
RESHARD = "fsdp_config.fsdp_reshard_after_forward"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 8\nmixed_precision: bf16\n", set()),
        ("num_processes: 2\n", {("error", "missing-key", "distributed_type")}),
        ("distributed_type: NO\n", {("error", "unquoted-no", "distributed_type")}),
        ("distributed_type: FSDP2\n", {("error", "wrong-value", "distributed_type")}),
        (
            'distributed_type: "NO"\ngradient_accumulation_steps: 2\n',
            {("error", "unknown-key", "gradient_accumulation_steps")},
        ),
        (
            "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 7\n",
            {("error", "uneven-hosts", "num_processes")},
        ),
        (FSDP, {OLD}),
        (FSDP + "  fsdp_sharding_strategy: SHARD_GRAD_OP\n", {OLD}),
        (FSDP + "  fsdp_sharding_strategy: 2\n", {OLD}),
        (
            FSDP + "  fsdp_sharding_strategy: ZERO\n",
            {OLD, ("error", "wrong-value", STRATEGY)},
        ),
        (FSDP + "  fsdp_reshard_after_forward: SHARD_GRAD_OP\n", {OLD, ("error", "no-effect", RESHARD)}),
        (FSDP + "  fsdp_reshard_after_forward: FULL_SHARD\n", {OLD}),
        (FSDP + "  fsdp_version: 2\n  fsdp_reshard_after_forward: false\n", set()),
        (FSDP + "  fsdp_version: 2\n  fsdp_reshard_after_forward: FULL_SHARD\n", {("error", "wrong-value", RESHARD)}),
        (
            FSDP + "  fsdp_version: 2\n  fsdp_use_orig_params: true\n",
            {("warning", "no-effect", "fsdp_config.fsdp_use_orig_params")},
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n",
            {("warning", "one-unit", "fsdp_config.fsdp_auto_wrap_policy")},
        ),
        (DEEPSPEED, {FILE_NOTE}),
        (DEEPSPEED + "  zero_stage: 2\n", {FILE_NOTE, ("error", "set-twice", "deepspeed_config.zero_stage")}),
        (DEEPSPEED + "mixed_precision: bf16\n", {FILE_NOTE, ("error", "set-twice", "mixed_precision")}),
    ],
)
def test_each_rule(tmp_path: Path, text: str, expected: Found) -> None:
    assert found(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &x 1\nb: *x\n", "has aliases"),
        ("a: 1\na: 2\n", "holds 'a' twice, in lines 1 and 2"),
        ("a: [\n", "is no YAML"),
        ("a: 2024-99-99\n", "is no YAML"),
        ("!!python/object/apply:os.system ['true']\n", "is no YAML"),
        ("- a\n", "a table of keys"),
        ("[" * 30 + "]" * 30, "nested too deeply"),
        ("\n", "is empty"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        found(tmp_path, text)


def test_the_verb_takes_it_by_its_suffix_and_names_lines(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yml"
    path.write_text(FSDP + "  fsdp_version: 2\n  fsdp_reshard_after_forward: FULL_SHARD\n")
    result = vitscale.lint(path)
    assert result.has_errors
    assert [(finding.kind, finding.about.line) for finding in result.findings] == [("wrong-value", 5)]
    answer = vitscale_command("lint", path)
    assert answer.returncode == 1
    assert "1 error (Accelerate 1.15)" in " ".join(answer.stdout.split())


PROGRAM = """
import sys
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import FullyShardedDataParallelPlugin
for path in sys.argv[1:]:
    try:
        load_config_from_file(path)
    except ValueError as error:
        print("refused", "unknown keys" in str(error))
    else:
        print("taken")
print(FullyShardedDataParallelPlugin().sharding_strategy.name)
"""


def test_accelerate_agrees(tmp_path: Path) -> None:
    """It refuses unknown keys and a file without a type, and FSDP1 shards whatever fsdp_reshard_after_forward says."""
    texts = ['distributed_type: "NO"\n', 'distributed_type: "NO"\ntypo: 1\n', "num_processes: 2\n"]
    paths = [tmp_path / f"{number}.yaml" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    environment = os.environ | {"FSDP_VERSION": "1", "FSDP_RESHARD_AFTER_FORWARD": "SHARD_GRAD_OP"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *paths], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.splitlines()[-4:] == ["taken", "refused True", "refused False", "FULL_SHARD"]
