"""A finding: what is wrong with one key of a configuration, how much it matters, and what to do"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Most severe first. An error: DeepSpeed refuses the file, or does not do what the file says. A warning: it does what
the file says, and that costs time, memory or accuracy. A note: worth knowing, right as it may be."""


@dataclass(frozen=True)
class Finding:
    """One finding of one rule."""

    rule: str
    """Name of the rule, such as "unknown-key"."""
    severity: Severity
    key: str
    """Dotted key, as in the file; empty where the finding concerns the whole."""
    message: str
    """What is there and what DeepSpeed does with it."""
    fix: str
    source: str
    """Where that can be looked up: a file of a release of DeepSpeed, its documentation, a paper."""

    def as_json(self) -> dict[str, str]:
        """The six fields by name."""
        return asdict(self)


def in_deepspeed(file: str, release: str) -> str:
    """A source: `file` below the package's folder in a release."""
    return f"DeepSpeed {release}, deepspeed/{file}"
