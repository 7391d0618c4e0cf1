"""What a wheel and an sdist hold, and what they do beside the light install's dependencies alone, without torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from prediction_factory import resolved_study
from results_factory import write_results
from vitscale.base import program
from vitscale.base.distribution import write_wheel

pytestmark = pytest.mark.computing

ROOT = Path(__file__).parent.parent
STUDY = """
name = "light"
[model]
name = "vit-ti16"
image_size = 32
patch_size = 8
[data]
name = "digits"
[train]
device = "cpu"
epochs = 2
micro_batch = 8
[scaling]
gpus = [1, 2]
[sweep]
"train.engine" = {engines}
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel and an sdist of this tree, and a wheel of that sdist, each built by the project's own backend."""
    folder = tmp_path_factory.mktemp("packages")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "src"):
        (tree / name).symlink_to(ROOT / name)
    made = {
        "wheel": _build(tree, folder / "wheel", "build_wheel"),
        "sdist": _build(tree, folder / "sdist", "build_sdist"),
    }
    shutil.unpack_archive(made["sdist"], folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    return made | {"wheel of the sdist": _build(unpacked, folder / "again", "build_wheel")}


def _build(tree: Path, into: Path, what: str) -> Path:
    into.mkdir()
    program = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
    # The name of a folder for its notes: beside the tree, and not inside the sources.
    settings = {"egg_info": {"egg_base": str(into)}, "build": {"build_base": str(into / "build")}}
    config = into / "notes.cfg"
    config.write_text("".join(f"[{c}]\n" + "".join(f"{k}={v}\n" for k, v in s.items()) for c, s in settings.items()))
    environment = os.environ | {"DIST_EXTRA_CONFIG": str(config), "PYTHONDONTWRITEBYTECODE": "1"}
    backend = [sys.executable, "-c", program, what, str(into)]
    subprocess.run(backend, cwd=tree, env=environment, check=True, capture_output=True)
    (made,) = (path for path in into.iterdir() if path.name.endswith((".whl", ".tar.gz")))
    return made


def test_a_wheel_is_the_same_program_as_its_sources(packages: dict[str, Path], tmp_path: Path) -> None:
    for name in ("wheel", "wheel of the sdist"):
        shutil.unpack_archive(packages[name], tmp_path / name, format="zip")
        installed = tmp_path / name / "vitscale"
        assert program.installation_digest(installed, ("",)) == program.digest()
        assert program.installation_digest(installed, program.MEASURING) == program.measuring_digest()


@pytest.fixture(scope="module")
def light(packages: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[int, str, str]]:
    """The command line of the wheel, in a Python that sees its dependencies, theirs, and nothing else."""
    folder = tmp_path_factory.mktemp("light")
    site = folder / "site"
    site.mkdir()
    with zipfile.ZipFile(packages["wheel"]) as archive:
        archive.extractall(site)  # noqa: S202 - made above
        text = archive.read(next(name for name in archive.namelist() if name.endswith("METADATA"))).decode()
    needed = [line.removeprefix("Requires-Dist: ") for line in text.splitlines() if line.startswith("Requires-Dist: ")]
    for distribution in _with_dependencies(needed):
        for name in {Path(file).parts[0] for file in metadata.files(distribution) or ()} - {"..", "__pycache__"}:
            source = Path(str(metadata.distribution(distribution).locate_file(name)))
            if not (site / name).exists() and source.exists():
                (site / name).symlink_to(source)

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-S", "-m", "vitscale", *map(str, arguments)],
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(site), "COLUMNS": "80"},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    return call


def _with_dependencies(requirements: list[str]) -> set[str]:
    """Names of distributions: those required without an extra, and what they require, with the extras they name."""
    seen: set[tuple[str, str]] = set()
    waiting = [(Requirement(each), "") for each in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *requirement.extras):
            if (requirement.name, wanted) not in seen:
                seen.add((requirement.name, wanted))
                waiting += [(Requirement(each), wanted) for each in metadata.requires(requirement.name) or ()]
    return {name for name, _ in seen}


def test_all_three_packages_hold_every_file_of_the_sources(packages: dict[str, Path]) -> None:
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    files = {line.removeprefix("src/") for line in listed.splitlines() if (ROOT / line).exists()}
    if not files:
        pytest.skip("not a clone")
    for name in ("wheel", "wheel of the sdist"):
        with zipfile.ZipFile(packages[name]) as archive:
            held = {file for file in archive.namelist() if ".dist-info/" not in file}
        assert held >= files, f"{name} lacks {sorted(files - held)}"
    with tarfile.open(packages["sdist"]) as archive:
        names = {file.split("/", 1)[1] for file in archive.getnames() if "/" in file}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names


def test_torch_comes_with_the_extra_that_trains_alone(packages: dict[str, Path]) -> None:
    with zipfile.ZipFile(packages["wheel"]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        lines = archive.read(name).decode().splitlines()
    torch = [line for line in lines if re.match(r"Requires-Dist: torch\b", line)]
    assert [line.split(";")[1].strip() for line in torch] == ['extra == "train"']
    assert {"energy", "hf", "images", "megatron", "train"} <= {
        line.removeprefix("Provides-Extra: ") for line in lines if line.startswith("Provides-Extra: ")
    }


def test_the_quickstart_says_what_every_extra_brings() -> None:
    """Those of `make test` aside: a user needs none of them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "quickstart.md").read_text()
    table = page[page.index("| extra |") :].split("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall("`([a-z]+)`", row.split("|")[1])}
    assert named == project["optional-dependencies"].keys() - {"dev"}


def test_every_version_that_make_installs_runs_on_the_oldest_python() -> None:
    """Debian's is an early patch release of it, and pip refuses the whole set for one package."""
    oldest = metadata.metadata("vitscale")["Requires-Python"].removeprefix(">=") + ".0"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.split("==")[0]) for line in lines if "==" in line}
    wanted = {
        each.name: each.metadata["Requires-Python"] or ""
        for each in metadata.distributions()
        if canonicalize_name(each.name) in pinned
    }
    assert len(wanted) > 50
    assert not {name: text for name, text in wanted.items() if not SpecifierSet(text).contains(oldest)}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured") / "results"
    write_results(resolved_study({1: [0.1, 0.101], 2: [0.104, 0.105], 4: [0.108, 0.109]}), folder)
    return folder


def test_without_torch_it_plans_reads_predicts_and_advises(
    light: Callable[..., tuple[int, str, str]], results: Path, tmp_path: Path
) -> None:
    study = tmp_path / "study.toml"
    study.write_text(STUDY.format(engines=["ddp"]))
    code, said, error = light("plan", study)
    assert (code, error) == (0, ""), error
    assert "light: 2 trials, " in said
    for verb in ("init", "-o", tmp_path / "first.toml", "--gpus", "1"), ("schema",), ("completion", "bash"):
        code, said, error = light(*verb)
        assert (code, error) == (0, ""), f"{verb}: {error}"
    for asked in ("plan", study), ("report", results), ("predict", results, "--gpus", "8"), ("advise", results):
        code, said, error = light(*asked, "--json")
        assert (code, error) == (0, ""), f"{asked}: {error}"
        assert json.loads(said)["vitscale"] == asked[0]
    code, said, error = light("report", results, "-o", tmp_path / "page.html")
    assert code == 0, error
    assert "<svg" in (tmp_path / "page.html").read_text()
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}')
    assert light("lint", tmp_path / "ds.json")[0] in (0, 1)


@pytest.mark.parametrize(
    ("engines", "missing"), [(["ddp"], "torch, which is"), (["ddp", "deepspeed"], "torch and deepspeed, which are")]
)
def test_without_torch_a_run_says_which_extra_trains_and_writes_nothing(
    light: Callable[..., tuple[int, str, str]], tmp_path: Path, engines: list[str], missing: str
) -> None:
    study = tmp_path / "study.toml"
    study.write_text(STUDY.format(engines=engines))
    code, said, error = light("run", study, "-o", tmp_path / "results")
    assert (code, said) == (2, "")
    assert re.sub(r"\s+", " ", error).startswith(
        f"vitscale: ranks on this machine need {missing} not installed. Run pip install '/path/to/vitscale[train]'."
    )
    assert not (tmp_path / "results").exists()


def test_without_torch_a_check_says_which_extra_it_needs(light: Callable[..., tuple[int, str, str]]) -> None:
    code, _, error = light("check")
    assert code == 2
    assert "pip install '/path/to/vitscale[train]'" in re.sub(r"\s+", " ", error)


def test_containers_and_citation_name_what_there_is(packages: dict[str, Path]) -> None:
    """Extras that exist, files that a build needs, the version of the package."""
    with zipfile.ZipFile(packages["wheel"]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        lines = archive.read(name).decode().splitlines()
    extras = {line.removeprefix("Provides-Extra: ") for line in lines if line.startswith("Provides-Extra: ")}
    (version,) = (line.removeprefix("Version: ") for line in lines if line.startswith("Version: "))
    for recipe in ("containers/Dockerfile", "containers/vitscale.def"):
        text = (ROOT / recipe).read_text()
        (wanted,) = re.findall(r"/opt/vitscale\[([^]]+)\]", text)
        assert set(wanted.split(",")) <= extras
        assert all(part in text for part in ("pyproject.toml", "README.md", "LICENSE", "src /opt/vitscale/src"))
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert "bash .ci/run" in (ROOT / ".github/workflows/test.yml").read_text()


def test_a_written_wheel_is_what_the_backend_builds(packages: dict[str, Path], tmp_path: Path) -> None:
    """The same files, needs, extras and commands as setuptools' own wheel of this tree."""
    ours = write_wheel(tmp_path)
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    tracked = {line.removeprefix("src/") for line in listed.splitlines()}
    described: dict[Path, tuple[set[str], list[str], str]] = {}
    for wheel in (ours, packages["wheel"]):
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            (about,) = (name for name in names if name.endswith("METADATA"))
            (commands,) = (name for name in names if name.endswith("entry_points.txt"))
            fields = ("Name", "Version", "Requires-Python", "Requires-Dist", "Provides-Extra")
            lines = [
                _normal(line) for line in archive.read(about).decode().splitlines() if line.split(":")[0] in fields
            ]
            files = {name for name in names if name.startswith("vitscale/") and (not tracked or name in tracked)}
            described[wheel] = (files, sorted(lines), archive.read(commands).decode().strip())
    assert described[ours] == described[packages["wheel"]]


def _normal(line: str) -> str:
    """A line of METADATA, with a requirement's limits in one order."""
    name, _, value = line.partition(": ")
    return f"{name}: {Requirement(value)}" if name == "Requires-Dist" else line
