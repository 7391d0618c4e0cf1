"""Puts what a benchmark printed between its two marks in a document."""

from __future__ import annotations

from pathlib import Path


def write_between(page: Path, mark: str, text: str) -> None:
    """Replaces what lies between `<!-- {mark}: begin -->` and `<!-- {mark}: end -->`; a missing mark is an error."""
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    whole = page.read_text(encoding="utf-8")
    before, opened, rest = whole.partition(begin)
    _, closed, after = rest.partition(end)
    if not opened or not closed:
        raise SystemExit(f"{page} has no {begin} ... {end}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
