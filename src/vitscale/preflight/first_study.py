"""A first study: looks at what there is to run on (GPUs, Slurm, Open MPI, a hostfile), and writes a study for it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitscale.advice.study_text import toml_value
from vitscale.engines import ENGINES
from vitscale.errors import RequestError, VitscaleError, shown
from vitscale.launchers import find_launcher
from vitscale.machine.hardware import Machine, this_machine
from vitscale.machine.hosts import read_hostfile
from vitscale.present.units import counted
from vitscale.schedulers.slurm import ask
from vitscale.sources import SOURCES

Line = tuple[str, object, str]
"""A key, its value, and a comment on it."""

_HOSTFILES = ("hostfile", "hosts", "/job/hostfile")
"""Hostfiles, in the order in which they are looked for; the last is DeepSpeed's default."""
_MOST_CPU_RANKS = 4
_OF_PIXELS = ("ade20k", "synthetic-masks")
_OF_ANY_SIZE = ("ade20k", "folder", "hf", "shards")
_WITHOUT_FILES = ("digits", "synthetic", "synthetic-masks")
_USUAL_ROOT = "~/data"
"""Folder of images that the written study has where nobody names one."""
_GPUS = re.compile(r"\bgpu(?::[\w.-]+)*:(\d+)")


_SLOW: Line = ("# fast_bf16", False, "where these are no faster at bf16 than at fp32")


@dataclass(frozen=True)
class Where:
    """The hosts that a first study is to run on."""

    cores: int
    """Physical cores of one host; under Slurm the CPUs that sinfo gives."""
    gpus: int
    """GPUs of one host."""
    ranks_per_host: int
    hosts: int
    """Number of hosts; 1 under Slurm, where the study decides how many."""
    launch: tuple[Line, ...]
    slurm: tuple[Line, ...]
    told: str
    """The hosts in words."""

    @property
    def node(self) -> tuple[Line, ...]:
        """The lines of [node], under Slurm, where the machine that plans does not train; else empty."""
        lines: tuple[Line, ...] = (("cores", self.cores, "of one node, as sinfo tells"), ("gpus", self.gpus, ""), _SLOW)
        return lines if self.slurm else ()


def look_around(
    hostfile: Path | None, folder: Path, machine: Machine | None = None, study_folder: Path | None = None
) -> Where:
    """The hosts that there are to train on.

    These are the hosts of a hostfile that is given or lies in `folder`, else the nodes of a Slurm cluster whose login
    node this is, else this machine, or the allocation around it.

    Args:
        hostfile: a relative one is looked for in `folder`.
        folder: the working directory.
        machine: None: this machine.
        study_folder: folder of the study that is to be written, beside which it looks for a relative hostfile. None:
            `folder`.

    Raises:
        RequestError: the hostfile cannot be read.
    """
    machine = machine or this_machine()
    cores, gpus = machine.physical_cores, len(machine.gpus)
    inside = "SLURM_JOB_ID" in os.environ
    lying = [Path(name) for name in _HOSTFILES if (folder / name).is_file()] if not inside else []
    if (chosen := hostfile or next(iter(lying), None)) is not None:
        hosts = read_hostfile(folder / chosen)
        told = f"the {counted(len(hosts), 'host')} of {chosen}; this machine has {_having(cores, gpus)}"
        ranks = min((host.slots for host in hosts if host.slots is not None), default=gpus or cores)
        elsewhere = study_folder is not None and study_folder.resolve() != folder.resolve()
        written = (folder / chosen).absolute() if elsewhere else chosen
        launch: list[Line] = [("hostfile", str(written), "its hosts are reached by ssh")]
        return Where(cores, gpus, ranks, len(hosts), (*launch, *_open_mpi()), (), told)
    if not inside and not gpus and shutil.which("sbatch") and (partition := _partition()):
        name, cores, gpus = partition
        told = f"Slurm, from a login node; a node of {name} has {_having(cores, gpus)}"
        slurm: list[Line] = [("partition", name, "sinfo lists them"), ("time", "01:00:00", "of each job")]
        launch = [("scheduler", "slurm", "run submits jobs, and the same command again collects them")]
        launch = [*launch, ("launcher", "srun", "")]
        return Where(cores, gpus, gpus or min(cores, _MOST_CPU_RANKS), 1, tuple(launch), tuple(slurm), told)
    told = f"this machine: {_having(cores, gpus)}" + (", in an allocation of Slurm" if inside else "")
    return Where(cores, gpus, gpus or min(cores, _MOST_CPU_RANKS), 1, tuple(_open_mpi()), (), told)


def _having(cores: int, gpus: int) -> str:
    return f"{counted(cores, 'core')} and {counted(gpus, 'GPU') if gpus else 'no GPU'}"


def _open_mpi() -> list[Line]:
    """A comment line on Open MPI, where it is installed."""
    here = find_launcher("mpirun").unavailable() is None
    return [("# launcher", "mpirun", "Open MPI is here; by default local, of several hosts torchrun")] if here else []


def _partition() -> tuple[str, int, int] | None:
    """Name, cores and GPUs of the smallest nodes of the default partition (else the first); None where unknown."""
    try:
        rows = [line.strip().split("|") for line in ask("sinfo", "--noheader", "--format=%P|%c|%G").splitlines()]
    except VitscaleError:
        return None
    told = [(name, count.rstrip("+"), gres) for name, count, gres in (row for row in rows if len(row) == 3)]
    chosen = next((row for row in told if row[0].endswith("*")), told[0] if told else None)
    if chosen is None or not chosen[1].isdecimal() or not int(chosen[1]):
        return None
    return chosen[0].rstrip("*"), int(chosen[1]), sum(map(int, _GPUS.findall(chosen[2])))


@dataclass(frozen=True)
class Wishes:
    """What the study's author asks for; None: what fits."""

    model: str | None = None
    data: str | None = None
    root: str | None = None
    engine: str | None = None
    gpus: tuple[int, ...] | None = None


_OF_FILES = tuple(name for name in SOURCES if name not in (*_WITHOUT_FILES, "hf"))


def check_images(wishes: Wishes) -> None:
    """Refuses a path in place of a dataset's name, and images of files whose folder nobody names.

    Raises:
        RequestError: it says which options to give.
    """
    data = wishes.data
    if data is None or data in SOURCES:
        usual = Path(_USUAL_ROOT).expanduser()
        if data in _OF_FILES and wishes.root is None and not usual.is_dir():
            raise RequestError(
                f"--data {data} is given, and not where its files lie",
                next_step=f"Add --root: --data {data} --root /path/to/images",
            )
        return
    path = Path(data).expanduser()
    is_spelled_as_path = data.startswith(("/", "~", "./", "../")) or data in (".", "..")
    if not is_spelled_as_path and not path.is_dir():
        return  # a name that is not known: there is a message for it
    what = f"--data is the name of a dataset, and {shown(data)} is a path"
    if path.is_dir():
        raise RequestError(what, next_step=f"Write --data folder --root {shlex.quote(data)}")
    step = f"Write --data NAME --root {shlex.quote(data)}, once the path exists"
    raise RequestError(what, valid=[f"--data {name}" for name in _OF_FILES], next_step=step)


def rank_counts_for(where: Where) -> tuple[int, ...]:
    """Numbers of ranks that double up to one host, then numbers of whole hosts that double up to all."""
    each = where.ranks_per_host
    counts = {2**power for power in range(each.bit_length()) if 2**power <= each} | {each}
    counts |= {each * 2**power for power in range(where.hosts.bit_length()) if 2**power <= where.hosts}
    return tuple(sorted(counts | {each * where.hosts}))


def _usual_engine() -> str:
    return next(name for name, facts in ENGINES.items() if facts.usual)


def first_study(name: str, where: Where, wishes: Wishes, repeats: int = 3) -> str:
    """The study as TOML, with comments on the lines that its author may want to change.

    Raises:
        RequestError: a folder of images is given, and the images are of no folder.
    """
    data = wishes.data or ("synthetic" if where.gpus else "digits")
    if wishes.root is not None and data in _WITHOUT_FILES:
        raise RequestError(f"--root is given, and images of {data} are in no folder", next_step="Add --data folder")
    pixels = data in _OF_PIXELS
    small = wishes.model is None and not where.gpus
    model = wishes.model or ("swinv2-t" if pixels else "vit-ti16" if small else "vit-b16")
    size = 64 if small and pixels else 32 if small else 224
    shape: list[Line] = [("task", "segmentation", "a label for each pixel")] if pixels else []
    shape += [("image_size", size, "pixels a side")]
    if small and not pixels:
        shape += [("patch_size", 8, ""), ("layers", 4, "small, for processors; leave it out for the whole model")]
    images: list[Line] = [("name", data, "digits, synthetic, cifar10, cifar100, folder, shards, ...")]
    if wishes.root is not None or data not in _WITHOUT_FILES:
        images += [("root", wishes.root or _USUAL_ROOT, "the archive, or the folder with train/ and val/")]
    if data.startswith("synthetic") or data in _OF_ANY_SIZE:
        images += [("source_size", size, "at which images are made, or stored")]
    train: list[Line] = [
        ("engine", wishes.engine or _usual_engine(), ", ".join(ENGINES)),
        ("micro_batch", 64 if where.gpus else 16, "images per rank"),
        ("# precision", "bf16", "by default what the device is fast at"),
    ]
    counts = list(wishes.gpus or rank_counts_for(where))
    scaling: list[Line] = [
        ("mode", "strong-micro", "each rank keeps its batch; strong-global: all share one; weak"),
        ("gpus", counts, "ranks in all" + ("" if where.gpus else ", on CPU too")),
    ]
    measure: list[Line] = [
        ("steps", 50 if where.gpus else 20, "optimizer steps after warm-up; or epochs in [train]"),
        ("repeats", repeats, "whole runs: 2 or fewer tell no two things apart"),
    ]
    named: list[Line] = [("name", model, "vit-ti16 to vit-h14, swinv2-t to swinv2-l; or hf, factory"), *shape]
    sections = {"model": named, "data": images, "train": train, "scaling": scaling, "measure": measure}
    sections |= {"launch": [*where.launch], "slurm": [*where.slurm], "node": [*where.node]}
    sweep = [
        f"{'# [sweep]':<30}# what else varies: every combination is a curve",
        '# "train.engine" = ["ddp", "fsdp2"]',
    ]
    head = [f"# Written by vitscale init for {where.told}.", f"name = {toml_value(name)}"]
    body = [line for section, lines in sections.items() if lines for line in ("", f"[{section}]", *_written(lines))]
    return "\n".join([*head, *body, "", *sweep]) + "\n"


def _written(lines: Sequence[Line]) -> list[str]:
    settings = [(f"{key} = {toml_value(value)}", comment) for key, value, comment in lines]
    return [f"{setting:<30}# {comment}" if comment else setting for setting, comment in settings]
