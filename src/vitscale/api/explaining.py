"""explain: why a training step takes as long as it does, by a command as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from typing_extensions import override

from vitscale.api.arguments import StrPath, path_or_none, positive, progress_console
from vitscale.errors import RequestError
from vitscale.explanation.answer import ExplainAnswer, explain_ranks
from vitscale.explanation.command_output import OutputTargets
from vitscale.explanation.command_run import CommandEnd, CommandRun, ExplainRequest
from vitscale.explanation.rank_files import RankFiles, read_rank_files
from vitscale.explanation.run_words import run_fields, session_facts
from vitscale.explanation.session import RunningCommand, no_step_error
from vitscale.explanation.words import answer_document, answer_fields
from vitscale.present.document import Document
from vitscale.present.verb_result import VerbResult

_MOST_STEPS = 100_000
_MOST_SECONDS = 7 * 86_400.0


@dataclass(frozen=True, repr=False)
class ExplainResult(VerbResult):
    """Where a command's training step spends its time."""

    answer: ExplainAnswer
    """The parts of a step, and what costs most."""
    run: CommandRun
    """What became of the command, and where its records are."""
    files: RankFiles
    """What its ranks wrote."""
    _command: RunningCommand | None = None
    """The command, where it runs on."""

    verb = "explain"
    unread = None

    @property
    def was_interrupted(self) -> bool:
        """Whether the user interrupted it, so that it rests on fewer steps than were asked for."""
        return self.run.end is CommandEnd.INTERRUPTED

    @property
    def runs_on(self) -> bool:
        """Whether the command was left running (`keep`)."""
        return self._command is not None

    def wait(self) -> int:
        """Wait until a command that was left running has ended, and pass its output on meanwhile.

        Returns:
            Its exit code, as a shell has it: 128 + N where signal N ended it.

        Raises:
            RequestError: it was not left running.
        """
        if self._command is None:
            raise RequestError("the command has ended already")
        return self._command.wait()

    @property
    @override
    def summary(self) -> str:
        return f"{self.answer.summary}, in {self.run.folder.root}"

    @override
    def _answer_fields(self) -> Mapping[str, Any]:
        answer = answer_fields(self.answer, session_facts(self.run, self.files))
        return {**answer, **run_fields(self.run, self.files)}

    @override
    def _answer_document(self) -> Document:
        return answer_document(self.answer, session_facts(self.run, self.files))


def explain(
    command: Sequence[str],
    *,
    output: StrPath | None = None,
    steps: int = 30,
    seconds: float = 60.0,
    keep: bool = False,
    start_seconds: float = 600.0,
    stdout: int | None = None,
    stderr: int | None = None,
    console: Console | None = None,
) -> ExplainResult:
    """Explains why a training is slow: runs its command as it is, watches each rank from inside, and ends it.

    The program may overwrite its own checkpoints and logs, as always when it runs.

    Args:
        command: the command's words, as ["torchrun", "--nproc-per-node", "2", "train.py"]; no shell reads them.
        output: the results folder, which must be missing or empty; None: ./vitscale-explain-1, or the next number.
        steps: steps of each rank that are enough.
        seconds: time after the first step that is enough, where there are fewer steps.
        keep: leave the command running once enough is known; `ExplainResult.wait` waits for its end, and this process
            must stay until then, for it passes the command's output on.
        start_seconds: time that the command has until its first step.
        stdout: file descriptor that the command's standard output is passed on to; None: it is in the log alone.
        stderr: the same for its standard error.
        console: where a line for the one who waits goes; None: standard error.

    Returns:
        Where the time goes. Files of the results folder: `output.log`, `explain.json`, `explain.md`.

    Raises:
        RequestError: the command cannot be run, or the results folder cannot be made; nothing was started.
        VitscaleError: no rank took a step, or it was interrupted before; all processes of the command are ended.
    """
    progress = progress_console(console)

    def say(line: str) -> None:
        progress.print(f"vitscale: {line}", markup=False, highlight=False, soft_wrap=True)

    request = ExplainRequest(
        argv=_words(command),
        output=path_or_none(output),
        steps=_step_count(steps),
        seconds=_limited(seconds, "--seconds"),
        keep=keep,
        start_seconds=_limited(start_seconds, "--start-seconds"),
    )
    running = RunningCommand(request, OutputTargets(stdout, stderr), say)
    run = running.finish(running.watch())
    runs_on = run.end is CommandEnd.KEPT
    try:
        return _explained(run, running if runs_on else None)
    except BaseException:
        if runs_on:  # without this process, which passes its output on, its next print would fail
            say("There is no answer; the command runs on, and its output is passed on until it ends.")
            running.wait()
        raise


def _explained(run: CommandRun, running: RunningCommand | None) -> ExplainResult:
    """Return why the training of a command that was watched is as fast as it is, and store it.

    Args:
        run: what became of the command.
        running: the command, where it runs on.

    Raises:
        VitscaleError: no rank took a step.
    """
    files = read_rank_files(run.folder)
    if not files.has_steps:
        raise no_step_error(run)
    answer = explain_ranks(files.ranks, run.folder.traces)
    result = ExplainResult(answer, run, files, running)
    _store(result)
    return result


def _words(command: Sequence[str]) -> tuple[str, ...]:
    """Return the command's words.

    Raises:
        RequestError: it is one text, which only a shell could take apart.
    """
    if isinstance(command, str):
        raise RequestError("the command is one text", next_step='Give its words: ["torchrun", "train.py"]')
    return tuple(map(str, command))


def _step_count(steps: int) -> int:
    """Return the number of steps.

    Raises:
        RequestError: it cannot be.
    """
    if not 1 <= steps <= _MOST_STEPS:
        raise RequestError(f"--steps: {steps} cannot be", valid=[f"1 to {_MOST_STEPS:,}"])
    return steps


def _limited(seconds: float, option: str) -> float:
    """Return a time.

    Raises:
        RequestError: it is not above 0, or more than a week.
    """
    positive(seconds, option, most=_MOST_SECONDS)
    return seconds


def _store(result: ExplainResult) -> None:
    """Write the answer into the results folder, as JSON and as text; a disk that is full loses no answer."""
    root = result.run.folder.root
    try:
        (root / "explain.json").write_text(result.to_json(), encoding="utf-8")
        (root / "explain.md").write_text(result.to_markdown(), encoding="utf-8")
    except OSError:
        return
