"""Formats: which records this program reads by their number, and the refusal of all others.

Every record of a results folder has a number, `format`. Fields of a newer format are unknown here, and fields that an
older one lacks have no honest value: both are refused, and the message names the program that reads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from vitscale.errors import StoreError

LAST_READER_OF_OLDER = "f5aba528"
"""The last commit of vitscale that reads results of formats 1 to 10, and checks of formats 1 and 2."""


class ReadableFormats(NamedTuple):
    """The formats of one kind of records that are read, both ends included."""

    subject: str
    """Kind of records in messages: "record"."""
    oldest: int
    newest: int


def refuse_unreadable(content: object, formats: ReadableFormats, path: Path | str) -> None:
    """Refuse a record of a format that is not among `formats`; one without a number passes.

    Args:
        content: the record as parsed JSON.
        formats: those of its kind.
        path: names the record in the message.

    Raises:
        StoreError: its format is older or newer.
    """
    number = content.get("format") if isinstance(content, dict) else None
    if not isinstance(number, int):
        return
    subject = f"{path} has {formats.subject} format {number}"
    if number > formats.newest:
        raise StoreError(
            f"{subject}, newer than this vitscale's {formats.newest}", next_step="Update vitscale to read it"
        )
    if number < formats.oldest:
        raise StoreError(
            f"{subject}, and this vitscale reads {formats.oldest} to {formats.newest}",
            next_step=f"Commit {LAST_READER_OF_OLDER} of vitscale is the last that reads it: check that out to report "
            "or export these results, or run the study again in a new folder",
        )
