"""The answer of `vitscale compare`: results side by side (`vitscale.analysis.counterparts`), as a document and as data.

A pair is a trial of the first results and its counterpart in others. Beside each verdict stands the smallest slowdown
that the runs could have shown, so that "no significant difference" is not read as "equal", and what to do next where
nothing is decided.
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
"""Largest slowdown, as a share, that is printed in percent; larger ones are "over 1000 %"."""


class Compared(NamedTuple):
    """Results that were compared, and the limit of the comparison."""

    first_name: str
    """Name of the results that the others are compared with."""
    pairs: Sequence[Pair]
    limit: float | None
    """Share by which a trial may be slower; None: no limit was named."""
    unmatched: Sequence[str] = ()
    """Sentences on trials without a counterpart."""
    separate_sessions: Sequence[str] = ()
    """Sentences on results that were not run in turn with the first ones."""
    unread: Sequence[Unread] = ()
    """What cannot be read of any of the results, each with their name."""

    @classmethod
    def of(cls, named_results: Sequence[tuple[str, Analysis]], pairs: Sequence[Pair], limit: float | None) -> Compared:
        """Return the comparison of results.

        Args:
            named_results: names and results; the others are compared with the first.
            pairs: their pairs (`analysis.counterparts.side_by_side`).
            limit: as the field.
        """
        first_name, *other_names = [name for name, _ in named_results]
        separate_sessions = []
        for other_name in other_names:
            sentence = _separate_sessions_sentence(first_name, other_name, pairs)
            if sentence:
                separate_sessions.append(sentence)
        unread: list[Unread] = []
        for name, analysis in named_results:
            unread += [file._replace(results=name) for file in analysis.unread]
        return cls(
            first_name=first_name,
            pairs=pairs,
            limit=limit,
            unmatched=unmatched(named_results, pairs),
            separate_sessions=separate_sessions,
            unread=unread,
        )

    @property
    def is_failed(self) -> bool:
        """Whether a trial is slower than the limit for certain."""
        return "slower" in self._limit_verdicts

    @property
    def is_undecided(self) -> bool:
        """Whether it is open, for some trial, whether it is slower than the limit.

        That is so where a pair is undecided, a trial has no counterpart, or runs cannot be read.
        """
        return "undecided" in self._limit_verdicts or bool(self.unmatched) or bool(self.unread)

    @property
    def _limit_verdicts(self) -> list[Gate]:
        """The verdict of each pair on the limit; empty without a limit."""
        return [] if self.limit is None else [pair.gate(self.limit) for pair in self.pairs]


def compared_document(compared: Compared) -> Document:
    """Return what differs, each trial's time against that of the first results, and what these runs could show."""
    shared = _shared_differences(compared.pairs)
    sentences = [
        *(f"differs everywhere: {difference}" for difference in shared),
        *compared.unmatched,
        *compared.separate_sessions,
        *_sentences_on_rounds(compared.pairs),
        *next_steps(compared.pairs, compared.limit),
    ]
    blocks: list[Block] = [Paragraph(_counts_sentence(compared), "strong")]
    if sentences:
        blocks.append(Bullets(tuple(sentences)))
    blocks.append(_pairs_table(compared, shared))
    return Document("", tuple(blocks))


def _shared_differences(pairs: Sequence[Pair]) -> list[str]:
    """Return the differences beside the times that all pairs have."""
    if not pairs:
        return []
    shared = list(pairs[0].differs)
    for pair in pairs:
        shared = [difference for difference in shared if difference in pair.differs]
    return shared


def _pairs_table(compared: Compared, shared: Sequence[str]) -> Table:
    """Return a table with a row for each pair, grouped by results.

    Its rows leave out the differences in `shared`, which stand above the table.
    """
    limit = compared.limit
    rows_by_results: dict[str, list[Row]] = {}
    for pair in compared.pairs:
        rows_by_results.setdefault(pair.results, []).append(_pair_row(pair, limit, shared))
    columns = [
        Column("curve", words=True),
        Column("ranks"),
        Column(f"time / {compared.first_name}"),
        Column("verdict", words=True),
    ]
    if limit is not None:
        columns.append(Column("limit", words=True))
    always = [column.name for column in columns]
    columns.append(Column("shown from"))
    columns.append(Column("differs besides", words=True, narrow=None))
    return table(columns, rows_by_results, notes=_table_notes(compared.pairs, limit), always=always)


def _table_notes(pairs: Sequence[Pair], limit: float | None) -> tuple[str, ...]:
    """Return notes on the meaning of the columns and verdicts; none on a column without a value."""
    notes = []
    if any(pair.measured is not None and not pair.same_runs for pair in pairs):
        notes.append("time for the same images over that of the first results, with the 95 % interval over runs")
        notes.append(
            '"slower" and "faster" are reported only if significant after Holm correction over all trials compared'
        )
    if any(_smallest_shown(pair, limit) is not None for pair in pairs):
        outcome = "reported as slower" if limit is None else f"found beyond {rough_percent(limit)}"
        notes.append(f"shown from: the smallest slowdown that these runs would have {outcome} in 4 of 5 cases")
    return tuple(notes)


def _counts_sentence(compared: Compared) -> str:
    """Return how many pairs have which verdict.

    Example: "4 trials compared with base: 3 faster, 1 no times; 0 slower than 5 % for certain, 1 undecided".
    """
    count_by_verdict = Counter(map(_verdict, compared.pairs))
    counts = ", ".join(f"{count} {verdict}" for verdict, count in count_by_verdict.items())
    summary = f"{counted(len(compared.pairs), 'trial')} compared with {compared.first_name}: {counts}"
    if compared.limit is None:
        return summary
    count_by_gate = Counter(pair.gate(compared.limit) for pair in compared.pairs)
    certain = f"{count_by_gate['slower']} slower than {rough_percent(compared.limit)} for certain"
    return f"{summary}; {certain}, {count_by_gate['undecided']} undecided"


def _verdict(pair: Pair) -> str:
    if pair.same_runs:
        return SAME_RUNS
    return pair.measured.result.verdict if pair.measured else _NO_TIMES


def _pair_row(pair: Pair, limit: float | None, shared: Sequence[str]) -> Row:
    cells = [Cell(pair.curve), Cell(str(pair.gpus)), _time_ratio_cell(pair), Cell(_verdict(pair))]
    if limit is not None:
        cells.append(Cell(pair.gate(limit)))
    differences = [difference for difference in pair.differs if difference not in shared]
    return (*cells, Cell(_slowdown_text(_smallest_shown(pair, limit))), Cell("; ".join(differences)))


def _time_ratio_cell(pair: Pair) -> Cell:
    """Return the ratio of the two times; where a time is missing, the outcome of the trial that has none."""
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


def _slowdown_text(share: float | None) -> str:
    """Return a slowdown in percent; a dash where it is unknown."""
    if share is None:
        return UNKNOWN
    return rough_percent(share) if share <= _LARGEST_SHOWN else f"over {rough_percent(_LARGEST_SHOWN)}"


# --- what these runs could have shown, and what to do next ----------------------------------------------------------


def next_steps(pairs: Sequence[Pair], limit: float | None) -> list[str]:
    """Return sentences on the smallest slowdown that these runs show, and on the repeats that show or decide more.

    Return none where no pair has times on both sides.
    """
    measured_pairs = [pair for pair in pairs if pair.measured is not None]
    if not measured_pairs:
        return []
    return [_shown_slowdown_sentence(measured_pairs, limit), *_further_repeats(measured_pairs, limit)]


def _shown_slowdown_sentence(pairs: Sequence[Pair], limit: float | None) -> str:
    """Return a sentence on the slowdown that these runs would have shown."""
    smallest_by_pair = [_smallest_shown(pair, limit) for pair in pairs]
    known_slowdowns = [slowdown for slowdown in smallest_by_pair if slowdown is not None]
    if not known_slowdowns:
        return f"fewer than {FEWEST_REPEATS} runs on a side: nothing is reported as slower or faster"
    if min(known_slowdowns) > _LARGEST_SHOWN:
        return f"these runs differ too much to show even a slowdown of {rough_percent(_LARGEST_SHOWN)}"
    smallest = _slowdown_text(min(known_slowdowns))
    least_steady = ""
    if len(known_slowdowns) > 1:
        least_steady = f" ({_slowdown_text(max(known_slowdowns))} in the least steady trial)"
    outcome = "is reported" if limit is None else "fails"
    return (
        f"a slowdown of {smallest} or more {outcome} in 4 of 5 cases with these runs{least_steady}; "
        "a smaller one may be missed"
    )


class _RepeatsNeeded(NamedTuple):
    """The repeats on each side that serve a purpose."""

    purpose: str
    """ "to report 5 % as slower in 4 of 5 cases"."""
    repeats: int | None
    """None: more than are advised."""


def _further_repeats(pairs: Sequence[Pair], limit: float | None) -> list[str]:
    """Return one sentence that advises more repeats; an empty list where these runs are enough.

    More repeats are advised for two purposes: so that a trial that is slower by as much as the limit would be reported
    as slower, and so that pairs are decided which are undecided now.

    Example: "next: to report 5 % as slower in 4 of 5 cases, measure.repeats = 12 on each side".

    Args:
        pairs: pairs with times.
        limit: the limit, as a share.
    """
    if any(_has_single_run(pair) for pair in pairs):
        return [f"next: measure.repeats = {FEWEST_REPEATS} on each side: one run does not say by how much runs differ"]
    to_show = _repeats_to_show(pairs, limit)
    to_decide = _repeats_to_decide(pairs, limit)
    needs = [need for need in (to_show, to_decide) if need is not None]
    if not needs:
        return []
    return [f"next: {_advice_on_repeats(needs)}"]


def _has_single_run(pair: Pair) -> bool:
    """Whether a side of a pair with times has one run only."""
    return pair.measured is not None and any(side.runs < 2 for side in pair.measured.sides)


def _advice_on_repeats(needs: Sequence[_RepeatsNeeded]) -> str:
    """Return the advised repeats for each purpose; then the purposes that take more repeats than are advised."""
    clauses = []
    unaffordable_purposes = []
    for need in needs:
        if need.repeats is None:
            unaffordable_purposes.append(need.purpose)
        else:
            clauses.append(f"{need.purpose}, measure.repeats = {need.repeats} on each side")
    if unaffordable_purposes:
        clauses.append(
            f"{', and '.join(unaffordable_purposes)} takes more than {MOST_REPEATS} repeats at this spread of runs: "
            "look first for what makes them differ"
        )
    return "; ".join(clauses)


def _repeats_to_show(pairs: Sequence[Pair], limit: float | None) -> _RepeatsNeeded | None:
    """Return the repeats with which a slowdown of the limit, or of the usual one, is reported as slower.

    Return None where these runs are enough.
    """
    target = USUAL_LIMIT if limit is None else limit
    if all(pair.smallest_slower is not None and pair.smallest_slower <= target for pair in pairs):
        return None
    purpose = f"to report {rough_percent(target)} as slower in 4 of 5 cases"
    return _RepeatsNeeded(purpose, _largest_or_none([pair.repeats_to_show(target) for pair in pairs]))


def _repeats_to_decide(pairs: Sequence[Pair], limit: float | None) -> _RepeatsNeeded | None:
    """Return the repeats that decide which trials are slower than the limit.

    Return None where all are decided, or without a limit.
    """
    if limit is None:
        return None
    undecided = [pair for pair in pairs if pair.gate(limit) == "undecided"]
    if not undecided:
        return None
    purpose = (
        f"to decide {counted(len(undecided), 'undecided trial')} (equal ones within {rough_percent(limit)}, "
        f"{rough_percent(2 * limit)} fails)"
    )
    return _RepeatsNeeded(purpose, _largest_or_none([pair.repeats_to_decide(limit) for pair in undecided]))


def _largest_or_none(repeats: Sequence[int | None]) -> int | None:
    """Return the largest number of repeats; None where one is None (more than are advised), or there are none."""
    advised = [count for count in repeats if count is not None]
    if len(advised) < len(repeats):
        return None
    return max(advised, default=None)


# --- sessions -------------------------------------------------------------------------------------------------------


def _sentences_on_rounds(pairs: Sequence[Pair]) -> list[str]:
    """Return a sentence on pairs whose runs alternated in time, if there are any; else an empty list."""
    round_counts = [pair.measured.rounds for pair in pairs if pair.measured is not None and pair.measured.rounds]
    if not round_counts:
        return []
    fewest = counted(min(round_counts), "round")
    return [f"run in turn ({fewest}): compared round by round, so that what changes between sessions cancels"]


def _separate_sessions_sentence(first: str, other: str, pairs: Sequence[Pair]) -> str:
    """Return a sentence on when two results were run, if all runs of one came after all of the other; else ""."""
    not_in_turn = [
        pair for pair in pairs if pair.results == other and pair.measured is not None and not pair.measured.rounds
    ]
    first_span = span([pair.first for pair in not_in_turn])
    other_span = span([pair.other for pair in not_in_turn])
    if first_span is None or other_span is None:
        return ""
    do_overlap = first_span.began < other_span.ended and other_span.began < first_span.ended
    if do_overlap:
        return ""
    days = {_day(moment) for moment in (*first_span, *other_span)}
    if len(days) == 1:
        form = _TIME_OF_DAY
        on_day = f"on {days.pop()} "
    else:
        form = _DAY
        on_day = ""
    return (
        f"{on_day}{first} was run {_when(first_span, form)}, {other} {_when(other_span, form)} (UTC), not in turn: "
        "sessions usually differ by 2 to 3 %, which no interval here holds; vitscale compare --run alternates"
    )


_DAY = "%Y-%m-%d"
_TIME_OF_DAY = "%H:%M"


def _day(unix_seconds: float) -> str:
    return time.strftime(_DAY, time.gmtime(unix_seconds))


def _when(session: RoundSpan, form: str) -> str:
    """Return when a session was, in UTC, as times of day or as days, as `form` says.

    Examples: "from 09:10 to 09:40", "at 09:10", "from 2026-11-20 to 2026-11-21", "on 2026-11-20".
    """
    begin = time.strftime(form, time.gmtime(session.began))
    end = time.strftime(form, time.gmtime(session.ended))
    if begin != end:
        return f"from {begin} to {end}"
    return f"at {begin}" if form == _TIME_OF_DAY else f"on {begin}"


# --- as data --------------------------------------------------------------------------------------------------------


def compared_fields(compared: Compared) -> dict[str, Any]:
    """Return the content of `compared_document` as data."""
    return {
        "first": compared.first_name,
        "limit": compared.limit,
        "unmatched": list(compared.unmatched),
        "sessions": list(compared.separate_sessions),
        "next_steps": next_steps(compared.pairs, compared.limit),
        "pairs": [_pair_fields(pair, compared.limit) for pair in compared.pairs],
    }


def _pair_fields(pair: Pair, limit: float | None) -> Mapping[str, Any]:
    """Return the JSON object of a pair. Trials with the same runs are equal, whatever their times."""
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
