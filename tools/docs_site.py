"""What MkDocs does not know of these docs (a hook of mkdocs.yml): the README is the site's first page, files outside of
docs/ that a page links to come along, and three references are written from the code."""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.main import get_command
from typer.testing import CliRunner

from vitscale import cli
from vitscale.study.schema import study_schema

sys.path.insert(0, str(Path(__file__).parent))  # MkDocs loads a hook by its path alone
from api_pages import python_api

ROOT = Path(__file__).parent.parent
MOVED = {"README.md": "index.md", "examples/": "examples/index.md", "docs/decisions/": "decisions/index.md"}
"""Paths in the repository that have another one on the site; of any other `docs/` is taken off."""
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what is generated, and what lies outside of docs/."""
    pages = {
        "index.md": (ROOT / "README.md").read_text(encoding="utf-8"),
        "CHANGELOG.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        "CONTRIBUTING.md": (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"),
        "decisions/index.md": listed("Decisions", "docs/decisions", "0*.md"),
        "examples/index.md": listed("Examples", "examples", "**/*.toml"),
        "reference/commands.md": commands(),
        "reference/python-api.md": python_api(),
        "reference/study-keys.md": study_keys(),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    for path in sorted((ROOT / "examples").rglob("*.*")):
        if path.suffix in (".toml", ".py"):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Leads links of the repository to where their targets are on the site."""
    return with_links(markdown, page.file.src_uri)


def with_links(markdown: str, uri: str) -> str:
    """A page of the repository as one of the site.

    Args:
        markdown: of the page, whose links are meant from where it lies in the repository.
        uri: of the page on the site.
    """
    outside = {"index.md": "README.md"} | {
        name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "examples/index.md")
    }
    origin = outside.get(uri, f"docs/{uri}")

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), match[1]))
        target = MOVED.get(target + "/" * match[1].endswith("/"), target.removeprefix("docs/"))
        return posixpath.relpath(target, posixpath.dirname(uri) or ".")

    return LINK.sub(moved, markdown)


def listed(title: str, folder: str, pattern: str) -> str:
    """A page of links to a folder's files, with their first lines."""
    lines = [f"# {title}", ""]
    for path in sorted((ROOT / folder).glob(pattern)):
        first = path.read_text(encoding="utf-8").partition("\n")[0].strip("# ")
        lines.append(f"- [{path.relative_to(ROOT / folder)}]({path.relative_to(ROOT / folder)}): {first}")
    return "\n".join(lines) + "\n"


def commands() -> str:
    """What every verb says to `--help`."""
    lines = ["# Commands", "", "As each prints it to `--help`. Exit codes: [README](../index.md#commands).", ""]
    for words in _verbs(get_command(cli.app)):
        said = CliRunner().invoke(cli.app, [*words, "--help"], prog_name="vitscale", terminal_width=100).output
        lines += [f"## vitscale {' '.join(words)}", "", "```text", said.strip(), "```", ""]
    return "\n".join(lines)


def _verbs(command: Any, *words: str) -> Iterator[tuple[str, ...]]:
    if not hasattr(command, "commands"):
        yield words
        return
    for verb in command.list_commands(None):
        yield from _verbs(command.commands[verb], *words, verb)


def study_keys() -> str:
    """Every key of a study with what it may be, from the schema that editors get."""
    schema = study_schema()
    lines = ["# Keys of a study", "", "Written from the code, as `vitscale schema` is. What they are for:"]
    lines += ["[the study file](../study-file.md).", ""]
    for section, reference in schema["properties"].items():
        name = next((part["$ref"] for part in (reference, *reference.get("anyOf", ())) if "$ref" in part), None)
        if name is None:
            continue
        body = schema["$defs"][name.rpartition("/")[2]]
        lines += [f"## [{section}]", "", body["description"], "", "| key | value | default | what |"]
        lines += ["| --- | --- | --- | --- |"]
        for key, value in body["properties"].items():
            default = f"`{value['default']}`" if "default" in value else ""
            what = _in_a_cell(value.get("description", ""))
            lines.append(f"| `{key}` | {_in_a_cell(_kind(value))} | {default} | {what} |")
        lines.append("")
    return "\n".join(lines)


def _kind(value: dict[str, Any]) -> str:
    if "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value["enum"])
    if "anyOf" in value:
        return "; ".join(_kind(choice) for choice in value["anyOf"])
    limits = [f"{word} {value[key]}" for key, word in _LIMITS.items() if key in value]
    return " ".join([{"array": "list", "object": "table"}.get(value.get("type", ""), value.get("type", "")), *limits])


_LIMITS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}


def _in_a_cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()
