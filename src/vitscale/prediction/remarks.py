"""What a reader must know before the figures of an answer, of `predict` and `advise` alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from vitscale.analysis import Analysis
from vitscale.analysis.quality.steadiness import steady_first
from vitscale.errors import RequestError
from vitscale.present import document as doc
from vitscale.present.units import listed

Options: TypeAlias = Mapping[str, Any]
"""Option of a command line, such as "--network" -> its value; None or False: it was not given."""


class OptionWithoutEffect(NamedTuple):
    """An option of a command line without which all figures are the same."""

    option: str
    value: object
    """What stands behind it; True: it is a switch."""
    reason: str = ""
    """Why it has no effect; empty where that is not known."""

    @property
    def words(self) -> str:
        """ "--network 100GbE"; of a switch only its name."""
        if self.value is True:
            return self.option
        value = f"{self.value:g}" if isinstance(self.value, float) else str(self.value)
        return f"{self.option} {value}"


@dataclass(frozen=True)
class Remarks:
    """Sentences that stand before the figures."""

    unstable_runs: str = ""
    """How far the runs that the answer rests on differ, and what to do first; empty where they are steady."""
    taken_as_measured: str = ""
    """What the options say of measured runs that their import left open; empty where they say nothing of them."""
    without_effect: tuple[OptionWithoutEffect, ...] = ()
    """The options that change nothing."""

    @property
    def blocks(self) -> tuple[doc.Block, ...]:
        """The sentences as they are shown; none for an empty one."""
        blocks: list[doc.Block] = []
        if self.unstable_runs:
            blocks.append(doc.Paragraph(self.unstable_runs, "bad"))
        on_options = [self.taken_as_measured] if self.taken_as_measured else []
        on_options += _by_reason(self.without_effect)
        if on_options:
            blocks.append(doc.Bullets(tuple(on_options)))
        return tuple(blocks)

    @property
    def fields(self) -> dict[str, Any]:
        """The sentences as fields of JSON, one for each option without effect; null for an empty one."""
        return {
            "unstable_runs": self.unstable_runs or None,
            "taken_as_measured": self.taken_as_measured or None,
            "without_effect": [change_nothing([idle]) for idle in self.without_effect],
        }


NO_REMARKS = Remarks()


def unstable_runs(analysis: Analysis) -> str:
    """A sentence on what to do before anything is concluded from these results; empty where their runs are steady.

    It is of all trials, as in the report: two numbers of one folder would be taken for a contradiction.
    """
    return steady_first([trial for trial in analysis.trials.values() if trial.run_figures])


def options_without_effect(options: Options, figures_of: Callable[[Options], object]) -> tuple[str, ...]:
    """Names the options of a command line without which all figures are the same.

    The figures are computed again without each option, so that nothing about options needs to be known here. An option
    without which there is no answer at all has an effect.

    Args:
        options: all that may be without effect.
        figures_of: the figures of the answer with these options, to be compared by `==`; never None.
    """
    names = [name for name, value in options.items() if _is_on_command_line(value)]
    if not names:
        return ()
    figures = figures_of(options)
    return tuple(name for name in names if _figures_without(name, options, figures_of) == figures)


def _is_on_command_line(value: object) -> bool:
    return value is not None and value is not False


def _figures_without(omitted: str, options: Options, figures_of: Callable[[Options], object]) -> object:
    """The figures with all options but one; None where there is no answer."""
    try:
        return figures_of({**options, omitted: None})
    except RequestError:
        return None


def change_nothing(options: Sequence[OptionWithoutEffect]) -> str:
    """ "--network 100GbE and --check change nothing: what is sent is unknown."; all have the reason of the first."""
    names = [idle.words for idle in options]
    verb = "changes" if len(names) == 1 else "change"
    omitted = "it" if len(names) == 1 else "any one of them"
    reason = options[0].reason or f"the answer without {omitted} is the same"
    return f"{listed(names, len(names))} {verb} nothing: {reason}."


def _by_reason(options: Sequence[OptionWithoutEffect]) -> list[str]:
    """A sentence for each reason, on all options that have it."""
    options_by_reason: dict[str, list[OptionWithoutEffect]] = {}
    for idle in options:
        options_by_reason.setdefault(idle.reason, []).append(idle)
    return [change_nothing(same_reason) for same_reason in options_by_reason.values()]
