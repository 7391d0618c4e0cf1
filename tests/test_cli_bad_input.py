"""What bad input gets: one clear message, exit code 2, nothing started, nothing written, no traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cifar_factory import malicious_pickles, member, pack, pack_escaping, truncate, write_cifar10
from driving import tree
from vitscale import cli

pytestmark = pytest.mark.computing

GOOD = """
name = "study"
[model]
name = "vit-ti16"
image_size = 32
patch_size = 16
[data]
name = "digits"
[train]
micro_batch = 16
epochs = 2
[scaling]
gpus = [1]
[measure]
repeats = 1
"""


def files(folder: Path) -> dict[str, bytes]:
    """Every file, but for the (empty, kept) lock files of the cache of decoded images."""
    return {name: content for name, content in tree(folder).items() if not name.endswith(".lock")}


class Answer:
    """What the command line did with one study."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Calls `vitscale run study.toml -o results` in this process, and checks that nothing was written."""
    monkeypatch.setenv("VITSCALE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")

    def call(study: str | bytes | None = None, *arguments: str, results: str = "results") -> Answer:
        path = tmp_path / "study.toml"
        if isinstance(study, str):
            path.write_text(study)
        elif study is not None:
            path.write_bytes(study)
        before = files(tmp_path)
        monkeypatch.setattr(sys, "argv", ["vitscale", "run", str(path), "-o", str(tmp_path / results), *arguments])
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        assert files(tmp_path) == before, "something was written"
        code = ended.value.code
        assert isinstance(code, int)
        return Answer(code, captured.out, captured.err)

    return call


def refused(answer: Answer, *said: str) -> None:
    """Exit code 2, and one message of a few lines that holds each of `said`."""
    assert answer.code == 2, answer.err
    assert answer.out == ""
    assert "Traceback" not in answer.err
    assert answer.err.startswith("vitscale: ")
    assert len(answer.err) < 2000
    for part in said:
        assert part in answer.err


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("micro_batch = 16", "micro_batchs = 16", ["unknown key 'micro_batchs'", "Did you mean 'micro_batch'?"]),
        ('name = "study"', 'name = "study"\nnmae = 1', ["unknown key 'nmae'", "Did you mean 'name'?"]),
        ("[scaling]", "[scalling]", ["unknown key 'scalling'", "Did you mean 'scaling'?"]),
        ("micro_batch = 16", 'micro_batch = "many"', ["train.micro_batch is 'many'", "whole number"]),
        ("micro_batch = 16", "micro_batch = 0", ["train.micro_batch is 0", "at least 1"]),
        ("gpus = [1]", "gpus = 1", ["scaling.gpus is 1"]),
        ("gpus = [1]", "gpus = []", ["scaling.gpus"]),
        ('name = "study"', f'name = "{"a" * 200_000}"', ["(200,000 characters)"]),
        ('name = "vit-ti16"', 'name = "vit-b61"', ["unknown model 'vit-b61'", "vit-b16"]),
        ('name = "digits"', 'name = "cifar1000"', ["unknown dataset 'cifar1000'", "Did you mean 'cifar100'?"]),
        ("micro_batch = 16", 'micro_batch = 16\nengine = "dpp"', ["unknown engine 'dpp'", "Did you mean 'ddp'?"]),
        ("[measure]", '[launch]\nlauncher = "torchrnu"\n[measure]', ["unknown launcher", "Did you mean 'torchrun'?"]),
        ("image_size = 32", "image_size = 33", ["33", "16", "32"]),
        ("epochs = 2", "", ["train.epochs or measure.steps"]),
        ("micro_batch = 16", "", ["train.micro_batch is missing"]),
        ("gpus = [1]", "gpus = [1, 4096]", ["4096 ranks need 4096 cores", "oversubscribe"]),
        (
            "gpus = [1]",
            'gpus = [1, 3]\nmode = "strong-global"\n[launch]\noversubscribe = true',
            ["a global batch of 16 does not divide over 3 ranks", "train.global_batch = 15", "train.global_batch = 18"],
        ),
        ("repeats = 1", 'repeats = 1\n[sweep]\n"train.engin" = ["ddp"]', ["Did you mean 'train.engine'?"]),
        ('name = "vit-ti16"', 'name = "\\u001b[31mred"', ["unknown model '\\x1b[31mred'"]),
        ("repeats = 1", "max_repeats = 5", ["measure.max_repeats = 5 has no meaning without measure.target_ci"]),
        ("repeats = 1", "target_ci = 0.02\nmax_repeats = 2", ["measure.max_repeats = 2 is too few", "at least 6"]),
        (
            "repeats = 1",
            "target_ci = 0.02\nrepeats = 7\nmax_repeats = 6",
            ["measure.max_repeats = 6 is below measure.repeats = 7", "Set max_repeats to more than 7"],
        ),
        (
            "repeats = 1",
            "target_ci = 0.02\nrepeats = 12",
            ["measure.max_repeats = 10 (its default) is below measure.repeats = 12"],
        ),
        ("repeats = 1", "target_ci = 0.0", ["measure.target_ci is 0.0", "greater than 0"]),
        ("repeats = 1", "target_ci = 2.0", ["measure.target_ci is 2.0", "less than 1"]),
        ("repeats = 1", "target_ci = 0.1\nmax_repeats = 0", ["measure.max_repeats is 0", "at least 1"]),
        (
            "repeats = 1",
            f'target_ci = 0.1\nmax_repeats = 1000\n[sweep]\n"train.seed" = {list(range(21))}',
            ["make 21,000 runs"],
        ),
    ],
)  # fmt: skip
def test_a_wrong_study(run: Callable[..., Answer], old: str, new: str, said: list[str]) -> None:
    assert old in GOOD
    refused(run(GOOD.replace(old, new, 1)), *said)


def test_the_study_these_are_made_from_is_accepted(tmp_path: Path) -> None:
    from vitscale import runner

    (tmp_path / "study.toml").write_text(GOOD)
    assert len(runner.plan(tmp_path / "study.toml").tasks) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"name = study", "is not TOML"),
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (bytes(range(256)) * 10, "is not text"),
        (b"a = 1\n" * 400_000, "larger than 1 MiB"),
        (b"a = " + b"[" * 50_000, "nested too deeply"),
    ],
)
def test_a_file_that_is_no_study(run: Callable[..., Answer], content: bytes, said: str) -> None:
    refused(run(content), said)


def test_no_file_at_all(run: Callable[..., Answer]) -> None:
    refused(run(None), "cannot be read: No such file")


# --- datasets --------------------------------------------------------------------------------------------------------


def cifar_study(root: Path, more: str = "verify = false") -> str:
    return GOOD.replace('name = "digits"', f'name = "cifar10"\nroot = "{root}"\n{more}')


def test_a_missing_dataset(run: Callable[..., Answer], tmp_path: Path) -> None:
    refused(run(cifar_study(tmp_path / "nowhere")), "nowhere")


def test_a_truncated_dataset(run: Callable[..., Answer], tmp_path: Path) -> None:
    folder = write_cifar10(tmp_path / "data", per_batch=4)
    truncate(folder / "data_batch_3", 0.5)
    refused(run(cifar_study(tmp_path / "data")), "data_batch_3")
    (folder / "data_batch_3").unlink()
    refused(run(cifar_study(tmp_path / "data")), "data_batch_3")


def test_a_corrupt_archive(run: Callable[..., Answer], tmp_path: Path) -> None:
    archive = pack(write_cifar10(tmp_path / "data", per_batch=4))
    truncate(archive, 0.5)
    refused(run(cifar_study(archive)), archive.name)


def test_an_archive_that_would_write_outside_its_folder(run: Callable[..., Answer], tmp_path: Path) -> None:
    archive = pack_escaping(write_cifar10(tmp_path / "data", per_batch=4), member("../../escaped", b"out"))
    refused(run(cifar_study(archive)), archive.name, "escaped")


def test_an_image_damaged_inside_leaves_no_results_folder(run: Callable[..., Answer], tmp_path: Path) -> None:
    from PIL import Image

    for label in ("cat", "dog"):
        for number in range(5):
            (tmp_path / "data" / label).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (64, 64), (number * 40, 90, 10)).save(tmp_path / "data" / label / f"{number}.png")
    broken = tmp_path / "data" / "dog" / "3.png"
    content = bytearray(broken.read_bytes())
    content[60:80] = bytes(20)
    broken.write_bytes(content)
    own = f'name = "folder"\nsource_size = 64\nroot = "{tmp_path / "data"}"'
    study = GOOD.replace('name = "digits"', own)
    study = study.replace("repeats = 1", "repeats = 1\nwarmup_steps = 0")
    refused(run(study, results="deep/down/results"), "3.png")


def test_an_archive_with_another_md5(run: Callable[..., Answer], tmp_path: Path) -> None:
    archive = pack(write_cifar10(tmp_path / "data", per_batch=4))
    refused(run(cifar_study(archive, more="")), "MD5", "c58f30108f718f92721af3b95e74349a")


def test_a_malicious_pickle_is_refused_and_not_executed(run: Callable[..., Answer], tmp_path: Path) -> None:
    trace = tmp_path / "executed"
    payloads = malicious_pickles(trace)
    assert payloads
    folder = write_cifar10(tmp_path / "data", per_batch=4)
    for payload in payloads.values():
        (folder / "data_batch_2").write_bytes(payload)
        refused(run(cifar_study(tmp_path / "data")), "data_batch_2")
        assert not trace.exists()


# --- results folders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["/proc/vitscale", "study.toml/results", "/dev/null/results"])
def test_an_unwritable_folder(run: Callable[..., Answer], where: str) -> None:
    refused(run(GOOD, results=where), "results")


def test_a_folder_that_holds_something_else(run: Callable[..., Answer], tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "thesis.tex").write_text("years of work")
    refused(run(GOOD), "thesis.tex", "-o")


def test_a_broken_results_folder(run: Callable[..., Answer], tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "study.json").write_text("{")
    refused(run(GOOD), "study.json cannot be read")


@pytest.mark.parametrize("folder", ["nothing-here", "empty"])
def test_report_on_no_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(sys, "argv", ["vitscale", "report", str(tmp_path / folder)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert "holds no results of vitscale" in captured.err
    assert tree(tmp_path) == {}


def test_report_in_an_unknown_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["vitscale", "report", str(tmp_path), "--format", "jpeg"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "unknown format 'jpeg'. Valid: csv, html" in capsys.readouterr().err
