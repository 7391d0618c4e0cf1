"""Finished runs whose files cannot be read, and the sentence on them that every answer from the other runs begins with.

An answer without them may be a wrong one, and looks like any other. So whoever reads results hands on what is unread
(`store.results.Results.unread`), and each answer begins with it: `beginning_with_unread` for a document, `with_unread`
for the fields of JSON. A `VerbResult` does both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from vitscale.present.document import Document, Paragraph
from vitscale.present.units import counted


class Unread(NamedTuple):
    """A file of finished runs that cannot be read, in whole or in part."""

    file: str
    """Its path in the results folder; of a broken line the run's folder."""
    reason: str
    """A clause that names it: "packs/000002-ab.parquet cannot be read: it is damaged"."""
    remedy: str
    """What to do, as a clause."""
    results: str = ""
    """Name of the results, where an answer rests on several; empty else."""

    @property
    def is_pack(self) -> bool:
        """Whether it holds many runs. `vitscale run` begins nothing while one is unread."""
        return self.file.startswith("packs/")


def unread_sentence(unread: Sequence[Unread]) -> str:
    """Return what one results folder's answers lack, what to do, and the first reason; empty where all was read."""
    if not unread:
        return ""
    first = unread[0]
    more_files = len(unread) - 1
    of_results = f" of {first.results}" if first.results else ""
    more = f" (and {counted(more_files, 'more file')}, which vitscale report lists)" if more_files else ""
    return f"Finished runs{of_results} are missing from this answer; {first.remedy}: {first.reason}{more}."


def beginning_with_unread(document: Document, unread: Sequence[Unread]) -> Document:
    """Return the document of an answer after a paragraph for each results folder of which something is unread."""
    unread_by_results: dict[str, list[Unread]] = {}
    for file in unread:
        unread_by_results.setdefault(file.results, []).append(file)
    paragraphs = [Paragraph(unread_sentence(files), "bad") for files in unread_by_results.values()]
    return replace(document, blocks=(*paragraphs, *document.blocks))


def with_unread(fields: Mapping[str, Any], unread: Sequence[Unread]) -> dict[str, Any]:
    """Return the JSON fields of an answer, after `unread`: an object for each file.

    `results` is null in it where an answer rests on one folder.
    """
    objects = [file._asdict() | {"results": file.results or None} for file in unread]
    return {"unread": objects, **fields}
