"""Verbs that read and compute run on a Mac: tried on Linux, with all taken away that a Mac has not (`tests/mac`)."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prediction_factory import resolved_study
from results_factory import write_results
from vitscale import store
from vitscale.base import files, forks, processors
from vitscale.store import packs
from vitscale.store.bundles import write_bundle

ROOT = Path(__file__).parents[1]
MAC = Path(__file__).parent / "mac"
STUDY = """
name = "of-a-laptop"
[model]
name = "vit-ti16"
image_size = 32
patch_size = 8
[data]
name = "synthetic"
samples = 640
[train]
epochs = 2
micro_batch = 8
[scaling]
gpus = [1, 2]
"""


def on_a_mac(*arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PYTHONPATH": os.pathsep.join([str(MAC), str(ROOT / "src")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "COLUMNS": "100",
    }
    command = [sys.executable, "-m", "vitscale", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A laptop's folder: a study, a DeepSpeed file, two folders of results, and a table of another tool."""
    folder = tmp_path_factory.mktemp("laptop")
    write_results(resolved_study({1: [0.1, 0.101], 2: [0.104, 0.105], 4: [0.108, 0.109]}), folder / "results")
    write_results(resolved_study({1: [0.11, 0.111], 2: [0.114, 0.115], 4: [0.118, 0.119]}), folder / "older")
    (folder / "study.toml").write_text(STUDY)
    (folder / "ds.json").write_text('{"train_batch_size": 8, # Hjson\n}')
    (folder / "log.csv").write_text("gpus,images_per_second\n1,100\n2,190\n4,350\n")
    return folder


def test_it_is_like_a_mac(folder: Path) -> None:
    program = (
        "import os, sys, pathlib, resource; print(sys.platform, hasattr(os, 'sched_getaffinity'), "
        "pathlib.Path('/proc/self/status').exists(), os.path.exists('/sys'), hasattr(os, 'posix_fallocate'))"
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(MAC)}
    told = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["darwin", "False", "False", "False", "False"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "results", "-o", "page.html"],
        ["report", "results", "--format", "md", "-o", "page.md"],
        ["report", "results", "--json"],
        ["plan", "study.toml", "--json"],
        ["plan", "study.toml", "--gpu-memory", "16GB"],
        ["predict", "results", "--gpus", "8", "--json"],
        ["advise", "results", "-o", "job.yaml", "--format", "skypilot"],
        ["lint", "ds.json", "--json"],
        ["import", "log.csv", "-o", "imported", "--micro-batch", "32"],
        ["compare", "older", "results", "--json"],
    ],
    ids=" ".join,
)
def test_a_verb_runs(folder: Path, arguments: list[str]) -> None:
    done = on_a_mac(*arguments, folder=folder)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    if "--json" in arguments:
        assert json.loads(done.stdout)["vitscale"] == arguments[0]
    if "page.html" in arguments:
        assert "<svg" in (folder / "page.html").read_text()
    if arguments[0] == "import":
        again = on_a_mac("report", "imported", "--json", folder=folder)
        assert again.returncode == 0, again.stderr


def test_packs_of_strangers_are_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own decodes them first, whose memory a Mac does not bound."""
    shutil.copytree(folder / "older", tmp_path / "packed")
    monkeypatch.setattr(store.reading, "PACK_RUNS", 2)
    store.pack_finished(tmp_path / "packed")
    assert packs.pack_files(tmp_path / "packed")
    write_bundle(tmp_path / "packed", tmp_path / "bundle.tar.gz", redact=False)
    done = on_a_mac("report", "bundle.tar.gz", "--json", folder=tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert len(json.loads(done.stdout)["trials"]) == 3


def test_without_a_mask_all_cores_are_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processors.usable_cores() == frozenset(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert processors.usable_cores() == {0, 1, 2}
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert processors.usable_cores() == {0}


def test_a_mac_forks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    assert forks.spread(str, range(100), fewest=1) == [str(number) for number in range(100)]


@pytest.mark.parametrize("size", [0, 1, 2**20 + 5])
def test_room_is_reserved_without_a_call_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    path = tmp_path / "reserve"
    path.write_bytes(b"abc"[:size])
    with path.open("r+b") as file:
        files.allocate(file, size)
    assert path.stat().st_size == size
    assert path.read_bytes() == b"abc"[:size] + bytes(max(0, size - 3))


ONLY_WHERE_RANKS_RUN = ("lab", "worker", "engines", "models", "datasets", "probes", "processes", "runner/watch.py")
"""Rooms that are for hosts that train, which are Linux."""


def names_that_only_linux_has() -> Iterator[tuple[str, str]]:
    """(module, name) of `ONLY_ON_LINUX` in tests/mac, which is read and not imported: it would take them away."""
    tree = ast.parse((MAC / "sitecustomize.py").read_text())
    table = next(node.value for node in ast.walk(tree) if isinstance(node, ast.AnnAssign))
    assert isinstance(table, ast.Dict)
    for module, names in zip(table.keys, table.values, strict=True):
        assert isinstance(module, ast.Name)
        for node in ast.walk(names):
            if isinstance(node, ast.Constant):
                yield module.id, str(node.value)


def test_what_only_linux_has_is_asked_for_first() -> None:
    """Outside the rooms for hosts that train, each use stands in a function that asks `hasattr` for it."""
    only = {f"{module}.{name}" for module, name in names_that_only_linux_has()}
    assert "os.sched_getaffinity" in only
    wrong = []
    for path in sorted((ROOT / "src/vitscale").rglob("*.py")):
        inside = path.relative_to(ROOT / "src/vitscale").as_posix()
        if inside.startswith(ONLY_WHERE_RANKS_RUN):
            continue
        tree = ast.parse(path.read_text())
        functions: list[ast.AST] = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.Attribute)):
            if ast.unparse(node) not in only:
                continue
            around = [function for function in functions if node in set(ast.walk(function))]
            asked = f"hasattr({ast.unparse(node.value)}, "
            if not any(asked in ast.unparse(function) for function in around):
                wrong.append(f"{inside}:{node.lineno} {ast.unparse(node)}")
    assert wrong == []
