"""One explanation: starts the command with the hook, watches its ranks, agrees on an end, and ends it.

Order of a session:
1. The command starts in a session of its own, in the caller's folder, with the caller's environment and input; only
   PYTHONPATH is longer.
2. It is watched until every rank has enough steps, or enough time has gone by since the first one.
3. The plan names steps ahead of all ranks: a few to profile, and the last one, after which each rank ends itself.
4. What does not end by that is ended by SIGTERM, then by SIGKILL, and looked for.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from vitscale.errors import RequestError, VitscaleError, shown
from vitscale.explanation import reach
from vitscale.explanation.command_output import CommandOutput, OutputLog, OutputTargets, secret_values
from vitscale.explanation.command_run import CommandEnd, CommandRun, ExplainRequest, without_secrets
from vitscale.explanation.processes import CommandProcess, CommandProcesses
from vitscale.explanation.results_folder import (
    check_nameable,
    environment_with_hook,
    make_results_folder,
    place_hook,
    write_plan,
)
from vitscale.explanation.step_progress import StepProgress
from vitscale.explanation.written_files import WrittenFiles, files_written_since
from vitscale.hook.lines import HookPlan
from vitscale.present.units import counted

WARM_UP_STEPS = 3
"""First steps of a rank, in which the hook learns the model; they count for nothing."""
_LEAST_SECONDS = 5.0
"""Time after the first step that is always watched, unless less was asked for: stacks are sampled by time."""
_LEAD_SECONDS = 1.0
_FEWEST_LEAD_STEPS = 3
"""The plan names a step so far ahead of the foremost rank, for ranks write and read with a delay."""
_SECONDS_BETWEEN_LOOKS = 0.1
"""Time from one look at the ranks' files to the next."""
_SECONDS_BETWEEN_PROCESS_LOOKS = 2.0
"""The same for the command's processes, which costs more."""
_NOTICE_SECONDS = 30.0
"""Time without a step after which is said what may keep the hook from the ranks."""
_FEWEST_END_SECONDS = 60.0
"""Time that ranks have at least to reach the agreed step, and to write their profiles."""
_LAUNCHER_SECONDS = 20.0
"""Time that the launcher has to end once all ranks have."""
_GRACE_SECONDS = 10.0
"""Time from SIGTERM to SIGKILL."""
_LAST_OUTPUT_SECONDS = 2.0
"""Time for output that is still on its way when the command has ended."""
_LAST_LINES = 20
_OVERWRITE_NOTE = (
    "The program runs as it is: it may overwrite its own checkpoints and logs. Use a scratch output folder if that "
    "matters."
)

Announce = Callable[[str], None]
"""Prints a line for the one who waits."""


class ExplainFailed(VitscaleError):
    """The command gave nothing to explain: no rank took a step. Its processes are ended."""

    exit_code = 1


class ExplainInterrupted(VitscaleError):
    """Ctrl-C or SIGTERM before a step was seen: the command is ended."""

    exit_code = 130


class _ForcedEnd(NamedTuple):
    """The end of processes that did not end by themselves."""

    was_needed: bool
    survivors: tuple[CommandProcess, ...]


class RunningCommand:
    """The command, from its start to its end."""

    def __init__(self, request: ExplainRequest, targets: OutputTargets, say: Announce) -> None:
        """Make the results folder, place the hook, and start the command.

        Args:
            request: the command.
            targets: where its output goes, besides the log.
            say: prints a line for the one who waits.

        Raises:
            RequestError: the command cannot be run, or the results folder cannot be made; nothing was started.
        """
        self.request = request
        self._say = say
        check_runnable(request.argv)
        check_nameable(request.output)
        self._command_folder = Path.cwd()
        self.folder = make_results_folder(request.output)
        place_hook(self.folder)
        self._started_ns = self.folder.settings.stat().st_mtime_ns
        self._log = OutputLog(self.folder.output_log, secret_values(os.environ))
        say(_OVERWRITE_NOTE)
        self._output = CommandOutput(targets, self._log)
        self._began = time.monotonic()
        self._process = self._start()
        self._output.start()
        self._processes = CommandProcesses(self._process.pid, self.folder.hook)
        self._progress = StepProgress(self.folder.ranks)
        self._first_step_at: float | None = None
        self._reached_by_pid: dict[int, reach.ReachedProcess] = {}
        """Processes that were looked at, by id, for as long as no step was seen or a rank was missing."""
        self._next_process_look = 0.0
        self._has_noticed = False
        self._forced = _ForcedEnd(was_needed=False, survivors=())

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the command's first process, in a session of its own.

        Raises:
            RequestError: the system does not run it.
        """
        try:
            return subprocess.Popen(
                self.request.argv,
                stdout=self._output.stdout,
                stderr=self._output.stderr,
                env=environment_with_hook(os.environ, self.folder.hook),
                start_new_session=True,
            )
        except OSError as error:
            self._output.close_writers()
            self._log.close()
            raise _not_runnable(self.request.argv[0], error.strerror or str(error)) from None

    def watch(self) -> CommandEnd:
        """Watch the command until enough is known of it, and end it, or leave it running as the request says.

        Returns:
            How the watching ended. Whatever it is, no process of the command is left but where it runs on.
        """
        with _signals_as_interrupts():
            try:
                end = self._watch_steps()
            except KeyboardInterrupt:
                end = CommandEnd.INTERRUPTED
                self._say("Interrupted: ending the command (again: at once).")
            except BaseException:
                self._processes.kill(_GRACE_SECONDS)
                raise
            if end is not CommandEnd.KEPT:
                self._forced = self._end_remaining(end)
        return end

    def finish(self, end: CommandEnd) -> CommandRun:
        """Close the output and return what became of the command. Args: end: as `watch` returned it."""
        runs_on = end is CommandEnd.KEPT
        if not runs_on:
            self._process.poll()
            self._output.close(_LAST_OUTPUT_SECONDS)
        self._progress.update()
        return CommandRun(
            argv=without_secrets(self.request.argv, os.environ),
            folder=self.folder,
            end=end,
            exit_code=None if runs_on else self._process.returncode,
            seconds=time.monotonic() - self._began,
            first_step_seconds=self._seconds_to_first_step(),
            needed_force=self._forced.was_needed,
            survivors=self._forced.survivors,
            last_lines=tuple(self._log.last_lines(_LAST_LINES)),
            output_bytes=self._log.total_bytes,
            hindrances=tuple(self._hindrances()),
            reach=self._reach_sentences(),
            written=self._written_files(),
        )

    def wait(self) -> int:
        """Wait until a command that runs on has ended, and pass its output on; Ctrl-C and SIGTERM are passed to it.

        Returns:
            Its exit code, as a shell has it: 128 + N where signal N ended it.
        """
        with _signals_as_interrupts():
            while True:
                try:
                    code = self._process.wait()
                    break
                except KeyboardInterrupt as interrupt:
                    self._processes.signal(_signal_of(interrupt))
        self._output.close(_LAST_OUTPUT_SECONDS)
        return code if code >= 0 else 128 - code

    def _watch_steps(self) -> CommandEnd:
        """Watch until enough is known or the command has ended, and until the agreed end.

        Raises:
            KeyboardInterrupt: the user interrupts.
        """
        while not self._knows_enough():
            self._look()
            if self._has_ended():
                return CommandEnd.BY_ITSELF
            if self._is_overdue():
                self._look_at_reach()
                return CommandEnd.STARTED_TOO_LONG
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        return self._agree_on_end()

    def _look(self) -> None:
        """Read what the ranks wrote since the last look, and say what is new to the one who waits."""
        now_seconds = time.monotonic()
        seconds = now_seconds - self._began
        self._progress.update()
        if self._first_step_at is None and self._progress.has_steps:
            self._first_step_at = now_seconds
            self._say(f"First step after {seconds:.0f} s.")
        if now_seconds >= self._next_process_look:
            self._processes.note_descendants()
            if self._first_step_at is None:
                self._look_at_reach()
            self._next_process_look = now_seconds + _SECONDS_BETWEEN_PROCESS_LOOKS
        is_late = self._first_step_at is None and seconds > _NOTICE_SECONDS
        if is_late and not self._has_noticed:
            self._has_noticed = True
            self._say_what_hinders()

    def _say_what_hinders(self) -> None:
        """Say that no step was seen yet, and what may keep the hook from the ranks."""
        self._look_at_reach()
        self._say(f"No optimizer step seen after {_NOTICE_SECONDS:g} s; waiting on. {self._reach_sentences()}")

    def _look_at_reach(self) -> None:
        """Look at the environment and the libraries of the command's processes, and remember them."""
        for process in reach.looked_at(self._processes.live(), self.folder.hook):
            self._reached_by_pid[process.pid] = process

    def _reach_sentences(self) -> str:
        return reach.reach_sentences(self.request.argv, [*self._reached_by_pid.values()])

    def _knows_enough(self) -> bool:
        """Whether every rank has enough steps, or enough time has gone by since the first step."""
        if self._first_step_at is None:
            return False
        seconds = time.monotonic() - self._first_step_at
        if seconds >= self.request.seconds:
            return True
        has_steps = self._progress.fewest_steps >= self.request.steps + WARM_UP_STEPS
        return has_steps and seconds >= _LEAST_SECONDS

    def _has_ended(self) -> bool:
        """Whether the command's first process has failed, or has ended and with it the ranks, or all processes.

        A script that only starts others in the background ends before these do.
        """
        exit_code = self._process.poll()
        if exit_code is None:
            return False
        has_failed = exit_code != 0
        return has_failed or self._progress.all_ended or not self._processes.live()

    def _is_overdue(self) -> bool:
        """Whether the command has taken no step in the time that it has for its first."""
        return self._first_step_at is None and time.monotonic() - self._began > self.request.start_seconds

    def _agree_on_end(self) -> CommandEnd:
        """Write the plan for profile and end, and wait until all ranks have followed it, for a limited time."""
        if self._progress.is_missing_ranks:
            self._look_at_reach()
        step_seconds = self._progress.step_seconds
        lead = lead_steps(step_seconds)
        profile_from = self._progress.foremost_step + lead
        plan = HookPlan(profile_from=profile_from)
        last_step = profile_from + plan.profile_steps
        if not self.request.keep:
            plan = HookPlan(profile_from=profile_from, stop_after=last_step)
            self._say(f"Enough steps: the ranks end after step {last_step}.")
        write_plan(self.folder, plan)
        limit_seconds = max(_FEWEST_END_SECONDS, 4 * (lead + plan.profile_steps) * step_seconds)
        self._wait_for_ranks(last_step, limit_seconds)
        if self._progress.all_ended_as_agreed:
            return CommandEnd.AGREED_STEP
        if self._progress.all_ended or self._has_ended():
            return CommandEnd.BY_ITSELF  # before the agreed step
        return CommandEnd.KEPT if self.request.keep else CommandEnd.MISSED_STEP

    def _wait_for_ranks(self, last_step: int, seconds: float) -> None:
        """Wait until every rank has ended, or under --keep is past its last profiled step; for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._look()
            is_past = self.request.keep and self._progress.hindmost_step >= last_step
            if is_past or self._progress.all_ended or self._has_ended():
                return
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _end_remaining(self, end: CommandEnd) -> _ForcedEnd:
        """End what still runs: politely where ranks follow the plan, then by SIGTERM, then by SIGKILL."""
        try:
            if end is CommandEnd.INTERRUPTED and self._progress.has_steps:
                last_step = self._progress.foremost_step + lead_steps(self._progress.step_seconds)
                with suppress(OSError):  # a full disk: then signals end the ranks
                    write_plan(self.folder, HookPlan(stop_after=last_step))
                self._wait_for_ranks(last_step, _GRACE_SECONDS)
            return self._end_by_signals()
        except KeyboardInterrupt:
            return _ForcedEnd(was_needed=True, survivors=tuple(self._processes.kill(_GRACE_SECONDS)))

    def _end_by_signals(self) -> _ForcedEnd:
        """End the command's processes by signals, once the launcher has had time to end where all ranks have."""
        if self._progress.all_ended and self._wait_until_gone(_LAUNCHER_SECONDS):
            return _ForcedEnd(was_needed=False, survivors=())
        if not self._processes.live():
            return _ForcedEnd(was_needed=False, survivors=())
        self._say("Ending what still runs of the command by SIGTERM.")
        survivors = self._processes.end(_GRACE_SECONDS)
        return _ForcedEnd(was_needed=True, survivors=tuple(survivors))

    def _wait_until_gone(self, seconds: float) -> bool:
        """Wait until no process of the command is left, for at most `seconds`; return whether none is."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._process.poll()  # so that its first process is no zombie
            if not self._processes.live():
                return True
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        return False

    def _seconds_to_first_step(self) -> float | None:
        return None if self._first_step_at is None else self._first_step_at - self._began

    def _hindrances(self) -> list[reach.Hindrance]:
        """Return what may have kept the hook from ranks; nothing where all have written."""
        if self._progress.has_steps and not self._progress.is_missing_ranks:
            return []
        return reach.hindrances(self.request.argv, self._reached_by_pid.values())

    def _written_files(self) -> WrittenFiles:
        return files_written_since(self._command_folder, self._started_ns, besides=self.folder.root)


def lead_steps(step_seconds: float) -> int:
    """Return how many steps ahead of the foremost rank a plan names a step: those of a second, and at least three.

    Args:
        step_seconds: duration of a step; 0 where it is unknown.
    """
    if step_seconds <= 0:
        return _FEWEST_LEAD_STEPS
    return max(_FEWEST_LEAD_STEPS, round(_LEAD_SECONDS / step_seconds) + 1)


def no_step_error(run: CommandRun) -> VitscaleError:
    """Return the error for a command of which no rank took a step: how it ended, and the last that it printed."""
    if run.end is CommandEnd.INTERRUPTED:
        return ExplainInterrupted("interrupted before the first optimizer step; the command is ended")
    if run.end is CommandEnd.BY_ITSELF:
        failure = f"the command ended with exit code {run.exit_code} after {run.seconds:.1f} s, before a step was seen"
    else:
        failure = f"the command took no optimizer step in {run.seconds:.0f} s, and was ended"
    has_failed_itself = run.end is CommandEnd.BY_ITSELF and run.exit_code != 0
    details = [failure if has_failed_itself else f"{failure}. {run.reach}"]
    if run.last_lines:
        details += ["Its last lines:", *(f"  {line}" for line in run.last_lines)]
    output = counted(run.output_bytes, "byte")
    details.append(f"All of its output ({output}) is in {run.folder.output_log}")
    return ExplainFailed("\n".join(details))


def check_runnable(argv: tuple[str, ...]) -> None:
    """Refuse a command that is not there.

    Raises:
        RequestError: it has no words, or its program is not found.
    """
    example = "vitscale explain -- torchrun --nproc-per-node 2 train.py"
    if not argv or not argv[0]:
        raise RequestError("no command is given", next_step=f"Write it behind --: {example}")
    if any("\0" in word for word in argv):
        raise RequestError("a word of the command has a NUL in it")
    if shutil.which(argv[0]) is None:
        raise _not_runnable(argv[0], "there is no such program, or it may not be run")


def _not_runnable(program: str, reason: str) -> RequestError:
    """Return the refusal of a command whose program cannot be run."""
    next_step = "Write the command as you start it, with its program first"
    if " " in program:
        next_step = "Write its words without quotes around all of them: vitscale explain -- python train.py"
    elif Path(program).suffix == ".py":
        next_step = f"Name the interpreter too: vitscale explain -- python {program}"
    return RequestError(f"{shown(program)} cannot be run: {reason}", next_step=next_step)


@contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt in the block, as Ctrl-C does; outside the main thread nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    earlier_handlers = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in earlier_handlers.items():
            with suppress(TypeError):  # a handler that was not installed from Python
                signal.signal(number, handler)


def _signal_of(interrupt: KeyboardInterrupt) -> signal.Signals:
    """Return the signal that raised an interrupt in `_signals_as_interrupts`; SIGINT where Python itself did."""
    return signal.Signals(interrupt.args[0]) if interrupt.args else signal.SIGINT
