"""The README tells of what is there: every file in its tree, every command in its list, every link."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel
from typer.main import get_command

from vitscale.cli import app
from vitscale.study import Study

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_tree_has_one_line_per_file() -> None:
    named = []
    folder = ""
    for line in README.partition("src/vitscale/\n")[2].partition("```")[0].splitlines():
        indent, name = len(line) - len(line.lstrip()), line.split()[0]
        if name.endswith("/"):
            folder = name
        else:
            named.append(name if indent == 2 else folder + name)
    present = {
        str(path.relative_to(ROOT / "src/vitscale"))
        for path in (ROOT / "src/vitscale").rglob("*")
        if path.is_file() and path.name not in ("__init__.py", "py.typed") and "__pycache__" not in path.parts
    }
    assert set(named) == present
    assert len(named) == len(present)


def test_every_command_is_listed() -> None:
    listed = set(re.findall(r"^vitscale (\w+)", README, flags=re.MULTILINE))
    assert listed == set(get_command(app).commands)  # type: ignore[attr-defined]


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
    assert {"model", "data", "train", "scaling", "launch", "slurm", "measure"} == set(models)
    for section, model in models.items():
        assert f"[{section}]" in page
        for key in model.model_fields:
            assert re.search(rf"\b{key}\b", page), f"{section}.{key}"
