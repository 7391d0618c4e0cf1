"""What `vitscale compare` says of results side by side (`vitscale.analysis.counterparts`): as a document and as data.

Beside each verdict stands what these runs could have shown, so that "no significant difference" is not read as "equal",
and what to do next where nothing is decided.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vitscale.analysis import Analysis
from vitscale.analysis.counterparts import USUAL_LIMIT, Pair, unmatched
from vitscale.analysis.power import MOST_REPEATS
from vitscale.analysis.rounds import RoundSpan, span
from vitscale.analysis.statistics import FEWEST_REPEATS
from vitscale.present.data import attributes, estimate_fields
from vitscale.present.document import Bullets, Cell, Column, Document, Paragraph, table
from vitscale.present.units import UNKNOWN, bounds, counted, number, rough_percent
from vitscale.present.unread import Unread

SAME_RUNS = "the same runs"
_NO_TIMES = "no times"
_LARGEST_SHOWN = 10.0
"""Slowdown, as a share, beyond which percent say no more."""


class Compared(NamedTuple):
    """Results that were compared, and by what."""

    first: str
    """Name of those that the others are compared with."""
    pairs: Sequence[Pair]
    limit: float | None
    """Share by which a trial may be slower; None: no limit was named."""
    missing: Sequence[str] = ()
    """Sentences on trials without a counterpart."""
    sessions: Sequence[str] = ()
    """Sentences on results that were not run in turn with the first ones."""
    unread: Sequence[Unread] = ()
    """What cannot be read of any of the results, each with their name."""

    @classmethod
    def of(cls, named: Sequence[tuple[str, Analysis]], pairs: Sequence[Pair], limit: float | None) -> Compared:
        """The results by name, the first of them first, with their pairs (`side_by_side`)."""
        names = [name for name, _ in named]
        sessions = [sentence for name in names[1:] if (sentence := _sessions(names[0], name, pairs))]
        unread = [one._replace(results=name) for name, analysis in named for one in analysis.unread]
        return cls(names[0], pairs, limit, unmatched(named, pairs), sessions, unread)

    @property
    def is_failed(self) -> bool:
        """Whether a trial is slower than the limit for certain."""
        return self.limit is not None and any(pair.gate(self.limit) == "slower" for pair in self.pairs)

    @property
    def is_undecided(self) -> bool:
        """Whether a trial is neither, or has no counterpart, or runs that cannot be read could change it."""
        undecided = self.limit is not None and any(pair.gate(self.limit) == "undecided" for pair in self.pairs)
        return undecided or bool(self.missing) or bool(self.unread)


def compared_document(compared: Compared) -> Document:
    """What differs, each trial's time against that of the first results, and what these runs could have shown."""
    first, pairs, limit = compared.first, compared.pairs, compared.limit
    shared = [what for what in (pairs[0].differs if pairs else ()) if all(what in pair.differs for pair in pairs)]
    groups = {
        name: [_row(pair, limit, shared) for pair in pairs if pair.results == name]
        for name in dict.fromkeys(pair.results for pair in pairs)
    }
    columns = [Column("curve", words=True), Column("ranks"), Column(f"time / {first}"), Column("verdict", words=True)]
    columns += [Column("limit", words=True)] if limit is not None else []
    always = [column.name for column in columns]
    columns.append(Column("shown from"))
    columns.append(Column("differs besides", words=True, narrow=None))
    blocks: list[Any] = [Paragraph(_summary(compared), "strong")]
    sentences = [*(f"differs everywhere: {what}" for what in shared), *compared.missing, *compared.sessions]
    sentences += _alternated(pairs) + next_steps(pairs, limit)
    if sentences:
        blocks.append(Bullets(tuple(sentences)))
    blocks.append(table(columns, groups, notes=_notes(pairs, limit), always=always))
    return Document("", tuple(blocks))


def _notes(pairs: Sequence[Pair], limit: float | None) -> tuple[str, ...]:
    """What the columns and verdicts of the table mean; nothing of a column in which no trial has a value."""
    notes = []
    if any(pair.measured is not None and not pair.same_runs for pair in pairs):
        notes.append("time for the same images over that of the first results, with the 95 % interval over runs")
        notes.append(
            '"slower" and "faster" are reported only if significant after Holm correction over all trials compared'
        )
    if any(_smallest_shown(pair, limit) is not None for pair in pairs):
        shown = "reported as slower" if limit is None else f"found beyond {rough_percent(limit)}"
        notes.append(f"shown from: the smallest slowdown that these runs would have {shown} in 4 of 5 cases")
    return tuple(notes)


def _summary(compared: Compared) -> str:
    pairs, limit = compared.pairs, compared.limit
    verdicts = [_verdict(pair) for pair in pairs]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
    summary = f"{counted(len(pairs), 'trial')} compared with {compared.first}: {counts}"
    if limit is None:
        return summary
    gates = [pair.gate(limit) for pair in pairs]
    certain = f"{gates.count('slower')} slower than {rough_percent(limit)} for certain"
    return f"{summary}; {certain}, {gates.count('undecided')} undecided"


def _verdict(pair: Pair) -> str:
    if pair.same_runs:
        return SAME_RUNS
    return pair.measured.result.verdict if pair.measured else _NO_TIMES


def _row(pair: Pair, limit: float | None, shared: Sequence[str]) -> tuple[Cell, ...]:
    cells = [Cell(pair.curve), Cell(str(pair.gpus)), _time(pair), Cell(_verdict(pair))]
    cells += [Cell(pair.gate(limit))] if limit is not None else []
    cells.append(Cell(_slowdown(_smallest_shown(pair, limit))))
    return (*cells, Cell("; ".join(what for what in pair.differs if what not in shared)))


def _time(pair: Pair) -> Cell:
    """The ratio of the times; where there is none, what became of the trial."""
    if pair.same_runs:
        return Cell(number(1.0))
    if pair.measured is None:
        outcome = pair.other.outcome if pair.first.outcome == "completed" else pair.first.outcome
        return Cell(outcome or "not run", state="missing")
    slowdown = pair.measured.slowdown
    return Cell(number(slowdown.value), bounds(slowdown.low, slowdown.high))


def _smallest_shown(pair: Pair, limit: float | None) -> float | None:
    return pair.smallest_slower if limit is None else pair.smallest_failed(limit)


def _slowdown(share: float | None) -> str:
    """A slowdown in percent; a dash where it is unknown."""
    if share is None:
        return UNKNOWN
    return rough_percent(share) if share <= _LARGEST_SHOWN else f"over {rough_percent(_LARGEST_SHOWN)}"


# --- what these runs could have shown, and what to do next ----------------------------------------------------------


def next_steps(pairs: Sequence[Pair], limit: float | None) -> list[str]:
    """Sentences on the smallest slowdown that these runs show, and on the repeats that show or decide more."""
    compared = [pair for pair in pairs if pair.measured is not None]
    if not compared:
        return []
    target = USUAL_LIMIT if limit is None else limit
    undecided = [] if limit is None else [pair for pair in compared if pair.gate(limit) == "undecided"]
    return [_shown(compared, limit), *_next(compared, undecided, target)]


def _shown(pairs: Sequence[Pair], limit: float | None) -> str:
    smallest = [shown for pair in pairs if (shown := _smallest_shown(pair, limit)) is not None]
    if not smallest:
        return f"fewer than {FEWEST_REPEATS} runs on a side: nothing is reported as slower or faster"
    if min(smallest) > _LARGEST_SHOWN:
        return f"these runs differ too much to show even a slowdown of {rough_percent(_LARGEST_SHOWN)}"
    by_trial = f" ({_slowdown(max(smallest))} in the least steady trial)" if len(smallest) > 1 else ""
    outcome = "is reported" if limit is None else "fails"
    return (
        f"a slowdown of {_slowdown(min(smallest))} or more {outcome} in 4 of 5 cases with these runs{by_trial}; a "
        "smaller one may be missed"
    )


def _next(compared: Sequence[Pair], undecided: Sequence[Pair], target: float) -> list[str]:
    """The repeats that report a slowdown of `target` as slower, and that decide what is undecided; none where these
    runs are enough."""
    if any(side.runs < 2 for pair in compared if pair.measured for side in pair.measured.sides):
        return [f"next: measure.repeats = {FEWEST_REPEATS} on each side: one run does not say by how much runs differ"]
    steps = []
    smallest = [pair.smallest_slower for pair in compared]
    if not all(shown is not None and shown <= target for shown in smallest):
        purpose = f"to report {rough_percent(target)} as slower in 4 of 5 cases"
        steps.append(_Step(purpose, _most([pair.repeats_to_show(target) for pair in compared])))
    if undecided:
        purpose = (
            f"to decide {counted(len(undecided), 'undecided trial')} (equal ones within {rough_percent(target)}, "
            f"{rough_percent(2 * target)} fails)"
        )
        steps.append(_Step(purpose, _most([pair.repeats_to_decide(target) for pair in undecided])))
    within_reach = [f"{step.purpose}, measure.repeats = {step.repeats} on each side" for step in steps if step.repeats]
    out_of_reach = [step.purpose for step in steps if step.repeats is None]
    if out_of_reach:
        spread = f"takes more than {MOST_REPEATS} repeats at this spread of runs"
        within_reach.append(f"{', and '.join(out_of_reach)} {spread}: look first for what makes them differ")
    return [f"next: {'; '.join(within_reach)}"] if within_reach else []


class _Step(NamedTuple):
    """What further repeats are for."""

    purpose: str
    repeats: int | None
    """None: more than are advised."""


def _most(repeats: Sequence[int | None]) -> int | None:
    """The most repeats that a trial takes; None where one is unknown."""
    known = [count for count in repeats if count is not None]
    return max(known) if known and len(known) == len(repeats) else None


# --- sessions -------------------------------------------------------------------------------------------------------


def _alternated(pairs: Sequence[Pair]) -> list[str]:
    rounds = [pair.measured.rounds for pair in pairs if pair.measured is not None and pair.measured.rounds]
    if not rounds:
        return []
    count = counted(min(rounds), "round")
    return [f"run in turn ({count}): compared round by round, so that what changes between sessions cancels"]


def _sessions(first: str, other: str, pairs: Sequence[Pair]) -> str:
    """When the two were run, where that was one after the other and not in turn; else empty."""
    apart = [pair for pair in pairs if pair.results == other and pair.measured is not None and not pair.measured.rounds]
    of_first, of_other = span([pair.first for pair in apart]), span([pair.other for pair in apart])
    if of_first is None or of_other is None:
        return ""
    if of_first.began < of_other.ended and of_other.began < of_first.ended:
        return ""
    same_day = _day(of_first.began) == _day(of_first.ended) == _day(of_other.began) == _day(of_other.ended)
    form = "%H:%M" if same_day else "%Y-%m-%d"
    day = f"on {_day(of_first.began)} " if same_day else ""
    return (
        f"{day}{first} was run {_when(of_first, form)}, {other} {_when(of_other, form)} (UTC), not in turn: sessions "
        "usually differ by 2 to 3 %, which no interval here holds; vitscale compare --run alternates"
    )


def _day(unix_seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(unix_seconds))


def _when(made: RoundSpan, form: str) -> str:
    begin, end = (time.strftime(form, time.gmtime(moment)) for moment in made)
    if begin == end:
        return f"{'at' if form == '%H:%M' else 'on'} {begin}"
    return f"from {begin} to {end}"


# --- as data --------------------------------------------------------------------------------------------------------


def compared_fields(compared: Compared) -> dict[str, Any]:
    """What `compared_document` says, as data."""
    return {
        "first": compared.first,
        "limit": compared.limit,
        "unmatched": list(compared.missing),
        "sessions": list(compared.sessions),
        "next_steps": next_steps(compared.pairs, compared.limit),
        "pairs": [_pair_fields(pair, compared.limit) for pair in compared.pairs],
    }


def _pair_fields(pair: Pair, limit: float | None) -> Mapping[str, Any]:
    measured = pair.measured
    slowdown = measured.slowdown if measured else None
    target = USUAL_LIMIT if limit is None else limit
    fields = {
        **attributes(pair, "results", "curve", "gpus", "same_runs"),
        "trial": pair.first.trial_id,
        "other_trial": pair.other.trial_id,
        **estimate_fields("time_ratio", slowdown),
        **attributes(measured.result if measured else None, "verdict", "p", "p_adjusted"),
        "gate": pair.gate(limit) if limit is not None else None,
        "rounds": measured.rounds or None if measured else None,
        "smallest_slowdown_shown": _smallest_shown(pair, limit),
        "target_slowdown": target,
        "repeats_to_show_target": pair.repeats_to_show(target),
        "repeats_to_decide": pair.repeats_to_decide(limit) if limit is not None else None,
        "differs": list(pair.differs),
    }
    if pair.same_runs:
        fields |= {"verdict": SAME_RUNS, "time_ratio": 1.0}
    return fields
