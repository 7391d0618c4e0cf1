"""Says the answer to a reader: the answer first, where the time goes, what to change, what was odd, what is unknown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitscale.explanation.answer import ExplainAnswer
from vitscale.explanation.cause import SlowCause
from vitscale.explanation.parts import STEP_PARTS, JobParts, RankStepParts, StepPart
from vitscale.explanation.rare_causes import cause_kind
from vitscale.explanation.rare_work import RareWork
from vitscale.present import document as doc
from vitscale.present.data import estimate_fields, finding_fields
from vitscale.present.units import NO_BREAK_SPACE, counted, listed, number, percent, seconds, time_unit

PART_NAMES: Mapping[StepPart, str] = {
    "data": "data wait",
    "copy": "copy to device",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "launch_gaps": "launch gaps",
    "other": "other (own code)",
    "wait": "waiting for the slowest rank",
    "transfer": "communication",
    "exchange": "communication and waiting",
}
_MOST_SHOWN_CAUSES = 2
"""Causes that stand on the first screen; the others are folded."""
_MOST_ROWS = 7
_ROWS_BESIDE_TWO_CAUSES = 5
"""Rows of the table on the first screen, which has 25 lines."""
_LEAST_SHOWN_SHARE = 0.02
"""Share of the step below which a part has no row of its own."""
_MOST_FILES = 3


@dataclass(frozen=True)
class SessionFacts:
    """What the session knows besides the ranks' records."""

    results: Path
    """The results folder."""
    files_written: tuple[str, ...] = ()
    """Files that the program wrote while it was watched: the largest ones."""
    number_written: int = 0
    """All files that it wrote, of those that were looked at."""
    all_files_looked_at: bool = True
    notes: tuple[str, ...] = ()
    """Sentences on how it began and ended."""
    findings: tuple[doc.Finding, ...] = ()
    """What kept the session from seeing more."""


def answer_document(answer: ExplainAnswer, session: SessionFacts) -> doc.Document:
    """Return the answer as a document; what few readers need is folded."""
    blocks: list[doc.Block] = [doc.Paragraph(f"{_capitalised(answer.summary)}.", "strong")]
    if answer.parts is not None and answer.parts.ranks:
        has_two_causes = len(answer.causes) >= _MOST_SHOWN_CAUSES
        most_rows = _ROWS_BESIDE_TWO_CAUSES if has_two_causes else _MOST_ROWS
        blocks.append(parts_table(answer.parts, _slow_rank(answer), most_rows))
    step_seconds = answer.parts.mean_step_seconds if answer.parts is not None else 0.0
    findings = [cause_finding(cause, step_seconds) for cause in answer.causes]
    blocks += _with_session(findings[:_MOST_SHOWN_CAUSES], session.findings)
    odd = [*answer.seen, *answer.tries, *_files_sentences(session)]
    if odd:
        blocks.append(doc.Bullets(tuple(odd)))
    blocks += _folded_sections(answer, session, findings[_MOST_SHOWN_CAUSES:])
    return doc.Document("", tuple(blocks), (f"Details: {session.results} (--json has all figures)",))


def _with_session(causes: Sequence[doc.Finding], session: Sequence[doc.Finding]) -> list[doc.Finding]:
    """Return the session's errors and warnings, then the causes, then the session's notes, which may be cut off."""
    serious = [finding for finding in session if finding.severity != "note"]
    notes = [finding for finding in session if finding.severity == "note"]
    return [*serious, *causes, *notes]


def _capitalised(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def parts_table(parts: JobParts, slowest: RankStepParts | None, most_rows: int) -> doc.Table:
    """Return the table of where the time goes: a row for each large part of the mean step, the largest first.

    Args:
        parts: the job.
        slowest: the rank that gets a column of its own; None: there is no such rank.
        most_rows: rows; the smallest parts share the last one.
    """
    mean_step = parts.mean_step_seconds
    unit = time_unit([mean_step])
    columns = [doc.Column("part", words=True), doc.Column("share"), doc.Column(unit.sign)]
    title = "Where the time of a mean step goes"
    if len(parts.ranks) > 1:
        title += f": mean of {len(parts.ranks)} ranks"
    if slowest is not None:
        columns.append(doc.Column(f"rank{NO_BREAK_SPACE}{slowest.rank}"))
        title += f", and the slowest, rank {slowest.rank}"
    all_rows = [*_step_rows(parts, slowest), *(_rare_row(work, parts) for work in parts.rare)]
    known_rows = sorted((row for row in all_rows if row.mean_seconds), key=lambda row: -row.mean_seconds)
    cells = []
    for row in _with_rest(known_rows, mean_step, most_rows):
        texts = [row.name, percent(row.mean_seconds / mean_step), unit.text(row.mean_seconds)]
        cells.append(texts if slowest is None else [*texts, unit.text(row.slowest_seconds)])
    return doc.table(columns, cells, title=title, always=["part", "share"])


def _slow_rank(answer: ExplainAnswer) -> RankStepParts | None:
    """Return the parts of the rank that is a cause by itself; None where there is no such rank."""
    if answer.parts is None:
        return None
    slow_ranks: set[int] = set()
    for cause in answer.causes:
        if cause.kind == "slow-rank":
            slow_ranks.update(cause.ranks)
    for rank in answer.parts.ranks:
        if rank.rank in slow_ranks:
            return rank
    return None


def _with_rest(rows: Sequence[_PartRow], mean_step: float, most_rows: int) -> list[_PartRow]:
    """Return the rows of large parts, and one for all others together.

    Args:
        rows: the largest first.
        mean_step: seconds of the step.
        most_rows: rows that are returned at most.
    """
    large = [row for row in rows if row.mean_seconds >= _LEAST_SHOWN_SHARE * mean_step]
    all_are_large = len(large) == len(rows)
    if all_are_large and len(rows) <= most_rows:
        return large
    shown = large[: most_rows - 1]  # the last row is for the rest
    rest = rows[len(shown) :]
    mean_seconds = math.fsum(row.mean_seconds for row in rest)
    slowest_seconds = math.fsum(row.slowest_seconds or 0.0 for row in rest)
    return [*shown, _PartRow("the rest", mean_seconds, slowest_seconds)]


@dataclass(frozen=True)
class _PartRow:
    """One row of the table."""

    name: str
    mean_seconds: float
    """0 where it is unknown: then it has no row."""
    slowest_seconds: float | None


def _step_rows(parts: JobParts, slowest: RankStepParts | None) -> list[_PartRow]:
    """Return the rows of the parts of a usual step."""
    mean_rank = parts.mean_rank
    rows = []
    for part in STEP_PARTS:
        name = PART_NAMES[part]
        if part == "backward" and parts.table.mixed_reason:
            name = "backward, with communication"
        rows.append(_PartRow(name, mean_rank[part] or 0.0, None if slowest is None else slowest.parts[part]))
    return rows


def _rare_row(work: RareWork, parts: JobParts) -> _PartRow:
    """Return the row of rare work."""
    names = {
        "evaluation": "evaluation",
        "checkpoint": "checkpoints",
        "pause": "pauses between steps",
        "loader-restarts": "loader restarts",
        "slow-fetches": "slow fetches",
        "periodic-work": "periodic work (logging)",
    }
    kind = cause_kind(work, parts)
    name = names[kind]
    if work.every is not None:
        name = f"{name}, every {counted(round(work.every), 'step')}"
    elif kind == "periodic-work":
        name = "longer now and then"
    return _PartRow(name, work.seconds_per_step or 0.0, work.seconds_per_step)


def cause_finding(cause: SlowCause, step_seconds: float) -> doc.Finding:
    """Return a cause as a finding: its evidence and bound, and what to change.

    Args:
        cause: the cause.
        step_seconds: the mean step.
    """
    gain = cause.gain_of(step_seconds)
    bound = f" Without it: up to {number(gain, 2)}x faster" if gain is not None else ""
    about = doc.About(ranks=cause.ranks, hosts=cause.hosts)
    return doc.Finding(cause.kind, "warning", f"{cause.evidence}.{bound}", cause.change, about)


def _files_sentences(session: SessionFacts) -> list[str]:
    """Return a sentence on the files that the program wrote; none where it wrote none."""
    if not session.files_written:
        return []
    number_written = max(session.number_written, len(session.files_written))
    at_least = "" if session.all_files_looked_at else "at least "
    largest = listed(session.files_written, most=_MOST_FILES)
    return [f"The program wrote {at_least}{counted(number_written, 'file')} meanwhile: {largest}"]


def _folded_sections(
    answer: ExplainAnswer, session: SessionFacts, more_findings: Sequence[doc.Finding]
) -> list[doc.Block]:
    """Return what only --verbose shows on a terminal."""
    unseen = [f"{what}: {why}" for what, why in answer.unavailable.items()]
    sections: list[tuple[str, Sequence[doc.Block]]] = [
        ("more causes", more_findings),
        ("each rank", _rank_blocks(answer.parts)),
        ("unseen", [doc.Bullets(tuple(unseen))] if unseen else []),
        ("method", _method_blocks(answer.parts, session)),
    ]
    if len(session.files_written) > _MOST_FILES:
        sections.append(("files that the program wrote", [doc.Bullets(session.files_written)]))
    return [doc.Section(title, tuple(blocks), folded=True) for title, blocks in sections if blocks]


def _rank_blocks(parts: JobParts | None) -> list[doc.Block]:
    """Return a table with the parts of each rank; none for a single rank."""
    if parts is None or len(parts.ranks) < 2:
        return []
    unit = time_unit([parts.step.value])
    shown_parts = [part for part in STEP_PARTS if _takes_time(parts, part)]
    columns = [doc.Column("rank"), *(doc.Column(PART_NAMES[part], unit.sign) for part in shown_parts)]
    columns.append(doc.Column("host", words=True))
    rows = []
    for rank in parts.ranks:
        texts = [unit.text(rank.parts[part]) for part in shown_parts]
        rows.append([str(rank.rank), *texts, rank.host])
    return [doc.table(columns, rows)]


def _takes_time(parts: JobParts, part: StepPart) -> bool:
    """Whether a part takes any time on any rank."""
    return any(rank.parts[part] for rank in parts.ranks)


def _method_blocks(parts: JobParts | None, session: SessionFacts) -> list[doc.Block]:
    """Return sentences on the steps that figures rest on."""
    sentences = list(session.notes)
    if parts is not None:
        bounds = parts.step.bounds(seconds)
        interval = f"95 % interval {bounds}" if bounds else parts.step.note
        sentences.append(f"{counted(parts.timed_steps, 'timed step')}, {seconds(parts.step.value)} each ({interval})")
        sentences += parts.notes
    return [doc.Bullets(tuple(_capitalised(sentence) for sentence in sentences))] if sentences else []


def answer_fields(answer: ExplainAnswer, session: SessionFacts) -> dict[str, Any]:
    """Return the answer as fields of JSON; null stands for what is unavailable."""
    parts = answer.parts
    step_seconds = parts.mean_step_seconds if parts is not None else 0.0
    step_notes = parts.notes if parts is not None else ()
    return {
        "answer": answer.summary,
        "results": str(session.results),
        **_step_fields(parts),
        "causes": [_cause_fields(cause, step_seconds) for cause in answer.causes],
        "seen": list(answer.seen),
        "tries": list(answer.tries),
        "unavailable": dict(answer.unavailable),
        "notes": [*session.notes, *step_notes],
        "findings": [finding_fields(finding) for finding in session.findings],
        "files_written": list(session.files_written),
    }


def _step_fields(parts: JobParts | None) -> dict[str, Any]:
    """Return the figures of steps; all null where no step was seen."""
    if parts is None:
        return {
            **estimate_fields("step_seconds", None),
            **estimate_fields("images_per_second", None),
            "mean_step_seconds": None,
            "mfu": None,
            "timed_steps": 0,
            "world_size": None,
            "ranks": [],
            "periodic": [],
        }
    return {
        **estimate_fields("step_seconds", parts.step),
        **estimate_fields("images_per_second", parts.images_per_second),
        "mean_step_seconds": parts.mean_step_seconds,
        "mfu": None,
        "timed_steps": parts.timed_steps,
        "world_size": parts.world_size,
        "ranks": [_rank_fields(rank) for rank in parts.ranks],
        "periodic": [_rare_fields(work, parts) for work in parts.rare],
    }


def _rank_fields(rank: RankStepParts) -> dict[str, Any]:
    parts = {f"{part}_seconds": rank.parts[part] for part in STEP_PARTS}
    return {"rank": rank.rank, "host": rank.host, "seconds": rank.seconds, **parts}


def _rare_fields(work: RareWork, parts: JobParts) -> dict[str, Any]:
    return {
        "kind": cause_kind(work, parts),
        "part": None if work.is_break else work.kind,
        "seconds": work.seconds,
        "seconds_per_step": work.seconds_per_step,
        "every_steps": work.every,
        "times": work.times,
        "ranks": list(work.ranks),
        "code": work.code,
    }


def _cause_fields(cause: SlowCause, step_seconds: float) -> dict[str, Any]:
    return {
        "kind": cause.kind,
        "evidence": cause.evidence,
        "change": cause.change,
        "share": cause.share_of(step_seconds),
        "gain_bound": cause.gain_of(step_seconds),
        **estimate_fields("cost_seconds", cause.cost),
        **estimate_fields("saving_seconds", cause.saving),
        "ranks": list(cause.ranks),
        "hosts": list(cause.hosts),
        "code": _code_fields(cause),
    }


def _code_fields(cause: SlowCause) -> dict[str, Any] | None:
    if cause.code is None:
        return None
    return {
        "file": cause.code.file,
        "line": cause.code.line,
        "function": cause.code.function,
        "share": cause.code.share,
    }
