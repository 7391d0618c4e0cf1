"""The line of each key, in files of every spelling that DeepSpeed reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hjson_files import hjson_file, mutated
from vitscale.cli import app
from vitscale.deepspeed_lint.key_lines import lines_of_keys
from vitscale.engines.deepspeed.config import parse
from vitscale.errors import RequestError


def test_each_key_has_the_line_that_it_was_written_to() -> None:
    files = [hjson_file(seed) for seed in range(400)]
    assert [file.text for file in files if lines_of_keys(file.text) != file.lines] == []
    assert sum(len(file.lines) for file in files) > 2000


def test_any_text_that_can_be_read_has_lines() -> None:
    """Texts that were damaged and are Hjson still give lines within the text, and no exception."""
    count = 0
    for seed in range(400):
        text = mutated(hjson_file(seed).text, seed)
        try:
            parse(text, "x")
        except RequestError:
            continue
        count += 1
        assert all(1 <= line <= text.count("\n") + 1 for line in lines_of_keys(text).values())
    assert count > 50


@pytest.mark.parametrize("comment", ["// micro", "# micro", "/* micro */"])
def test_lint_reads_hjson_and_says_so_in_a_note(tmp_path: Path, comment: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(f'{{\n  {comment}\n  "train_batch_size": 32,\n  "fp16": {{"enable": true,}},\n}}\n')
    answer = CliRunner().invoke(app, ["lint", str(file), "--json"])
    findings = {(f["kind"], f["severity"], f["key"] or "", f["line"]) for f in json.loads(answer.stdout)["findings"]}
    assert ("unknown-key", "error", "fp16.enable", 4) in findings
    assert ("not-json", "note", "", None) in findings
    file.write_text('{"train_batch_size": 32}')
    assert "not-json" not in CliRunner().invoke(app, ["lint", str(file), "--json"]).stdout
