"""The verbs of the first hour, called in this process."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from driving import vitscale
from vitscale import cli, store
from vitscale.api import running
from vitscale.cli import studies
from vitscale.runner import Plan
from vitscale.study.file import StudyFile

Call = Callable[..., tuple[int, str, str]]
EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """`vitscale ARGUMENTS` in a folder of its own: its exit code, and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vitscale", *map(str, arguments)])
        code: object = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        assert isinstance(code, int)
        return code, said.out, said.err

    return run


def test_a_schema_is_printed_or_written_once(call: Call, tmp_path: Path) -> None:
    _, printed, _ = call("schema")
    assert json.loads(printed)["title"] == "A study of vitscale"
    assert call("schema", "-o", "s.json")[:2] == (0, "s.json: begin the study with the line #:schema s.json\n")
    assert (tmp_path / "s.json").read_text() == printed
    assert call("schema", "-o", "s.json")[2] == "vitscale: 's.json' is there already. Name another file with -o.\n"
    assert call("schema", "-o", "new/sub/s.json")[0] == 0
    assert (tmp_path / "new/sub/s.json").read_text() == printed
    assert call("schema", "-o", "s.json/t.json")[2].startswith("vitscale: 's.json/t.json' cannot be written: ")
    assert call("schema", "-o", "-")[2] == "vitscale: -o - names no file. Name one with -o, or leave -o out.\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_a_script_that_it_reads(call: Call, shell: str) -> None:
    code, script, _ = call("completion", shell)
    assert code == 0
    assert "_VITSCALE_COMPLETE" in script
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=script, text=True, check=True)


def test_another_shell_is_refused(call: Call) -> None:
    assert call("completion", "bsh")[::2] == (
        2,
        "vitscale: unknown shell 'bsh'. Did you mean 'bash'? Valid: bash, fish, zsh.\n",
    )


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("vitscale pr", "predict"),
        ("vitscale run --retr", "--retry-failed"),
        ("vitscale lab u", "up"),
        ("vitscale train train.learning_rate_w", "train.learning_rate_warmup_steps="),
        ("vitscale train sweep.launch.l", "sweep.launch.launcher="),
    ],
)
def test_what_a_shell_asks_is_answered(call: Call, monkeypatch: pytest.MonkeyPatch, typed: str, completed: str) -> None:
    monkeypatch.setenv("_VITSCALE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    code, said, _ = call()
    assert (code, said.split()) == (0, completed.split())


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--lr", "Write train.learning_rate=VALUE."),
        ("--batch-size=16", "Write train.micro_batch=VALUE."),
        ("--micro-batch", "Write train.micro_batch=VALUE."),
        ("--AMP", 'Write train.precision="bf16".'),
        ("--steps", "Write measure.steps=VALUE."),
    ],
)
def test_an_option_that_is_a_key_of_a_study_is_told_as_that(call: Call, option: str, meant: str) -> None:
    code, said, error = call("train", option, "0.1")
    assert (code, said) == (2, "")
    name = option.partition("=")[0]
    assert error == f"vitscale: no such option: '{name}'; what a study says is given as KEY=VALUE. {meant}\n"


def test_an_option_that_is_nothing_stays_what_it_is(call: Call) -> None:
    for verb in (["train"], ["report", "results"]):
        code, said, error = call(*verb, "--nonsense" if verb == ["train"] else "--lr")
        assert (code, said) == (2, "")
        assert "No such option: --" in error


def test_a_first_study_is_planned_with_its_schema_beside_it(call: Call, tmp_path: Path) -> None:
    code, said, error = call("init", "--gpus", "1", "--data", "digits", "--model", "vit-ti16")
    assert (code, error) == (0, "")
    assert said.startswith("Found this machine: ")
    assert "Wrote study.toml: 3 runs. Next: vitscale plan study.toml, then vitscale run study.toml\n" in said
    assert (tmp_path / "study.toml").read_text().startswith("#:schema study.schema.json\n")
    assert json.loads((tmp_path / "study.schema.json").read_text())["title"] == "A study of vitscale"
    code, said, _ = call("plan", "study.toml", "--json", "train.micro_batch=4")
    assert (code, json.loads(said)["study"], json.loads(said)["trials"][0]["global_batch"]) == (0, "study", 4)
    # Neither is ever written over.
    before = (tmp_path / "study.toml").read_text()
    assert call("init")[::2] == (2, "vitscale: 'study.toml' is there already. Name another file with -o.\n")
    (tmp_path / "study.schema.json").write_text("mine")
    assert call("init", "-o", "other.toml", "--gpus", "1")[0] == 0
    assert ((tmp_path / "study.toml").read_text(), (tmp_path / "study.schema.json").read_text()) == (before, "mine")


@pytest.mark.parametrize("arguments", [(), ("--hostfile", "hosts")])
def test_a_study_in_another_folder_finds_the_hostfile_of_this_one(
    call: Call, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    (tmp_path / "studies").mkdir()
    for output, written in (("studies/study.toml", str(tmp_path / "hosts")), ("study.toml", "hosts")):
        code, said, error = call("init", "-o", output, *arguments)
        assert (code, error) == (0, "")
        assert said.startswith("Found the 1 host of hosts; ")
        assert tomllib.loads((tmp_path / output).read_text())["launch"]["hostfile"] == written
        assert call("plan", output)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--engine", "fsdp"], 'Write engine = "fsdp2"'),
        (["--data", "imagenet"], 'Write name = "folder" with root'),
        (["--model", "vit_base_patch16_224"], 'Write name = "timm/vit_base_patch16_224" or "vit-b16"'),
        (["--gpus", "none"], "--gpus: 'none' is no rank count"),
        (["-o", "-"], "-o - names no file"),
        (["--root", "."], "--root is given, and images of digits are in no folder. Add --data folder."),
        (["--root", ".", "--data", "synthetic"], "images of synthetic are in no folder"),
    ],
)
def test_what_cannot_be_planned_is_not_written(call: Call, tmp_path: Path, arguments: list[str], said: str) -> None:
    code, _, error = call("init", "--gpus", "1", *arguments)
    assert code == 2
    assert said in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["init", "train"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "{}/pics"], "--data is the name of a dataset, and '{}/pics' is a path. "
                                "Write --data folder --root {}/pics."),
        (["--data", "./pics"], "'./pics' is a path. Write --data folder --root ./pics."),
        (["--data", "pics"], "'pics' is a path. Write --data folder --root pics."),
        (["--data", "/nowhere/pics"], "Write --data NAME --root /nowhere/pics, once the path exists."),
        (["--data", "folder"], "--data folder is given, and not where its files lie. Add --root: --data folder"),
        (["--data", "cifar10"], "--data cifar10 is given, and not where its files lie. Add --root"),
    ],
)  # fmt: skip
def test_a_path_of_images_leads_to_the_two_options(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, arguments: list[str], said: str
) -> None:
    """No default that nobody gave is blamed, and nothing is written."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "pics").mkdir()
    code, _, error = call(verb, "--gpus", "1", *(word.format(tmp_path) for word in arguments))
    assert code == 2
    assert said.format(tmp_path, tmp_path) in error
    assert "~/data" not in error
    assert "hf =" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["pics"]


def test_what_is_written_for_a_path_of_images_works(call: Call, tmp_path: Path) -> None:
    for part, label in (("train", "cat"), ("train", "dog"), ("val", "cat"), ("val", "dog")):
        folder = tmp_path / "my pics" / part / label
        folder.mkdir(parents=True)
        for number in range(20):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
    code, _, error = call("init", "--gpus", "1", "--data", "my pics")
    assert code == 2
    (words,) = re.findall(r"Write (--data .*)\.\n", error)
    assert call("init", "--gpus", "1", *shlex.split(words))[0] == 0


@pytest.mark.parametrize(
    ("output", "name"),
    [("sub/new/study.toml", "study"), ("my study.toml", "my-study"), (".é!.toml", "study"), ("_a+b.c.toml", "a-b.c")],
)
def test_a_study_goes_where_it_is_named(call: Call, tmp_path: Path, output: str, name: str) -> None:
    code, _, error = call("init", "--gpus", "1", "-o", output)
    assert (code, error) == (0, "")
    assert tomllib.loads((tmp_path / output).read_text())["name"] == name


def test_a_folder_of_images_is_named_as_seen_from_the_study(call: Call, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for part, label in (("train", "cat"), ("train", "dog"), ("val", "cat"), ("val", "dog")):
        folder = tmp_path / "imgs" / part / label
        folder.mkdir(parents=True)
        for number in range(20):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
    for output, asked, written in (
        ("study.toml", "imgs", "imgs"),
        ("new/study.toml", "imgs", str(tmp_path / "imgs")),
        (elsewhere / "study.toml", "./imgs", "../imgs"),
        ("abs/study.toml", str(tmp_path / "imgs"), str(tmp_path / "imgs")),
    ):
        code, _, error = call("init", "--gpus", "1", "--data", "folder", "--root", asked, "-o", output)
        assert (code, error) == (0, "")
        assert tomllib.loads((tmp_path / output).read_text())["data"]["root"] == written


def test_a_number_of_ranks_is_one_or_more(call: Call) -> None:
    assert call("train", "--gpus", "0") == (2, "", "vitscale: --gpus is 0. Valid: 1 or more.\n")


def test_a_length_of_the_command_line_is_the_length(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Plan] = []
    monkeypatch.setattr(running, "carry_out", lambda plan, *_, **__: done.append(plan))
    monkeypatch.setattr(studies, "show_runs", lambda *_, **__: None)
    assert call("train", "--gpus", "1", "train.epochs=2")[::2] == (0, "")
    (trial,) = done[0].record.trials.values()
    assert (trial.train.epochs, trial.window.steps) == (2, None)


def test_a_quick_check_is_no_training(call: Call) -> None:
    said = "vitscale: --training brings runs of its own, and --quick is of the other check. Leave one of them out.\n"
    assert call("check", "--training", "--quick") == (2, "", said)


def test_on_a_terminal_it_asks_for_what_was_not_given(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = io.StringIO("vit-s16\n\n1\n")
    monkeypatch.setattr(answers, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", answers)
    code, said, _ = call("init", "--engine", "none")
    assert code == 0
    assert "Model [vit-ti16]: " in said
    study = tomllib.loads((tmp_path / "study.toml").read_text())
    assert (study["model"]["name"], study["data"]["name"], study["train"]["engine"], study["scaling"]["gpus"]) == (
        *("vit-s16", "digits"), *("none", [1]),
    )  # fmt: skip


def test_train_makes_one_trial_of_what_is_asked(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the running, which `run` does of any plan."""
    done: list[tuple[Plan, Path]] = []
    monkeypatch.setattr(running, "carry_out", lambda plan, results, *_, **__: done.append((plan, results)))
    monkeypatch.setattr(studies, "show_runs", lambda *_, **__: None)
    tiny = ("train", "--gpus", "1", "model.layers=1")
    for arguments in (tiny, tiny, (*tiny, "train.micro_batch=4")):
        assert call(*arguments)[0] == 0
    (first, at), (_, again), (other, elsewhere) = done
    (trial,) = first.record.trials.values()
    assert (trial.model.layers, trial.world.size, len(first.tasks)) == (1, 1, 1)
    assert first.record.overrides == ("model.layers=1",)
    assert at == again == Path("results") / first.record.name
    assert elsewhere != at
    assert [t.train.micro_batch for t in other.record.trials.values()] == [4]
    assert StudyFile.checked(Path("s.toml"), first.record.text).study.name == first.record.name


def test_train_does_one_run(call: Call) -> None:
    code, _, error = call("train", "--gpus", "1", "measure.repeats=2")
    assert (code, error) == (
        2,
        "vitscale: train does one run, and this makes 2. Write a study of them: vitscale init, then vitscale run.\n",
    )


@pytest.mark.ranks
def test_what_train_leaves_is_a_study_of_one_trial(tmp_path: Path) -> None:
    small = ("model.layers=1", "measure.steps=2", "measure.warmup_steps=1", "measure.explain=false", "train.device=cpu")
    answer = vitscale("train", "--gpus", "1", *small, "measure.evaluate=false", "-o", "one", "--json", cwd=tmp_path)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert '"vitscale": "train"' in answer.stdout
    (run,) = store.load(tmp_path / "one").runs
    assert run.outcome.kind == "completed"
    assert [step.warmup for step in run.ranks[0].steps] == [True, False, False]
    answer = vitscale("report", "one", cwd=tmp_path)
    assert "1 of 1 trial completed, 1 run, strong-micro" in answer.stdout, answer.stdout + answer.stderr


# --- a study for another machine ------------------------------------------------------------------------------------

ELSEWHERE = ("node.cores=4096", "node.gpus=8", "scaling.gpus=[1, 8]", "train.device=cuda")


def test_a_laptop_plans_for_a_node_of_gpus_and_runs_nothing_for_it(call: Call, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text((EXAMPLES / "quickstart.toml").read_text())
    code, said, _ = call("plan", "study.toml", *ELSEWHERE, "--gpu-memory", "80GB", "--json")
    assert code == 0
    trials = [trial["resolved"] for trial in json.loads(said)["trials"]]
    assert {(trial["train"]["device"], trial["world"]["nodes"]) for trial in trials} == {("cuda", 1)}
    assert {trial["world"]["ranks_per_node"] for trial in trials} == {1, 8}

    assert call("check", "study.toml", *ELSEWHERE)[0] == 2
    code, _, told = call("run", "study.toml", *ELSEWHERE, "-o", "results")
    assert code == 2
    assert "[node] describes 4,096 cores and 8 GPUs, and this machine offers" in told
    assert "Run it on that machine, or name it in launch.hostfile." in told
    assert not (tmp_path / "results").exists()


def test_who_plans_for_more_than_there_is_is_told_how(call: Call, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text((EXAMPLES / "quickstart.toml").read_text())
    code, _, told = call("plan", "study.toml", "scaling.gpus=[1, 100000]")
    assert code == 2
    assert "To plan for another machine describe it: node.cores=64 node.gpus=8." in told


def test_a_check_of_this_machine_says_nothing_of_another(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "study.toml").write_text((EXAMPLES / "quickstart.toml").read_text())
    seen: list[object] = []
    monkeypatch.setattr("vitscale.runner.expectation.latest", lambda *asked, **_: seen.append(asked))
    assert call("plan", "study.toml", *ELSEWHERE)[0] == 0
    assert seen == []
    assert call("plan", "study.toml")[0] == 0
    assert len(seen) == 1
