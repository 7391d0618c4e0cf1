"""The README tells of what is there: every file in its tree, every command in its list, every link."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel
from typer.main import get_command

from vitscale.cli import app
from vitscale.study.sections import Study

pytestmark = pytest.mark.computing

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_every_room_stands_in_the_tree_and_in_the_layout() -> None:
    tree = README.partition("src/vitscale/\n")[2].partition("```")[0]
    layout = (ROOT / "docs/layout.md").read_text()
    rooms = {path.parent.name for path in (ROOT / "src/vitscale").glob("*/__init__.py")}
    assert set(re.findall(r"(\w+)/", tree.partition("tests/")[0])) == rooms
    assert set(re.findall(r"^\| `(\w+)/`", layout, flags=re.MULTILINE)) == rooms
    assert len(README.partition("## The tree")[2].splitlines()) < 20


def test_the_readme_is_short_and_says_where_gpus_stand() -> None:
    assert len(README.splitlines()) <= 150
    told = "on one NVIDIA H200 and one H100 ([what they showed](docs/benchmarks/README.md#on-one-gpu))"
    assert told in " ".join(README.split())
    assert "Several GPUs have not been tried" in README


def test_every_page_on_clusters_says_what_not_to_reinstall() -> None:
    for page in (ROOT / "docs/clusters").glob("*.md"):
        assert "Do not reinstall torch" in page.read_text(), page.name


def test_every_command_is_listed() -> None:
    listed = set(re.findall(r"^vitscale (\w+)", README, flags=re.MULTILINE))
    assert listed == set(get_command(app).commands)  # type: ignore[attr-defined]  # a group of commands


def test_links_and_pictures_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if not target.startswith("https://"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_key_of_a_study_is_in_its_page() -> None:
    page = (ROOT / "docs/study-file.md").read_text()
    sections = {name: field.annotation for name, field in Study.model_fields.items()}
    models = {name: kind for name, kind in sections.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}
    assert {"model", "data", "train", "parallel", "scaling", "launch", "slurm", "kubernetes", "measure"} == set(models)
    for section, model in models.items():
        assert f"[{section}]" in page
        for key in model.model_fields:
            assert re.search(rf"\b{key}\b", page), f"{section}.{key}"
