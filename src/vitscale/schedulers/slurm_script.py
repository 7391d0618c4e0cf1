"""The batch script of a job: everything [slurm] says, quoted once for sbatch and once for bash."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping

from vitscale.errors import RequestError, shown
from vitscale.schedulers.base import BatchJob
from vitscale.study.sections import SlurmSection

WARNING_SECONDS = 60
"""So long before its time limit a job is told, at the latest; Slurm may do so up to a minute earlier still."""

_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@%+-]+")
_OPTION = re.compile(r"--(?P<name>[a-z][a-z0-9-]*)(=.*)?")
_MODULE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/+:@=~-]*")
_GPU_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FOLLOWS: Mapping[str, str] = {
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node", "cpus-per-task"), "it follows from each trial's world"),
    **dict.fromkeys(("array", "wait", "hold", "wrap"), "say slurm.jobs"),
    **dict.fromkeys(
        (
            "job-name",
            "output",
            "chdir",
            "signal",
            "requeue",
            "no-requeue",
            "parsable",
            "test-only",
            "open-mode",
            "clusters",
        ),
        "vitscale sets it, to find its jobs again",
    ),
    **{name: f"say slurm.{name}" for name in ("partition", "account", "qos", "time", "constraint", "reservation")},
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task"), "say slurm.gpus and slurm.gpu_type"),
}
"""Options that are not for `slurm.options`, and why."""


def batch_script(slurm: SlurmSection, job: BatchJob) -> str:
    """The whole script, which `sbatch` is given without further options.

    Raises:
        RequestError: a value cannot stand in a script, or an option is not for the user to set.
    """
    _check(slurm, job)
    numbered = "%A_%a" if job.elements is not None else "%j"
    # sbatch puts job numbers in for %j and the like, anywhere in the path.
    output = f"{str(job.results / 'jobs').replace('%', '%%')}/{job.name}-{numbered}.out"
    directives = [
        f"--job-name={job.name}",
        f"--chdir={job.cwd}",
        f"--output={output}",
        "--open-mode=append",
        # A run that a broken node has cut short is recorded, and done again by the next `vitscale run`.
        "--no-requeue",
        f"--signal=B:TERM@{_warning_seconds(slurm.time)}",
        *([f"--array=0-{job.elements - 1}"] if job.elements is not None else []),
        f"--nodes={job.world.nodes}",
        f"--ntasks-per-node={job.world.ranks_per_node}",
        f"--cpus-per-task={job.world.threads_per_rank}",
        *_gpus(slurm, job),
        *(
            f"--{key}={value}"
            for key in ("partition", "account", "qos", "time", "constraint", "reservation")
            if (value := getattr(slurm, key)) is not None
        ),
        *slurm.options,
    ]
    # In a container only the ranks run: the job's driver needs srun.
    python = sys.executable if slurm.container is not None else slurm.python or sys.executable
    driver = [python, "-m", "vitscale.runner.job", str(job.results), job.name]
    body = [
        *slurm.setup,
        *(f"module load {shlex.quote(module)} || exit 1" for module in slurm.modules),
        # In place of bash: it is the batch shell that Slurm signals.
        f"exec {shlex.join(driver)}",
    ]
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {_directive(text)}" for text in directives), "", *body, ""])


def _gpus(slurm: SlurmSection, job: BatchJob) -> list[str]:
    if not job.on_gpus or slurm.gpus == "none":
        return []
    kind = f"{slurm.gpu_type}:" if slurm.gpu_type is not None else ""
    count = f"{kind}{job.world.ranks_per_node}"
    return [f"--gpus-per-node={count}"] if slurm.gpus == "gpus-per-node" else [f"--gres=gpu:{count}"]


def _directive(text: str) -> str:
    """An option as sbatch's own reader of `#SBATCH` lines takes it: spaces part words there and `#` begins a comment,
    but for double quotes, in which a backslash keeps its neighbour. No shell sees these lines.
    """
    key, equals, value = text.partition("=")
    if not equals or _PLAIN.fullmatch(value):
        return text
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{key}="{escaped}"'


def _check(slurm: SlurmSection, job: BatchJob) -> None:
    """Refuses what would break a line, and what would contradict the script's own options."""
    texts = {f"slurm.{field}": value for field, value in slurm if isinstance(value, str)}
    for field in ("modules", "container_mounts", "options"):
        texts |= {f"slurm.{field}[{n}]": text for n, text in enumerate(getattr(slurm, field))}
    texts |= {"the results folder": str(job.results), "the working directory": str(job.cwd)}
    for where, text in texts.items():
        if not text.isprintable() or not text.strip():
            what = f"{where} is {shown(text)}, which cannot stand in a batch script"
            raise RequestError(what, next_step="Write one line of printable characters")
    if "\\" in str(job.results):
        what = f"the results folder {shown(str(job.results))} has a backslash in its path"
        raise RequestError(what, next_step="Slurm drops backslashes from paths: use a folder without one")
    for module in slurm.modules:
        if not _MODULE.fullmatch(module):
            raise RequestError(f"slurm.modules has {shown(module)}", valid=["NAME", "NAME/VERSION"])
    if slurm.gpu_type is not None and not _GPU_TYPE.fullmatch(slurm.gpu_type):
        raise RequestError(f"slurm.gpu_type is {shown(slurm.gpu_type)}", valid=["a name such as a100"])
    for option in slurm.options:
        match = _OPTION.fullmatch(option)
        if match is None:
            raise RequestError(
                f"slurm.options has {shown(option)}", valid=["--NAME", "--NAME=VALUE"], next_step="Write one each"
            )
        if match["name"] in _FOLLOWS:
            raise RequestError(f"slurm.options has {shown(option)}", next_step=f"Remove it: {_FOLLOWS[match['name']]}")


def _warning_seconds(limit: str | None) -> int:
    """A short job is not told at its very beginning."""
    return WARNING_SECONDS if limit is None else max(1, min(WARNING_SECONDS, seconds_of(limit) // 4))


def seconds_of(limit: str) -> int:
    """A span of time as Slurm writes it: `90` is minutes, `1:30` minutes and seconds, `1-2` a day and two hours."""
    days, dash, clock = limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86_400 + sum(part * unit for part, unit in zip(parts, units, strict=False))
