"""The answer of `vitscale compare`: results side by side (`vitscale.analysis.counterparts`), as a document and as data.

Beside each verdict stands what these runs could have shown, so that "no significant difference" is not read as "equal",
and what to do next where nothing is decided.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vitscale.analysis import Analysis
from vitscale.analysis.counterparts import USUAL_LIMIT, Gate, Pair, unmatched
from vitscale.analysis.power import MOST_REPEATS
from vitscale.analysis.rounds import RoundSpan, span
from vitscale.analysis.statistics import FEWEST_REPEATS
from vitscale.present.data import attributes, estimate_fields
from vitscale.present.document import Block, Bullets, Cell, Column, Document, Paragraph, Row, Table, table
from vitscale.present.units import UNKNOWN, bounds, counted, number, rough_percent
from vitscale.present.unread import Unread

SAME_RUNS = "the same runs"
_NO_TIMES = "no times"
_LARGEST_SHOWN = 10.0
"""Slowdown, as a share, beyond which percent say no more."""


class Compared(NamedTuple):
    """Results that were compared, and the limit of the comparison."""

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
    def of(cls, named_results: Sequence[tuple[str, Analysis]], pairs: Sequence[Pair], limit: float | None) -> Compared:
        """Return the comparison of (name, results), the first of which the others are compared with.

        Args:
            named_results: the results.
            pairs: their pairs (`analysis.counterparts.side_by_side`).
            limit: as the field.
        """
        first_name = named_results[0][0]
        sessions = []
        for other_name, _ in named_results[1:]:
            sentence = _sessions(first_name, other_name, pairs)
            if sentence:
                sessions.append(sentence)
        unread: list[Unread] = []
        for name, analysis in named_results:
            unread += [file._replace(results=name) for file in analysis.unread]
        return cls(first_name, pairs, limit, unmatched(named_results, pairs), sessions, unread)

    @property
    def is_failed(self) -> bool:
        """Whether a trial is slower than the limit for certain."""
        return "slower" in self._gates

    @property
    def is_undecided(self) -> bool:
        """Whether a trial is neither, or has no counterpart, or runs that cannot be read could change it."""
        return "undecided" in self._gates or bool(self.missing) or bool(self.unread)

    @property
    def _gates(self) -> list[Gate]:
        """Each pair's answer to the limit; none without a limit."""
        return [] if self.limit is None else [pair.gate(self.limit) for pair in self.pairs]


def compared_document(compared: Compared) -> Document:
    """Return what differs, each trial's time against that of the first results, and what these runs could show."""
    shared = _shared_differences(compared.pairs)
    sentences = [
        *(f"differs everywhere: {difference}" for difference in shared),
        *compared.missing,
        *compared.sessions,
        *_alternated(compared.pairs),
        *next_steps(compared.pairs, compared.limit),
    ]
    blocks: list[Block] = [Paragraph(_summary(compared), "strong")]
    if sentences:
        blocks.append(Bullets(tuple(sentences)))
    blocks.append(_pairs_table(compared, shared))
    return Document("", tuple(blocks))


def _shared_differences(pairs: Sequence[Pair]) -> list[str]:
    """Return what differs in every pair, beside the times."""
    if not pairs:
        return []
    return [difference for difference in pairs[0].differs if all(difference in pair.differs for pair in pairs)]


def _pairs_table(compared: Compared, shared: Sequence[str]) -> Table:
    """Return a row for each pair, grouped by results; `shared` is told elsewhere, and in no row."""
    limit = compared.limit
    rows_by_results: dict[str, list[Row]] = {}
    for pair in compared.pairs:
        rows_by_results.setdefault(pair.results, []).append(_row(pair, limit, shared))
    columns = [
        Column("curve", words=True),
        Column("ranks"),
        Column(f"time / {compared.first}"),
        Column("verdict", words=True),
    ]
    if limit is not None:
        columns.append(Column("limit", words=True))
    always = [column.name for column in columns]
    columns.append(Column("shown from"))
    columns.append(Column("differs besides", words=True, narrow=None))
    return table(columns, rows_by_results, notes=_notes(compared.pairs, limit), always=always)


def _notes(pairs: Sequence[Pair], limit: float | None) -> tuple[str, ...]:
    """Return what the columns and verdicts of the table mean; nothing on a column in which no trial has a value."""
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
    """ "4 trials compared with base: 3 faster, 1 no times; 0 slower than 5 % for certain, 1 undecided"."""
    count_by_verdict = Counter(map(_verdict, compared.pairs))
    counts = ", ".join(f"{count} {verdict}" for verdict, count in count_by_verdict.items())
    summary = f"{counted(len(compared.pairs), 'trial')} compared with {compared.first}: {counts}"
    if compared.limit is None:
        return summary
    count_by_gate = Counter(pair.gate(compared.limit) for pair in compared.pairs)
    certain = f"{count_by_gate['slower']} slower than {rough_percent(compared.limit)} for certain"
    return f"{summary}; {certain}, {count_by_gate['undecided']} undecided"


def _verdict(pair: Pair) -> str:
    if pair.same_runs:
        return SAME_RUNS
    return pair.measured.result.verdict if pair.measured else _NO_TIMES


def _row(pair: Pair, limit: float | None, shared: Sequence[str]) -> Row:
    cells = [Cell(pair.curve), Cell(str(pair.gpus)), _time(pair), Cell(_verdict(pair))]
    if limit is not None:
        cells.append(Cell(pair.gate(limit)))
    differences = [difference for difference in pair.differs if difference not in shared]
    return (*cells, Cell(_slowdown(_smallest_shown(pair, limit))), Cell("; ".join(differences)))


def _time(pair: Pair) -> Cell:
    """Return the ratio of the times; where there is none, what became of the trial."""
    if pair.same_runs:
        return Cell(number(1.0))
    if pair.measured is None:
        outcome = pair.other.outcome if pair.first.outcome == "completed" else pair.first.outcome
        return Cell(outcome or "not run", state="missing")
    slowdown = pair.measured.slowdown
    return Cell(number(slowdown.value), bounds(slowdown.low, slowdown.high))


def _smallest_shown(pair: Pair, limit: float | None) -> float | None:
    """Return the smallest slowdown, as a share, that these runs would have shown in 4 of 5 cases; None: unknown."""
    return pair.smallest_slower if limit is None else pair.smallest_failed(limit)


def _slowdown(share: float | None) -> str:
    """Return a slowdown in percent; a dash where it is unknown."""
    if share is None:
        return UNKNOWN
    return rough_percent(share) if share <= _LARGEST_SHOWN else f"over {rough_percent(_LARGEST_SHOWN)}"


# --- what these runs could have shown, and what to do next ----------------------------------------------------------


def next_steps(pairs: Sequence[Pair], limit: float | None) -> list[str]:
    """Return sentences on the smallest slowdown that these runs show, and on the repeats that show or decide more."""
    measured_pairs = [pair for pair in pairs if pair.measured is not None]
    if not measured_pairs:
        return []
    return [_power(measured_pairs, limit), *_further_repeats(measured_pairs, limit)]


def _power(pairs: Sequence[Pair], limit: float | None) -> str:
    """Say which slowdown these runs would have shown."""
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


class _Step(NamedTuple):
    """What further repeats are for."""

    purpose: str
    repeats: int | None
    """None: more than are advised."""


def _further_repeats(pairs: Sequence[Pair], limit: float | None) -> list[str]:
    """Return the repeats that report a slowdown of the limit as slower, and that decide what is undecided.

    None where these runs are enough. `pairs` are those with times.
    """
    if any(min(side.runs for side in pair.measured.sides) < 2 for pair in pairs if pair.measured is not None):
        return [f"next: measure.repeats = {FEWEST_REPEATS} on each side: one run does not say by how much runs differ"]
    steps = [step for step in (_step_to_show(pairs, limit), _step_to_decide(pairs, limit)) if step is not None]
    within_reach = [f"{step.purpose}, measure.repeats = {step.repeats} on each side" for step in steps if step.repeats]
    out_of_reach = [step.purpose for step in steps if step.repeats is None]
    if out_of_reach:
        spread = f"takes more than {MOST_REPEATS} repeats at this spread of runs"
        within_reach.append(f"{', and '.join(out_of_reach)} {spread}: look first for what makes them differ")
    return [f"next: {'; '.join(within_reach)}"] if within_reach else []


def _step_to_show(pairs: Sequence[Pair], limit: float | None) -> _Step | None:
    """Return the repeats that report a slowdown of the limit, or of the usual one; None where these runs do."""
    target = USUAL_LIMIT if limit is None else limit
    if all(pair.smallest_slower is not None and pair.smallest_slower <= target for pair in pairs):
        return None
    purpose = f"to report {rough_percent(target)} as slower in 4 of 5 cases"
    return _Step(purpose, _most([pair.repeats_to_show(target) for pair in pairs]))


def _step_to_decide(pairs: Sequence[Pair], limit: float | None) -> _Step | None:
    """Return the repeats that decide which trials are slower than the limit; None where all are decided."""
    if limit is None:
        return None
    undecided = [pair for pair in pairs if pair.gate(limit) == "undecided"]
    if not undecided:
        return None
    purpose = (
        f"to decide {counted(len(undecided), 'undecided trial')} (equal ones within {rough_percent(limit)}, "
        f"{rough_percent(2 * limit)} fails)"
    )
    return _Step(purpose, _most([pair.repeats_to_decide(limit) for pair in undecided]))


def _most(repeats: Sequence[int | None]) -> int | None:
    """Return the most repeats that a trial takes; None where one takes more than are advised."""
    advised = [count for count in repeats if count is not None]
    return max(advised) if advised and len(advised) == len(repeats) else None


# --- sessions -------------------------------------------------------------------------------------------------------


def _alternated(pairs: Sequence[Pair]) -> list[str]:
    """Return a sentence on runs that were made in turn; none where none were."""
    rounds = [pair.measured.rounds for pair in pairs if pair.measured is not None and pair.measured.rounds]
    if not rounds:
        return []
    count = counted(min(rounds), "round")
    return [f"run in turn ({count}): compared round by round, so that what changes between sessions cancels"]


def _sessions(first: str, other: str, pairs: Sequence[Pair]) -> str:
    """Say when two results were run, where that was one after the other and not in turn; else empty."""
    not_in_turn = [
        pair for pair in pairs if pair.results == other and pair.measured is not None and not pair.measured.rounds
    ]
    of_first = span([pair.first for pair in not_in_turn])
    of_other = span([pair.other for pair in not_in_turn])
    if of_first is None or of_other is None:
        return ""
    overlap = of_first.began < of_other.ended and of_other.began < of_first.ended
    if overlap:
        return ""
    days = {_day(moment) for moment in (*of_first, *of_other)}
    form = _TIME_OF_DAY if len(days) == 1 else _DAY
    on_day = f"on {days.pop()} " if len(days) == 1 else ""
    return (
        f"{on_day}{first} was run {_when(of_first, form)}, {other} {_when(of_other, form)} (UTC), not in turn: "
        "sessions usually differ by 2 to 3 %, which no interval here holds; vitscale compare --run alternates"
    )


_DAY = "%Y-%m-%d"
_TIME_OF_DAY = "%H:%M"


def _day(unix_seconds: float) -> str:
    return time.strftime(_DAY, time.gmtime(unix_seconds))


def _when(session: RoundSpan, form: str) -> str:
    """ "from 09:10 to 09:40", "at 09:10", "from 2026-11-20 to 2026-11-21" or "on 2026-11-20": in UTC."""
    begin = time.strftime(form, time.gmtime(session.began))
    end = time.strftime(form, time.gmtime(session.ended))
    if begin != end:
        return f"from {begin} to {end}"
    return f"at {begin}" if form == _TIME_OF_DAY else f"on {begin}"


# --- as data --------------------------------------------------------------------------------------------------------


def compared_fields(compared: Compared) -> dict[str, Any]:
    """Return the content of `compared_document` as data."""
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
    rounds = measured.rounds if measured is not None else 0
    target = USUAL_LIMIT if limit is None else limit
    fields = {
        **attributes(pair, "results", "curve", "gpus", "same_runs"),
        "trial": pair.first.trial_id,
        "other_trial": pair.other.trial_id,
        **estimate_fields("time_ratio", measured.slowdown if measured is not None else None),
        **attributes(measured.result if measured is not None else None, "verdict", "p", "p_adjusted"),
        "gate": None if limit is None else pair.gate(limit),
        "rounds": rounds or None,
        "smallest_slowdown_shown": _smallest_shown(pair, limit),
        "target_slowdown": target,
        "repeats_to_show_target": pair.repeats_to_show(target),
        "repeats_to_decide": None if limit is None else pair.repeats_to_decide(limit),
        "differs": list(pair.differs),
    }
    if pair.same_runs:
        fields |= {"verdict": SAME_RUNS, "time_ratio": 1.0}
    return fields
