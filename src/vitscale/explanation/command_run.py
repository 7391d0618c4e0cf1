"""A command that was explained: how it was watched and ended, as plain values."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitscale.base.secret_names import is_secret_name
from vitscale.explanation.processes import CommandProcess
from vitscale.explanation.reach import Hindrance
from vitscale.explanation.results_folder import ExplainFolder
from vitscale.explanation.written_files import WrittenFiles
from vitscale.store.secret_forms import is_secret_argument

NOT_SHOWN = "(not shown)"
FEWEST_SECRET_LETTERS = 8
"""Shorter values of secret variables are not masked inside other words, where they stand by chance."""


@dataclass(frozen=True)
class ExplainRequest:
    """A command, and how long it is watched."""

    argv: tuple[str, ...]
    """The command's words. No shell reads them."""
    output: Path | None = None
    """The results folder; None: ./vitscale-explain-1, or the next free number."""
    steps: int = 30
    """Steps of each rank, after the first ones, that are enough."""
    seconds: float = 60.0
    """Time after the first step that is enough, where there are fewer steps."""
    keep: bool = False
    """Whether the command runs on once enough is known."""
    start_seconds: float = 600.0
    """Time that the command has until its first step."""


class CommandEnd(enum.Enum):
    """How the watching ended; the value says it of the command, as a clause."""

    AGREED_STEP = "ended at the agreed step"
    BY_ITSELF = "ended by itself"
    MISSED_STEP = "was ended by signals, for ranks did not end at the agreed step"
    INTERRUPTED = "was ended, for you interrupted it"
    STARTED_TOO_LONG = "was ended, for it took no optimizer step in time"
    KEPT = "runs on"


@dataclass(frozen=True)
class CommandRun:
    """What became of a command."""

    argv: tuple[str, ...]
    """Its words, without secrets."""
    folder: ExplainFolder
    end: CommandEnd
    exit_code: int | None
    """Its exit code, minus a signal's number where one ended it; None where it runs on. It is no verdict: ranks that
    end at an agreed step make some launchers report a failure."""
    seconds: float
    """Time that it was watched."""
    first_step_seconds: float | None
    """Time until a rank's first step was seen; None where there was none."""
    needed_force: bool
    """Whether processes had to be ended by a signal."""
    survivors: tuple[CommandProcess, ...]
    """Processes that live although they were sent SIGKILL, or are on."""
    last_lines: tuple[str, ...]
    """The last lines of its output."""
    output_bytes: int
    """Bytes of its whole output."""
    hindrances: tuple[Hindrance, ...]
    """What may have kept the hook from ranks; empty where none is missing."""
    reach: str
    """Whether the hook reached a process that trains, in sentences."""
    written: WrittenFiles
    """Files that it wrote in its folder."""


def without_secrets(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return a command's words without secrets: values of options and variables with a secret's name.

    Example: ["train.py", "--hf_token", "hf_x1y2"] gives ("train.py", "--hf_token", "(not shown)").

    Args:
        argv: the words.
        environment: the command's variables; values of those with a secret's name are masked wherever they stand.
    """
    secrets = [environment[name] for name in environment if is_secret_name(name)]
    words = []
    previous_word = ""
    for word in argv:
        words.append(NOT_SHOWN if is_secret_argument(previous_word, word) else _masked_word(word, secrets))
        previous_word = word
    return tuple(words)


def _masked_word(word: str, secrets: Iterable[str]) -> str:
    """Return a word with its secrets masked: the value in `--token=value`, and values of secret variables."""
    name, equals, value = word.partition("=")
    if equals and value and is_secret_name(name):
        return f"{name}={NOT_SHOWN}"
    for secret in secrets:
        if len(secret) >= FEWEST_SECRET_LETTERS:
            word = word.replace(secret, NOT_SHOWN)
    return word
