"""Finished runs whose files cannot be read: what every answer from the rest of the results says of them.

An answer without them may be a wrong one, and looks like any other. So whoever reads results hands on what is unread
(`Results.unread`), and each answer begins with it: `beginning_with_unread` for a document, `unread_fields` in JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from vitscale.present.document import Document, Paragraph
from vitscale.present.units import counted
from vitscale.store.results import Unread


def unread_sentence(unread: Sequence[Unread]) -> str:
    """What one results folder's answers lack, what to do, and the first reason; empty where all was read."""
    if not unread:
        return ""
    first, *others = unread
    of_results = f" of {first.results}" if first.results else ""
    more = f" (and {counted(len(others), 'more file')}, which vitscale report lists)" if others else ""
    return f"Finished runs{of_results} are missing from this answer; {first.remedy}: {first.reason}{more}."


def beginning_with_unread(document: Document, unread: Sequence[Unread]) -> Document:
    """The document of an answer, with a paragraph before it for each results folder of which something is unread."""
    names = dict.fromkeys(one.results for one in unread)
    sentences = [unread_sentence([one for one in unread if one.results == name]) for name in names]
    paragraphs = [Paragraph(sentence, "bad") for sentence in sentences]
    return replace(document, blocks=(*paragraphs, *document.blocks))


def unread_fields(unread: Iterable[Unread]) -> list[dict[str, Any]]:
    """What is unread, as JSON: an object for each file; `results` is null where an answer rests on one folder."""
    return [one._asdict() | {"results": one.results or None} for one in unread]
