"""A DeepSpeed file is read as DeepSpeed reads it, comments, trailing commas and all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hjson_files import exactly, hjson_file, mutated
from vitscale.engines.deepspeed.config import is_json, load, parse, read
from vitscale.errors import RequestError

SITES_GUIDE = """{
  "train_batch_size": 32,
  # of the whole job
  "zero_optimization": {"stage": 1,},
  "optimizer": {
    "type": "Adam",
  },
  "fp16": {
    "enabled": false,  // V100 only
  },
}
"""


def test_comments_and_trailing_commas_are_legal(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(SITES_GUIDE)
    assert read(tmp_path / "ds.json") == {
        "train_batch_size": 32,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "Adam"},
        "fp16": {"enabled": False},
    }
    assert not is_json(SITES_GUIDE)
    assert is_json('{"a": [1.5, {"b": null}]}')


def read_by_deepspeed(files: list[Path]) -> list[str | None]:
    reader = Path(__file__).parent / "deepspeed_loads.py"
    paths = json.dumps([str(file) for file in files])
    answer = subprocess.run(
        [sys.executable, reader], input=paths, capture_output=True, text=True, timeout=300, check=True
    )
    answers: list[str | None] = json.loads(answer.stdout.splitlines()[-1])
    return answers


def read_here(file: Path) -> str | None:
    try:
        return exactly(load(file, next_step="").values)
    except RequestError:
        return None


HAND_WRITTEN = (
    SITES_GUIDE,
    '{"a": 1, "a": 2}',
    '{"a": {"b": 1, "b": 2,},}',
    "a: 1\nb: {c: two words, and more\n}",
    "// only a comment",
    "{a: '''\n  x\n  y\n  '''}",
    "{/* no end",
    '{"a": 1e999}',
    '{"a": 1.0, "b": 5e8, "c": 1e10, "d": -0.0, "e": 123456789012}',
    '{"a": [1,, 2,]}',
    "{'a': 'it\\'s'}",
    '{"a": tru}',
    '{"a": 1} 2',
    '{"a": 1',
)


def test_what_is_read_is_what_deepspeed_reads(tmp_path: Path) -> None:
    """Values, their types and order, and what is refused, of files in every spelling and of broken ones."""
    texts = [*HAND_WRITTEN, *(hjson_file(seed).text for seed in range(250))]
    texts += [mutated(hjson_file(seed).text, seed) for seed in range(250)]
    files = [tmp_path / f"{position}.json" for position in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    by_deepspeed = read_by_deepspeed(files)
    differ = [
        (text, theirs, ours)
        for text, theirs, ours in zip(texts, by_deepspeed, map(read_here, files), strict=True)
        if theirs != ours and not _is_no_object(theirs) and text.strip()
    ]
    assert differ == []
    assert sum(theirs is not None for theirs in by_deepspeed) > 250
    assert sum(theirs is None for theirs in by_deepspeed) > 50


def _is_no_object(values: str | None) -> bool:
    """DeepSpeed fails on such a file only when it looks for a key."""
    return values is not None and not values.startswith("{")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "a": 2}', "key 'a' stands twice in one object"),
        ('{a: 1, "a": 2,}', "key 'a' stands twice in one object"),
        ('{\n"a": {"b": 1\n', "at line 3, column 1"),
        ("{/* no end", "a comment or a text in it has no end"),
        ("{a: " + "[" * 30 + "]" * 30 + ",}", "is nested too deeply. Valid: 20 levels"),
        ("{a: " + "[\n" * 3000, "is nested too deeply"),
        ("{a: 1e999,}", "a number in it is too large"),
        ("{a: " + "9" * 1500 + ",}", "a whole number in it has 1,500 digits"),
        ('{a: "\\ud800",}', "half of a character"),
        ("[1, 2,]", r"holds \[1, 2\]. Valid: one object"),
        (
            "{a: 1, b: " + "t," * 3000 + "\n}",
            "a line of 6,0.. characters is too long for Hjson, and as JSON it is wrong at line 1, column 2: ",
        ),
    ],
)
def test_what_is_refused_says_why(text: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        parse(text, "'ds.json'")


def test_a_long_line_of_json_is_read() -> None:
    assert len(parse(json.dumps({f"key_{n}": n for n in range(20_000)}), "x")) == 20_000
