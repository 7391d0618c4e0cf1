"""No command in README or docs that does not run: each is executed here, made small, or says that it is not and why.

A block of commands that are not executed has `<!-- not executed: REASON -->` on the line before it; `<!-- not executed
(check, lab): REASON -->` leaves out these verbs or programs only. Their options are read all the same. A program that a
page names in its text has `<!-- not executed (benchmarks/x.py): REASON -->` there, or stands in `PROGRAMS`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import needs
from driving import TINY_MODEL
from forks import prepared_here
from importers.logs import epoch_rows, epoch_table
from like_paper_factory import paper_curve, paper_study
from prediction_factory import resolved_study
from results_factory import write_results
from vitscale import cli

pytestmark = [pytest.mark.computing, pytest.mark.long(11)]

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?:^<!-- not executed(?: \(([^)]*)\))?: ([^\n]+) -->\n)?^```(\w*)\n(.*?)^```", re.M | re.S)
COMMAND = re.compile(r"^\s*(?:\$ )?(?:sudo )?(?:\.venv/bin/)?((?:vitscale|python|make|salloc|mpirun)\s.*)$")
PROGRAM = re.compile(r"(?:benchmarks|tools)/\w+\.py")
LEFT_OUT = re.compile(r"<!-- not executed \(([^)]*)\): [^\n]+ -->")

STUDY = f"""
name = "documented"
{TINY_MODEL}
[data]
name = "digits"
[train]
precision = "fp32"
micro_batch = 8
epochs = 2
device = "cpu"
[scaling]
gpus = [1, 2]
[launch]
oversubscribe = true
"""
PROGRAMS: dict[str, list[str] | str] = {
    "benchmarks/gpu_types.py": "prediction/test_gpu_types.py",
    "benchmarks/light_window_cost.py": ["--pairs", "2", "--steps", "5"],
    "benchmarks/configurations.py": ["--times", "1", "--wanted", "500"],
    "benchmarks/start_up.py": ["--pairs", "1", "--steps", "8"],
    "benchmarks/decoders.py": ["--images", "16", "--side", "32", "--rounds", "1", "--processes", "1"],
    "benchmarks/model_families.py": ["--only", "resnet"],
    "benchmarks/target_ci.py": ["--studies", "2"],
    "benchmarks/slow_steps.py": ["--studies", "2"],
    "benchmarks/comparing.py": ["--studies", "2"],
    "benchmarks/calibration.py": "prediction/test_calibration.py",
    "benchmarks/noisy_studies.py": ["--studies", "1"],
    "benchmarks/simulator.py": "../benchmarks/calibration.py",
    "benchmarks/published_study.py": "prediction/test_published_study.py",
    "benchmarks/published_tables.py": "prediction/test_published_tables.py",
    "benchmarks/sampler.py": "prediction/test_sampling.py",
    "tools/make_deepspeed_keys.py": "deepspeed_lint/test_make_deepspeed_keys.py",
    "tools/make_published_facts.py": "published/test_facts.py",
    "benchmarks/memory.py": "prediction/memory/test_forecast_on_ranks.py",
}
"""Arguments with which a program is small, or the test that runs it so."""


LONG = ("benchmarks/light_window_cost.py", "benchmarks/start_up.py")
"""Of them those that train for long however small: by day only their options are read."""


@dataclass(frozen=True)
class Documented:
    page: Path
    line: str
    """As it is typed, without a prompt and without what is said of it."""
    left_out: bool

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.line}"


def documented() -> Iterator[Documented]:
    """Every command of every block."""
    for page in PAGES:
        for names, reason, language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
            for line in text.splitlines() if language in ("", "bash", "console", "sh") else ():
                command = COMMAND.match(line)
                if command is None or (language == "console" and not line.startswith("$ ")):
                    continue
                typed = without_what_is_said(command[1])
                left_out = bool(reason) and (not names or not {*typed.split()[:2]}.isdisjoint(names.split(", ")))
                yield Documented(page, typed, left_out)


def without_what_is_said(line: str) -> str:
    """A command's line up to its explanation, which stands two spaces and more away and is several plain words."""
    first, *others = re.split(r"\s{2,}", line.strip())
    kept = [first]
    for piece in others:
        words = piece.split()
        if words[0] == "#" or (len(words) > 1 and not words[0].startswith("-") and "." not in words[0]):
            break
        kept.append(piece)
    return " ".join(kept)


COMMANDS = {command.name: command for command in documented()}
VITSCALE = [name for name, command in COMMANDS.items() if command.line.startswith("vitscale ")]


def arguments_of(line: str) -> list[str]:
    """Of a command, with all that may be left out, without the file that its output goes to; a usage's capitals stand
    for something."""
    meant = {"LOG...": "LOG.csv", "F": "epochs", "VERSION": "0.19.8"}
    words = [word if "=" in word else re.sub(r"[\[\]]", "", word) for word in shlex.split(line.partition(" > ")[0])[1:]]
    return [meant.get(word, word) for word in words]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that documented commands name."""
    folder = tmp_path_factory.mktemp("documented")
    for name in ("STUDY.toml", "study.toml", "first.toml"):
        (folder / name).write_text(STUDY)
    (folder / "hosts").write_text("198.51.100.1 slots=1\n198.51.100.2 slots=1\n")  # for documentation (RFC 5737)
    for name, page, block in (
        ("mycluster.toml", "clusters/slurm.md", r"```toml\n# mycluster.toml\n(.*?)```"),
        ("kubernetes.toml", "clusters/kubernetes.md", r"```toml\n# kubernetes.toml\n(.*?)```"),
        ("cluster.toml", "clusters/slurm.md", r"```toml\n# mycluster.toml\n(.*?)```"),
        ("ds.json", "lint.md", r"```json\n(.*?)```"),
        ("DS.json", "lint.md", r"```json\n(.*?)```"),
    ):
        found = re.search(block, (ROOT / "docs" / page).read_text(encoding="utf-8"), re.S)
        assert found is not None, page
        (folder / name).write_text(found[1])
    rows = [row for gpus in (1, 2, 4) for row in epoch_rows(gpus, [[100.0 / gpus] * gpus] * 2)]
    for name in ("LOG.csv", "epochs.csv"):
        epoch_table(folder / name, rows)
    (folder / "README.md").write_text("# Speed\n\n| GPUs | Images/sec |\n|---|---|\n| 1 | 363 |\n| 8 | 2,855 |\n")
    measured = resolved_study({1: [0.1, 0.101], 2: [0.104, 0.105], 4: [0.108, 0.109]})
    for name in ("demo/results", "results/quickstart", "RESULTS"):
        write_results(measured, folder / name)
    t4 = ["import", str(folder / "LOG.csv"), "-o", str(folder / "results" / "t4"), "--model", "vit-b16"]
    imported = CliRunner().invoke(cli.app, [*t4, "--image-size", "224", "--engine", "deepspeed"])
    assert imported.exit_code == 0, imported.output
    (folder / "default_config.yaml").write_text("distributed_type: MULTI_CPU\nnum_machines: 1\nnum_processes: 2\n")
    (folder / "prices.csv").write_text("instance,gpu,count,price\nbig,A100-80GB,8,32.8\nsmall,T4,4,3.9\n")
    write_results(
        paper_study(paper_curve({1: [0.8], 2: [0.8]}), paper_curve({2: [0.88]}, spread=True)), folder / "PAPER"
    )
    (folder / "bin").mkdir()
    for name in ("mpirun", "ssh", "pdsh", "sbatch", "squeue", "sacct", "scancel", "srun"):
        (folder / "bin" / name).write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
        (folder / "bin" / name).chmod(0o755)
    return folder


@pytest.mark.parametrize("name", VITSCALE)
def test_a_command_of_vitscale_runs(
    name: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A study is not run but planned to its last command. What is left out must have options that are there."""
    arguments = arguments_of(COMMANDS[name].line)
    if COMMANDS[name].left_out:
        commands = get_command(cli.app)
        verb = commands.commands[arguments[0]]  # type: ignore[attr-defined]  # a group of commands
        if hasattr(verb, "commands") and arguments[1:] and arguments[1] in verb.commands:
            verb, arguments = verb.commands[arguments[1]], arguments[1:]
        known = {option for parameter in verb.params for option in (*parameter.opts, *parameter.secondary_opts)}
        given = arguments[1 : arguments.index("--")] if "--" in arguments else arguments[1:]
        assert {word for word in given if word.startswith("-")} <= known | {"--help"}
        return
    work = tmp_path / "work"
    shutil.copytree(place, work)
    if arguments == ["predict", "RESULTS"]:
        arguments += ["--gpus", "16,64"]
    arguments = [word if word != "ddp, strong-micro" else "ddp" for word in arguments]  # the only series there is
    if arguments[0] == "run":
        arguments += ["--dry-run", "-o", "NEW"]
    if arguments[0] == "import":
        arguments = [word if word != "RESULTS" else "IMPORTED" for word in arguments]
        arguments += ["--model", "vit-b16", "--image-size", "224", "--engine", "deepspeed"]
    if "--like" in arguments:
        arguments = [word if word != "RESULTS" else "PAPER" for word in arguments]
    monkeypatch.chdir(work)
    monkeypatch.setenv("PATH", f"{work / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("VITSCALE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # mpirun is told where it is root
    monkeypatch.setattr(sys, "argv", ["vitscale", *arguments])
    code: object = 0
    try:
        cli.main()
    except SystemExit as ended:
        code = ended.code or 0
    said = capsys.readouterr()
    # 1 is an answer of some verbs: a lint that finds an error, a wish that cannot be met.
    assert code in ((0, 1) if arguments[0] in ("lint", "advise") else (0,)), said.out + said.err
    assert said.out
    assert "Traceback" not in said.err


def test_blocks_have_commands_of_every_verb() -> None:
    """The reader of blocks reads: it has found what everybody types first, and cut off what is said of it."""
    lines = {command.line for command in COMMANDS.values()}
    assert {"make test", "vitscale plan STUDY.toml", "vitscale run first.toml -o results"} <= lines
    assert {line.split()[1] for line in lines if line.startswith("vitscale ")} == set(get_command(cli.app).commands)  # type: ignore[attr-defined]  # a group of commands


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.line.startswith("make ")])
def test_make_has_what_is_to_be_made(name: str) -> None:
    """Without making it."""
    needs.programs("make")
    argv = ["make", "--dry-run", *COMMANDS[name].line.split()[1:]]
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)


def named_programs() -> dict[str, set[str]]:
    """Every program of this repository that a page names, to the pages that do not leave it out."""
    found: dict[str, set[str]] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        left_out = {name for names in LEFT_OUT.findall(text) for name in names.split(", ")}
        for program in PROGRAM.findall(text):
            found.setdefault(program, set())
            if program not in left_out:
                found[program].add(str(page.relative_to(ROOT)))
    return found


@pytest.mark.parametrize("program", LONG)
def test_a_program_that_trains_for_long_has_the_options_it_is_run_with(program: str) -> None:
    request = {"kind": "script", "argv": [program, "--help"], "environment": dict(os.environ), "cwd": str(ROOT)}
    answer = prepared_here().run(request, 300)
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert {word for word in PROGRAMS[program] if word.startswith("--")} <= {*re.findall(r"--\w+", answer.stdout)}


@pytest.mark.parametrize(
    "program",
    [pytest.param(name, marks=[pytest.mark.nightly] if name in LONG else []) for name in sorted(named_programs())],
)
def test_a_named_program_is_executed_or_left_out_with_a_reason(program: str) -> None:
    assert (ROOT / program).exists(), f"{program} in {named_programs()[program]}"
    pages = named_programs()[program]
    how = PROGRAMS.get(program)
    assert how is not None or not pages, f"neither executed by a test nor marked as not executed: {program} in {pages}"
    if isinstance(how, str):
        assert Path(program).stem in (ROOT / "tests" / how).read_text(), f"{how} does not run {program}"
    elif how is not None:
        request = {"kind": "script", "argv": [program, *how], "environment": dict(os.environ), "cwd": str(ROOT)}
        answer = prepared_here().run(request, 300)
        # 1 says that a bar is not held, which is for quiet machines and larger runs to say.
        assert answer.returncode in (0, 1), answer.stderr[-2000:]
        assert "Traceback" not in answer.stderr
        assert answer.stdout


@pytest.mark.parametrize(
    "name", [name for name, command in COMMANDS.items() if command.line.split()[0] not in ("vitscale", "make")]
)
def test_any_other_command_is_left_out_or_a_program_of_ours(name: str) -> None:
    command = COMMANDS[name]
    assert command.left_out or any(program in PROGRAMS for program in PROGRAM.findall(command.line)), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_a_page_names_are_there(page: Path) -> None:
    """`tests/x/test_y.py::test_z`, and `::test_z` of the file that was named last."""
    file, missing = Path(), []
    for named, test in re.findall(r"(tests/[\w/]+\.py)?(?:::(test_\w+))?", page.read_text(encoding="utf-8")):
        file = ROOT / named if named else file
        if (named and not file.is_file()) or (test and f"def {test}(" not in file.read_text(encoding="utf-8")):
            missing.append(f"{file.relative_to(ROOT)}::{test}")
    assert missing == []
