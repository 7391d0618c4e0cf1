"""What became of the command, for a reader and as fields of JSON: how it ended, what it wrote, what was not reached."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from vitscale.explanation.command_run import CommandEnd, CommandRun
from vitscale.explanation.rank_files import RankFiles
from vitscale.explanation.words import SessionFacts
from vitscale.present.document import Finding
from vitscale.present.units import counted, size

_MOST_NAMED_SURVIVORS = 5
_REPEAT_ADVICE = "Run it again, for more steps, if the answer is not sure enough"
_ADVICE_BY_END = {
    CommandEnd.BY_ITSELF: "The answer rests on the steps that it took. If it failed, its output says why",
    CommandEnd.INTERRUPTED: _REPEAT_ADVICE,
    CommandEnd.MISSED_STEP: "See whether a rank hangs: its last steps are in the results folder",
}
"""Ends that a reader must know -> what to do about them."""


def session_facts(run: CommandRun, files: RankFiles) -> SessionFacts:
    """Return what the session knows besides the ranks' records, for the answer's words."""
    return SessionFacts(
        results=run.folder.root,
        files_written=tuple(f"{file.path} ({size(file.size_bytes)})" for file in run.written.files),
        number_written=run.written.number,
        all_files_looked_at=run.written.is_complete,
        notes=tuple(_notes(run, files)),
        findings=tuple(run_findings(run, files)),
    )


def run_findings(run: CommandRun, files: RankFiles) -> Iterator[Finding]:
    """Yield what a reader must know of the run: processes that are left, missing ranks, an early end."""
    if run.survivors:
        programs = ", ".join(f"{process.pid} ({process.program})" for process in run.survivors[:_MOST_NAMED_SURVIVORS])
        survivors = counted(len(run.survivors), "process", "processes")
        message = f"{survivors} of the command still there after SIGKILL: {programs}"
        yield Finding("processes-left", "error", message, "The kernel holds them, mostly for a disk: look again later")
    if files.missing_ranks:
        missing = f"{counted(files.missing_ranks, 'rank')} of {files.missing_ranks + len(files.ranks)} wrote nothing"
        yield Finding("ranks-missing", "warning", missing, _advice_on_missing_ranks(run))
    if run.end in _ADVICE_BY_END:
        code = "" if run.exit_code is None else f", with exit code {run.exit_code}"
        yield Finding("ended-early", "note", f"the command {run.end.value}{code}", _ADVICE_BY_END[run.end])


def _advice_on_missing_ranks(run: CommandRun) -> str:
    """Return how the hook would reach ranks that wrote nothing."""
    if not run.hindrances:
        return "Let PYTHONPATH reach all hosts, which must see the results folder (docs/why-slow.md)"
    return "; ".join(f"{hindrance.sign}: {hindrance.remedy}" for hindrance in run.hindrances)


def _notes(run: CommandRun, files: RankFiles) -> Iterator[str]:
    """Yield sentences on the run that only those need who look closer."""
    yield f"Command: {shlex.join(run.argv)}"
    yield f"It was watched for {run.seconds:.0f} s, and {run.end.value}"
    yield f"Its output ({size(run.output_bytes)}): {run.folder.output_log}"
    if run.end is CommandEnd.AGREED_STEP and run.needed_force:
        yield "All ranks ended as agreed; processes that stayed behind were ended by a signal"
    if not run.written.is_complete:
        yield "Its folder has too many files to look for all that it wrote"
    if run.written.number > len(run.written.files):
        yield f"It wrote {counted(run.written.number, 'file')} in its folder, of which the largest are listed"
    yield from files.problems


def run_fields(run: CommandRun, files: RankFiles) -> dict[str, Any]:
    """Return the run as fields of JSON."""
    return {
        "command": list(run.argv),
        "output_log": str(run.folder.output_log),
        "command_end": run.end.name.lower(),
        "exit_code": run.exit_code,
        "watched_seconds": run.seconds,
        "first_step_seconds": run.first_step_seconds,
        "needed_force": run.needed_force,
        "survivors": [process.pid for process in run.survivors],
        "hindrances": [{"sign": hindrance.sign, "remedy": hindrance.remedy} for hindrance in run.hindrances],
        "files_written": [{"path": file.path, "bytes": file.size_bytes} for file in run.written.files],
        "files_written_count": run.written.number,
        "files_written_complete": run.written.is_complete,
        "ranks_read": len(files.ranks),
        "ranks_missing": files.missing_ranks,
        "problems": list(files.problems),
    }
