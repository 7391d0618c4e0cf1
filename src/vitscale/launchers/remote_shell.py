"""What passes a remote shell as it is, for launchers that write a command into one line without quoting it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from vitscale.errors import shown

# As in Python's shlex.quote, less %: pdsh puts the host's name or number in for %h, %n and %u.
_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")


def first_unfit(values: Iterable[tuple[str, str]]) -> str | None:
    """The first of `values` (what it is, and its text) that a shell would not leave alone, as part of a message."""
    for what, text in values:
        if not _PLAIN.fullmatch(text):
            return f"{what} {shown(text)} has characters other than letters, digits and _@+=:,./-"
    return None
