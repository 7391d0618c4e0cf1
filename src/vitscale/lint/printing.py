"""Findings in words for a terminal, and as JSON"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence

from rich.text import Text

from vitscale.errors import printable
from vitscale.lint.finding import SEVERITIES, Finding

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_LONGEST_KEY = 70


def findings_json(findings: Iterable[Finding]) -> str:
    """A list of objects with rule, severity, key, message, fix and source."""
    return json.dumps([finding.as_json() for finding in findings], indent=1)


def findings_text(findings: Sequence[Finding], about: str, width: int = 80) -> list[Text]:
    """The findings, most severe first, and a line that counts them.

    Args:
        findings: sorted by severity.
        about: what they were judged for, at the end of the last line.
        width: columns to wrap at.
    """
    parts: list[Text] = []
    for finding in findings:
        head = Text(finding.severity, _STYLES[finding.severity])
        head.append(f"  {finding.rule}", "bold")
        if finding.key:
            head.append(f"  {shown_key(finding.key)}", "default")
        parts.append(head)
        lines = (finding.message, f"Fix: {finding.fix}", f"Source: {finding.source}")
        for line, style in zip(lines, ("", "", "dim"), strict=True):
            parts.append(Text(_wrapped(_plain(line), width), style))
        parts.append(Text(""))
    counts = [sum(finding.severity == severity for finding in findings) for severity in SEVERITIES]
    named = [f"{count} {name}{'s' * (count != 1)}" for count, name in zip(counts, SEVERITIES, strict=True)]
    return [*parts, Text(_wrapped(_plain(f"{', '.join(named)} ({about})"), width, indent=""))]


def _wrapped(line: str, width: int, indent: str = "  ") -> str:
    # A long path or address stays whole, for the mouse; rich would cut it.
    wrapper = textwrap.TextWrapper(max(width, 40), initial_indent=indent, subsequent_indent=indent)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.fill(line)


def shown_key(key: str) -> str:
    """A dotted key on one line, at most 70 characters of it."""
    text = _plain(key)
    return text if len(text) <= _LONGEST_KEY else f"{text[: _LONGEST_KEY - 3]}..."


def _plain(text: str) -> str:
    return printable(text).replace("\n", "\\n")
