"""The docs as a site: every link leads somewhere, references hold what the code has, symptoms are what is said."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from typer.main import get_command

import vitscale
from vitscale import cli
from vitscale.study.sections import SECTIONS

pytestmark = pytest.mark.computing

ROOT = Path(__file__).parent.parent
MESSAGES = re.sub(
    r'"\s*\n\s*f?"|\s+',
    lambda match: "" if '"' in match[0] else " ",
    "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "src").rglob("*.py"))),
)
"""The sources with the strings that stand in pieces over lines put together."""
SYMPTOMS = re.findall(r"^\| (`[^|]+) \|", (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8"), re.M)


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    pytest.importorskip("mkdocs", reason="MkDocs is not installed: make install")
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "tools/docs_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_only_links_that_lead_nowhere_are_two_put_in_here(hook: ModuleType, tmp_path: Path) -> None:
    del hook
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("docs", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    with (tmp_path / "docs/quickstart.md").open("a") as page:
        page.write("\n[page](no-such.md) [place](report.md#no-such-place)\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", "site"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"}
    built = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    warnings = [line for line in built.stderr.splitlines() if line.startswith("WARNING")]
    assert built.returncode == 1, built.stderr
    assert len(warnings) == 2, built.stderr
    assert "no-such.md" in warnings[0]
    assert "#no-such-place" in warnings[1]
    home = (tmp_path / "site/index.html").read_text()
    assert 'src="images/report.png"' in home
    assert 'href="examples/quickstart.toml"' in home
    assert (tmp_path / "site/examples/quickstart.toml").read_text() == (ROOT / "examples/quickstart.toml").read_text()
    # Nothing is fetched from elsewhere: the pages are read where there is no network.
    assert not re.findall(r'<(?:script|link)[^>]+(?:src|href)="https?://', home)


@pytest.mark.parametrize(
    ("page", "link", "there"),
    [
        ("index.md", "docs/report.md", "report.md"),
        ("index.md", "docs/decisions/", "decisions/index.md"),
        ("index.md", "examples/", "examples/index.md"),
        ("clusters/mpi.md", "../../README.md#on-a-cluster-with-gpus", "../index.md#on-a-cluster-with-gpus"),
        ("study-file.md", "../examples/engines.toml", "examples/engines.toml"),
        ("report.md", "traces.md#a", "traces.md#a"),
        ("CONTRIBUTING.md", "docs/layout.md", "layout.md"),
        ("examples/index.md", "own_script/study.toml", "own_script/study.toml"),
        ("concepts.md", "https://x.org/docs/a.md", "https://x.org/docs/a.md"),
        ("concepts.md", "#words", "#words"),
    ],
)
def test_a_link_of_the_repository_leads_to_its_page_on_the_site(
    hook: ModuleType, page: str, link: str, there: str
) -> None:
    assert hook.with_links(f"see [it]({link}).", page) == f"see [it]({there})."


def test_references_hold_every_verb_and_every_key(hook: ModuleType) -> None:
    commands, keys = hook.commands(), hook.study_keys()
    for verb in get_command(cli.app).commands:  # type: ignore[attr-defined]  # a group of commands
        assert re.search(rf"^## vitscale {verb}\b", commands, re.M)
    assert "--retry-failed" in commands
    for section, kind in SECTIONS.items():
        part = keys.partition(f"## [{section}]")[2].partition("\n## ")[0]
        assert set(re.findall(r"^\| `(\w+)`", part, re.M)) == set(kind.model_fields)


def test_the_reference_of_python_holds_every_name_and_every_argument(hook: ModuleType) -> None:
    page = hook.python_api()
    for name in vitscale.__all__:
        assert f"`vitscale.{name}`" in page or f"### vitscale.{name}\n" in page
    for name in ("advise", "import_results"):
        part = page.partition(f"### vitscale.{name}\n")[2].partition("\n### ")[0]
        assert re.findall(r"^- `(\w+)`: ", part.partition("**Returns**")[0], re.M) == [
            *inspect.signature(getattr(vitscale, name)).parameters
        ]
    limits = page.partition("### vitscale.AdviceLimits\n")[2].partition("\n### ")[0]
    assert re.findall(r"^\| `(\w+)`", limits, re.M) == ["deadline_seconds", "budget", "min_efficiency"]


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_a_symptom_is_a_message_that_the_sources_have(symptom: str) -> None:
    for words in re.findall(r"`([^`]+)`", symptom):
        assert words in MESSAGES


def test_every_extra_is_in_the_quickstart() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = (ROOT / "docs/quickstart.md").read_text().partition("| extra | brings |")[2].partition("\n\n")[0]
    named = {name for cell in re.findall(r"^\| ([^|]+) \|", table, re.M) for name in re.findall(r"`(\w+)`", cell)}
    assert named == extras.keys() - {"dev"}
