"""`vitscale lint` as people call it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from driving import vitscale
from vitscale.cli import app
from vitscale.errors import RequestError

APPENDIX_B = Path(__file__).parent / "appendix_b.json"
PAGE = Path(__file__).parents[2] / "docs/lint.md"


def lint(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["lint", *map(str, arguments)])


def test_it_starts_with_a_count_and_exits_with_1_where_there_are_errors() -> None:
    answer = vitscale("lint", APPENDIX_B, "--model", "vit-b16", "--gpus", "2")
    assert answer.returncode == 1
    assert answer.stderr == ""
    first, _, findings = answer.stdout.partition("\n\n")
    assert re.fullmatch(
        r".*appendix_b\.json: 2 errors, 4 warnings, 2 notes "
        r"\(DeepSpeed \S+; vit-b16 with 86,567,656 parameters; 2 GPUs\)",
        " ".join(first.split()),
    )
    assert findings.startswith("error  unknown-key  micro_batch_per_gpu, line 4\n")


def test_neither_torch_nor_deepspeed_is_imported_and_json_has_the_fields_of_every_finding() -> None:
    program = "import sys; sys.modules |= {'torch': None, 'deepspeed': None}; from vitscale.cli import main; main()"
    answer = subprocess.run(
        [sys.executable, "-c", program, "lint", APPENDIX_B, "--json"], capture_output=True, text=True, check=False
    )
    assert (answer.returncode, answer.stderr) == (1, "")
    told = json.loads(answer.stdout)
    assert (told["vitscale"], told["version"], told["file"]) == ("lint", 2, str(APPENDIX_B))
    fields = {"kind", "severity", "message", "advice", "key", "line", "source", "trials", "ranks", "hosts"}
    assert [set(finding) for finding in told["findings"]] == [fields] * 8


def test_without_errors_it_exits_with_0(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 32}')
    assert lint(tmp_path / "ds.json").exit_code == 0
    (tmp_path / "ds.json").write_text('{"train_batch_size": "32"}')
    assert lint(tmp_path / "ds.json").exit_code == 1
    (tmp_path / "ds.json").write_text("{}")
    assert "Neither train_batch_size nor" in lint(tmp_path / "ds.json").stdout


def test_nothing_is_said_to_be_nothing(tmp_path: Path) -> None:
    quiet = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "torch_autocast": {"enabled": True},
        "zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 25_000_000},
        "timers": {"throughput": {"enabled": False}},
    }
    (tmp_path / "ds.json").write_text(json.dumps(quiet))
    answer = lint(tmp_path / "ds.json", "--json")
    assert (answer.exit_code, json.loads(answer.stdout)["findings"]) == (0, [])
    printed = " ".join(lint(tmp_path / "ds.json").stdout.split())
    assert "ds.json: nothing to complain of (DeepSpeed " in printed


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"a": 1]', "is no JSON or Hjson at line 1, column 8"),
        ('{\n "a": 1\n b\n}', "is no JSON or Hjson at line 3, column 2"),
        ("[]", r"holds \[\]. Valid: one object"),
        ('{"a": 1, "a": 2}', "key 'a' stands twice"),
        ("", "is empty"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "ds.json").write_text(content)
    answer = lint(tmp_path / "ds.json")
    assert isinstance(answer.exception, RequestError)
    assert re.search(said, str(answer.exception))
    assert "study" not in str(answer.exception)


def test_a_study_is_not_read_as_broken_json() -> None:
    answer = lint(Path("examples/quickstart.toml"))
    assert isinstance(answer.exception, RequestError)
    assert re.fullmatch(
        r"'examples/quickstart.toml' is a study's form.*a study is looked at by vitscale plan.*", str(answer.exception)
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "0"], "--gpus is 0. Valid: 1 or more"),
        (["--model", "vit-b17"], "unknown model 'vit-b17'. Did you mean 'vit-b16'. Valid: swinv2-b.* vit-h14"),
        (["--model", "a" * 5000], "unknown model"),
        (["--deepspeed", "newest"], "'newest' is no version of DeepSpeed. Valid: 0.9.5"),
    ],
)
def test_wrong_options_are_refused_with_the_valid_ones(arguments: list[str], said: str) -> None:
    answer = lint(APPENDIX_B, *arguments)
    assert isinstance(answer.exception, RequestError)
    assert re.search(said, str(answer.exception))


def test_wrong_requests_exit_with_2(tmp_path: Path) -> None:
    answer = vitscale("lint", tmp_path / "none.json")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "No such file" in answer.stderr
    assert "Give the JSON file that deepspeed.initialize gets" in answer.stderr
    assert "Traceback" not in answer.stderr


VIT = {
    "model_type": "vit", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "image_size": 16, "patch_size": 8, "architectures": ["ViTForImageClassification"],
}  # fmt: skip


def test_a_hugging_face_folder_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(VIT))
    assert re.search(r" with\s+2\d,\d{3}\s+parameters", lint(APPENDIX_B, "--model", tmp_path).stdout)
    (tmp_path / "config.json").write_text(json.dumps(VIT | {"model_type": "swin"}))
    refused = lint(APPENDIX_B, "--model", tmp_path).exception
    assert isinstance(refused, RequestError)
    assert "cannot be known without building it" in str(refused)


def test_the_example_in_the_docs_is_what_it_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, _, shown = PAGE.read_text().partition("```\n$ vitscale lint ")[2].partition("```")[0].partition("\n")
    shutil.copy(APPENDIX_B, tmp_path / "ds.json")
    monkeypatch.chdir(tmp_path)
    printed = lint(*command.split(), "--deepspeed", "0.19.8").stdout
    for part in shown.split("[...]\n"):
        assert part in printed
    assert len(shown.splitlines()) > 10


def test_each_finding_says_the_line_of_its_key(tmp_path: Path) -> None:
    """Of keys of one name the one at the finding's own place, however the file is laid out."""
    file = tmp_path / "ds.json"
    file.write_text(
        '{"train_batch_size": 32, "enabled": 1,\n "zero_optimization": {\n  "stage": 2, "enabld": true},\n'
        ' "optimizer": {"type":\n   "OnebitAdam", "params": {"a \\" : {": [1, {"lr": 2}]}},\n "enabld": 3,\n'
        ' "wall_clock_breakdown": true\n}\n'
    )
    answer = CliRunner().invoke(app, ["lint", str(file), "--deepspeed", "0.19.8", "--json"])
    lines = {f["key"]: f["line"] for f in json.loads(answer.stdout)["findings"] if f["key"]}
    assert {key: lines.get(key) for key in ("optimizer.type", "enabld", "wall_clock_breakdown")} == {
        "optimizer.type": 4,
        "enabld": 6,
        "wall_clock_breakdown": 7,
    }
    told = CliRunner().invoke(app, ["lint", str(file), "--deepspeed", "0.19.8", "--verbose"])
    assert "wall_clock_breakdown, line 7" in told.stdout


def test_the_size_of_a_model_that_has_no_name_here_is_given_by_hand(tmp_path: Path) -> None:
    """2 bytes (fp16) x 500,000,000 elements = 954 MiB, and 304,000,000 gradients."""
    file = tmp_path / "ds.json"
    bucket = {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 5e8, "contiguous_gradients": True}
    file.write_text(json.dumps({"train_batch_size": 32, "fp16": {"enabled": True}, "zero_optimization": bucket}))
    found = {f["kind"]: f for f in json.loads(lint(file, "--parameters", "304M", "--json").stdout)["findings"]}
    assert found["bucket-memory"]["severity"] == "warning"
    message = found["bucket-memory"]["message"]
    assert "500,000,000 elements x 2 bytes take 954 MiB on each GPU" in message
    assert "no more than 304,000,000 gradients" in message
    assert "304,000,000 parameters; no --gpus" in " ".join(lint(file, "--parameters", "304M").stdout.split())
    unsized = {f["kind"]: f for f in json.loads(lint(file, "--json").stdout)["findings"]}
    assert unsized["bucket-memory"]["severity"] == "note"
    assert "take 954 MiB on each GPU, whatever the model's size" in unsized["bucket-memory"]["message"]
    large = {f["kind"] for f in json.loads(lint(file, "--parameters", "1.3B", "--json").stdout)["findings"]}
    assert "bucket-memory" not in large


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parameters", "many"], "'many' is no number of parameters"),
        (["--parameters", "86M", "--model", "vit-b16"], "both --model and --parameters are given"),
    ],
)
def test_a_wrong_size_is_refused(arguments: list[str], said: str) -> None:
    answer = lint(APPENDIX_B, *arguments)
    assert isinstance(answer.exception, RequestError)
    assert said in str(answer.exception)
