"""The running package as a wheel, and no command that installs from a name that is not ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from prediction_factory import resolved_study
from results_factory import write_results
from vitscale import __version__
from vitscale.base import distribution, program
from vitscale.base.distribution import WHEEL_NAME, install_command, write_wheel
from vitscale.cli import app
from vitscale.errors import RequestError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wheel(tmp_path_factory.mktemp("wheel"))


class Environment:
    """A fresh environment with the wheel in it; what the wheel needs is seen from here."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        venv.create(folder, symlinks=True)
        self.python = folder / "bin/python"
        self.site = next(folder.glob("lib/python*/site-packages"))
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--no-deps", "--no-index"]
        subprocess.run([*pip, wheel], check=True, capture_output=True)
        needed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        (self.site / "needed.pth").write_text("\n".join(needed) + "\n")

    def call(self, *command: str | Path) -> str:
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.site)}
        done = subprocess.run(
            command, env=environment, cwd=self.site.parent, capture_output=True, text=True, check=True
        )
        return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    return Environment(tmp_path_factory.mktemp("environment"), wheel)


def test_the_wheel_installs_and_runs(environment: Environment) -> None:
    assert environment.call(environment.python.parent / "vitscale", "--version") == f"vitscale {program.identity()}\n"
    module = environment.call(environment.python, "-c", "import vitscale; print(vitscale.__file__)")
    assert Path(module.strip()).is_relative_to(environment.site)


def test_an_installed_wheel_makes_the_same_wheel_again(environment: Environment, wheel: Path, tmp_path: Path) -> None:
    program = "import sys; from vitscale.base.distribution import write_wheel as w; from pathlib import Path; "
    environment.call(environment.python, "-c", program + "w(Path(sys.argv[1]))", tmp_path)
    files = {path: _files(path) for path in (wheel, tmp_path / WHEEL_NAME)}
    assert files[wheel] == files[tmp_path / WHEEL_NAME]


def _files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def test_an_installed_wheel_names_the_wheel_that_it_came_from(
    environment: Environment, wheel: Path, tmp_path: Path
) -> None:
    ask = "from vitscale.base.distribution import install_command; print(install_command('train'))"
    assert environment.call(environment.python, "-c", ask) == f"pip install '{wheel}[train]'\n"
    (note,) = environment.site.glob("vitscale-*.dist-info/direct_url.json")
    text = note.read_text()
    try:
        for unknown in ('{"url": "file:///no/such/folder"}', "[]", "{", '{"url": "https://example.org/x.whl"}'):
            note.write_text(unknown)
            assert environment.call(environment.python, "-c", ask) == "pip install '/path/to/vitscale[train]'\n"
    finally:
        note.write_text(text)


def test_the_wheel_holds_what_its_record_says_and_the_same_twice(wheel: Path, tmp_path: Path) -> None:
    assert write_wheel(tmp_path).read_bytes() == wheel.read_bytes()
    assert write_wheel(tmp_path).read_bytes() == wheel.read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        (record,) = (name for name in archive.namelist() if name.endswith("/RECORD"))
        listed = [line.rsplit(",", 2) for line in archive.read(record).decode().splitlines()]
        assert [name for name, *_ in listed] == archive.namelist()
        for name, digest, size in listed[:-1]:
            assert digest.startswith("sha256=")
            assert int(size) == archive.getinfo(name).file_size
        assert f"vitscale-{__version__}.dist-info/licenses/LICENSE" in archive.namelist()
        assert not [name for name in archive.namelist() if "__pycache__" in name]


def test_another_wheel_of_that_name_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / WHEEL_NAME).write_bytes(b"of another vitscale")
    with pytest.raises(RequestError, match="is there already, and is of another vitscale"):
        write_wheel(tmp_path)
    assert (tmp_path / WHEEL_NAME).read_bytes() == b"of another vitscale"


def test_a_wheel_that_finds_no_room_leaves_nothing(tmp_path: Path) -> None:
    """Else the next call would take the half for the wheel of another vitscale."""
    program = (
        "import resource, sys; from pathlib import Path\n"
        "from vitscale.base.distribution import write_wheel\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "write_wheel(Path(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=False)
    assert "cannot be written: File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_said_to_be_unwritable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="cannot be written: File exists"):
        write_wheel(tmp_path / "file")


def test_a_package_that_was_never_installed_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(distribution, "_PACKAGE", tmp_path / "src/vitscale")
    assert install_command("train") == "pip install '/path/to/vitscale[train]'"
    with pytest.raises(RequestError, match="does not know what it needs"):
        write_wheel(tmp_path)


def test_in_a_clone_the_clone_is_installed() -> None:
    assert install_command("images") == f"pip install -e '{ROOT}[images]'"


@pytest.mark.parametrize("kind", ["skypilot", "jobset"])
def test_a_job_comes_with_the_wheel_that_it_installs(tmp_path: Path, kind: str, wheel: Path) -> None:
    results, job = tmp_path / "results", tmp_path / "jobs/job.yaml"
    write_results(resolved_study({1: [0.1, 0.101], 2: [0.104, 0.105], 4: [0.108, 0.109]}), results)
    answer = CliRunner().invoke(app, ["advise", str(results), "-o", str(job), "--format", kind])
    assert answer.exit_code == 0, answer.output
    assert (job.parent / WHEEL_NAME).read_bytes() == wheel.read_bytes()
    if kind == "jobset":
        assert f"an image with {WHEEL_NAME}[train]" in job.read_text().splitlines()[0]
        return
    task = yaml.safe_load(job.read_text())
    assert task["file_mounts"] == {f"~/{WHEEL_NAME}": str(job.parent / WHEEL_NAME)}
    # As the shell of the task's host sees it: one argument, below the home folder.
    (line,) = task["setup"].splitlines()
    shown = subprocess.run(
        ["bash", "-c", f'pip() {{ printf "%s\\n" "$@"; }}; {line}'],
        env={"HOME": "/home/x"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout.splitlines() == ["install", f"/home/x/{WHEEL_NAME}[train]"]


BARE_NAME = re.compile(
    r"""(?:pip3?|uv|conda|pipx) (?:pip )?(?:install|add|download|run)\b[^\n`|]*[ '"]vitscale(?:\[|['"\s`=<>,;.]|$)"""
)


def test_nothing_tells_anybody_to_install_by_name() -> None:
    """The name is nobody's on the package index yet: whoever registers it would run code on users' machines."""
    suffixes = ("*.py", "*.md", "*.toml", "*.yaml", "*.yml", "*.def", "*.sh", "Dockerfile", "*.json", "*.css", "*.js")
    folders = [ROOT / name for name in ("src", "docs", "containers", "examples", "benchmarks", "tools")]
    files = [file for folder in folders for suffix in suffixes for file in folder.rglob(suffix)]
    files += [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]
    texts = {file: file.read_text(errors="replace") for file in files if file.is_file()}
    assert len(texts) > 200
    found = [(str(file.relative_to(ROOT)), m[0]) for file, text in texts.items() for m in BARE_NAME.finditer(text)]
    assert found == []


@pytest.mark.parametrize(
    ("text", "is_bare"),
    [
        ("pip install 'vitscale[train]'", True),
        ("pip install vitscale", True),
        ("pip install vitscale[energy]", True),
        ("uv pip install --quiet vitscale==0.1", True),
        ("pip install '/path/to/vitscale[train]'", False),
        ("pip install -e '.[images]'", False),
        ("pip install ~/'vitscale-0.1.0-py3-none-any.whl[train]'", False),
    ],
)
def test_a_bare_name_is_told_from_a_path(text: str, is_bare: bool) -> None:
    assert (BARE_NAME.search(text) is not None) == is_bare
