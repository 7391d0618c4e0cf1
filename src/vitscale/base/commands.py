"""Programs that are asked something: run to their end, for a limited time and mostly without input."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence


def answer_to(
    argv: Sequence[str],
    seconds: float,
    environment: Mapping[str, str] | None = None,
    *,
    own_session: bool = False,
    undecodable: str = "replace",
    input_text: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end; returns what it printed and its exit code.

    Args:
        argv: the program and its arguments.
        seconds: how long it may take.
        environment: its variables; None: those of this process.
        own_session: whether Ctrl-C is kept from it.
        undecodable: handler of printed bytes that are no text: "replace" for readers; "surrogateescape" where the
            answer is an argument of another program, which then gets the same bytes.
        input_text: what it reads; None: nothing.

    Raises:
        OSError: it cannot be run.
        subprocess.TimeoutExpired: it took longer, and was killed.
    """
    return subprocess.run(
        argv,
        stdin=subprocess.DEVNULL if input_text is None else None,
        input=input_text,
        capture_output=True,
        text=True,
        errors=undecodable,
        timeout=seconds,
        check=False,
        env=environment,
        start_new_session=own_session,
    )
