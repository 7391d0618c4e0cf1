"""What became of the command, in sentences and as fields of JSON: how it ended, what it wrote, what was not reached."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vitscale.explanation.command_run import CommandEnd, CommandRun
from vitscale.explanation.rank_files import RankFiles
from vitscale.present.document import Bullets, Column, Section, table
from vitscale.present.units import counted, size

_MOST_NAMED_FILES = 3
"""Written files that the short form names."""
_MOST_NAMED_SURVIVORS = 5


def run_sentences(run: CommandRun, files: RankFiles) -> list[str]:
    """Return what a reader must know of the command's run; empty sentences are left out."""
    sentences = [*_sentences_on_end(run), *files.problems]
    if files.missing_ranks:
        sentences += [f"{hindrance.sign}. {hindrance.remedy}." for hindrance in run.hindrances]
    sentences.append(written_sentence(run))
    return [sentence for sentence in sentences if sentence]


def _sentences_on_end(run: CommandRun) -> Iterator[str]:
    """Yield how the command ended, where it was not as agreed, and what is left of it."""
    if run.end not in (CommandEnd.AGREED_STEP, CommandEnd.KEPT):
        code = "" if run.exit_code is None else f" (exit code {run.exit_code})"
        yield f"The command {run.end.value}{code}."
    if run.end is CommandEnd.AGREED_STEP and run.needed_force:
        yield "All ranks ended as agreed, but their launcher did not: it was ended by a signal."
    if run.survivors:
        named = ", ".join(f"{process.pid} ({process.program})" for process in run.survivors[:_MOST_NAMED_SURVIVORS])
        survivors = counted(len(run.survivors), "process", "processes")
        yield f"{survivors} of the command still there after SIGKILL: {named}."


def written_sentence(run: CommandRun) -> str:
    """Return a sentence on the files that the command wrote in its folder; empty where it wrote none."""
    written = run.written
    if not written.number:
        return "" if written.is_complete else "Not all of the folder was searched for written files."
    named = ", ".join(f"{file.path} ({size(file.size_bytes)})" for file in written.files[:_MOST_NAMED_FILES])
    others = written.number - min(written.number, _MOST_NAMED_FILES)
    more = f" and {counted(others, 'other')}" if others else ""
    searched = "" if written.is_complete else "; not all of the folder was searched"
    return f"Files that the program wrote in its folder: {named}{more}{searched}."


def run_section(run: CommandRun) -> Section:
    """Return the details of the run, folded: every listed file, and the command."""
    rows = [[file.path, size(file.size_bytes)] for file in run.written.files]
    facts = [
        f"Command: {' '.join(run.argv)}",
        f"Watched for {run.seconds:.0f} s; it {run.end.value}.",
        f"Its output: {run.folder.output_log} ({size(run.output_bytes)})",
    ]
    columns = [Column("file", words=True), Column("size")]
    blocks = (Bullets(tuple(facts)), table(columns, rows, title="Files that the program wrote"))
    return Section("The run", blocks if rows else blocks[:1], folded=True)


def run_fields(run: CommandRun, files: RankFiles) -> dict[str, Any]:
    """Return the run as fields of JSON."""
    return {
        "command": list(run.argv),
        "results": str(run.folder.root),
        "output_log": str(run.folder.output_log),
        "command_end": run.end.name.lower(),
        "exit_code": run.exit_code,
        "watched_seconds": run.seconds,
        "first_step_seconds": run.first_step_seconds,
        "needed_force": run.needed_force,
        "survivors": [process.pid for process in run.survivors],
        "hindrances": [{"sign": hindrance.sign, "remedy": hindrance.remedy} for hindrance in run.hindrances],
        "written_files": [{"path": file.path, "bytes": file.size_bytes} for file in run.written.files],
        "written_file_count": run.written.number,
        "written_files_complete": run.written.is_complete,
        "ranks_read": len(files.ranks),
        "ranks_missing": files.missing_ranks,
        "problems": list(files.problems),
    }
