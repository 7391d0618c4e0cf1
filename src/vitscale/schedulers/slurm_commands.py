"""Slurm's own commands: asked by argv, answered in text, their refusals told in Slurm's words."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from vitscale.errors import shown
from vitscale.schedulers.base import JobState, SchedulerError, SchedulerMissingError, SchedulerSilentError

_ANSWER_SECONDS = 120.0
"""Slurm's commands give up by themselves, by default after some 10 s; this is for those that hang all the same."""
_SILENCE = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection (refused|timed out|reset)"
    r"|Zero Bytes were transmitted|standby mode|Unable to establish control|Slurm temporarily unable"
    r"|Resource temporarily unavailable|Unable to establish connection|Transport endpoint is not connected"
    r"|Communication connection failure",
    re.IGNORECASE,
)
"""What Slurm's commands say where slurmctld is down, restarting or overloaded: it passes."""
_FILTERS = ("SQUEUE_", "SCANCEL_", "SINFO_")
"""A user's own defaults for looking at the queue would hide jobs from us."""
_OURS_ALONE = ("SBATCH_ARRAY_INX", "SBATCH_JOB_NAME", "SBATCH_OUTPUT", "SBATCH_REQUEUE", "SBATCH_SIGNAL", "SBATCH_WAIT")
"""Variables would override what the script says of these; others (SBATCH_ACCOUNT) are the user's defaults."""


_UNDER_WAY = frozenset(
    {
        *("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "STAGE_OUT", "SIGNALING"),
        *("RESIZING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "POWER_UP_NODE"),
    }
)
"""States of `squeue` ("JOB STATE CODES") in which a job may still do something."""


def ask(*argv: str, cwd: Path | None = None) -> str:
    """What a Slurm command prints.

    Raises:
        SchedulerSilentError: slurmctld does not answer.
        SchedulerMissingError: the command is not installed.
        SchedulerError: it refuses.
    """
    own = {key: value for key, value in os.environ.items() if not key.startswith(_FILTERS) and key not in _OURS_ALONE}
    try:
        answer = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_SECONDS,
            check=False,
            cwd=cwd,
            env=own,
        )
    except subprocess.TimeoutExpired:
        raise SchedulerSilentError(f"{argv[0]} has not answered within {_ANSWER_SECONDS:g} s") from None
    except OSError as error:
        raise SchedulerMissingError(
            f"{argv[0]} cannot be run: {error.strerror}", next_step="Work on a machine where Slurm is installed"
        ) from None
    if answer.returncode == 0:
        return answer.stdout
    said = " ".join((answer.stderr or answer.stdout).split()) or f"exit code {answer.returncode}"
    if _SILENCE.search(said):
        raise SchedulerSilentError(f"slurmctld does not answer: {said}")
    raise SchedulerError(f"Slurm refuses `{argv[0]}`: {said}")


def submit(script: Path) -> str:
    """Submits a batch script; returns the job's number.

    Raises:
        SchedulerSilentError: no answer; the job may have been taken all the same.
        SchedulerError: it is refused.
    """
    said = ask("sbatch", "--parsable", str(script))
    # JOB, or JOB;CLUSTER; a site's plugins may print lines of their own before it.
    job_id = said.strip().rpartition("\n")[2].partition(";")[0]
    if not job_id.isdecimal():
        raise SchedulerError(f"sbatch does not say the job's number, but {shown(said)}")
    return job_id


def job_states(names: Sequence[str]) -> list[JobState]:
    """All that slurmctld knows of the jobs of these names, ended ones too for as long as it keeps them (MinJobAge)."""
    if not names:
        return []
    lines = ask(
        "squeue", "--noheader", "--array", "--states=all", "--format=%i|%j|%K|%T|%r", f"--name={','.join(names)}"
    )
    found = []
    for line in lines.splitlines():
        words = line.strip().split("|", 4)
        if len(words) == 5:
            job_id, name, element, state, reason = words
            found.append(
                JobState(
                    job_id,
                    name,
                    int(element) if element.isdecimal() else None,
                    state,
                    "" if reason in ("None", "(null)") else reason,
                    over=state not in _UNDER_WAY,
                )
            )
    return found


def steps_named(job_id: str, name: str) -> list[str]:
    """The steps of a job that have this name: "12.3"."""
    lines = ask("squeue", "--noheader", "--steps", "--format=%i|%j", f"--job={job_id}").splitlines()
    return [step for step, _, found in (line.strip().partition("|") for line in lines) if found == name]


def kill_steps(steps: Sequence[str]) -> None:
    """SIGKILL to every process of these steps, on all nodes."""
    ask("scancel", "--quiet", "--signal=KILL", *steps)


def host_names(compact: str) -> tuple[str, ...]:
    """`node[1-3,7]` as its four names."""
    return tuple(ask("scontrol", "show", "hostnames", compact).split())


def job_fields(job_id: str) -> dict[str, str]:
    """What `scontrol show job` says of one job: `KEY=value` words; of values with spaces the first word."""
    words = ask("scontrol", "--oneliner", "show", "job", job_id).split()
    return {key: value for key, _, value in (word.partition("=") for word in words)}
