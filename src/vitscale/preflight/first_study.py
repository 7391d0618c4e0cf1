"""A first study: looks at what there is to run on (GPUs, Slurm, Open MPI, a hostfile), and writes a study for it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from vitscale.advice.study_text import toml_value
from vitscale.engines import ENGINES
from vitscale.errors import RequestError, VitscaleError, shown
from vitscale.launchers.mpirun import mpirun_name
from vitscale.machine.batch_systems import SLURM, BatchSystemFacts, system_of_job
from vitscale.machine.hardware import Machine, this_machine
from vitscale.machine.hosts import read_hostfile
from vitscale.present.units import counted
from vitscale.schedulers.slurm import ask
from vitscale.sources import SOURCES


class StudyLine(NamedTuple):
    """A line of a study: a key, its value, and a comment on it."""

    key: str
    """Begins with "# " in a line that is itself a comment."""
    value: object
    comment: str = ""


_USUAL_HOSTFILES = ("hostfile", "hosts", "/job/hostfile")
"""Hostfiles, in the order in which they are looked for; the last is DeepSpeed's default."""
_MOST_CPU_RANKS = 4
_DATASETS_WITH_PIXEL_LABELS = ("ade20k", "synthetic-masks")
"""Datasets with a label for each pixel."""
_DATASETS_OF_ANY_SIZE = ("ade20k", "folder", "hf", "shards")
"""Datasets whose images have no size of their own."""
_DATASETS_WITHOUT_FILES = ("digits", "synthetic", "synthetic-masks")
"""Datasets that need no folder."""
_USUAL_ROOT = "~/data"
"""Folder of images that the written study has where nobody names one."""
_GPU_RESOURCE = re.compile(r"\bgpu(?::[\w.-]+)*:(\d+)")
"""A type of GPU and its number in sinfo's list of a node's resources: "gpu:4", "gpu:a100:4"."""


@dataclass(frozen=True)
class StudyMachines:
    """The hosts that a first study is to run on."""

    cores: int
    """Physical cores of one host; under Slurm the CPUs that sinfo gives."""
    gpus: int
    """GPUs of one host."""
    ranks_per_host: int
    hosts: int
    """Number of hosts; 1 under Slurm, where the study decides how many."""
    launch: tuple[StudyLine, ...]
    slurm: tuple[StudyLine, ...]
    description: str
    """The hosts in words."""

    @property
    def node(self) -> tuple[StudyLine, ...]:
        """The lines of [node], under Slurm, where the machine that plans does not train; else empty."""
        if not self.slurm:
            return ()
        return (
            StudyLine("cores", self.cores, "of one node, as sinfo tells"),
            StudyLine("gpus", self.gpus),
            StudyLine("# fast_bf16", False, "where these are no faster at bf16 than at fp32"),
        )


def look_around(
    hostfile: Path | None, folder: Path, machine: Machine | None = None, study_folder: Path | None = None
) -> StudyMachines:
    """Find the hosts that there are to train on.

    These are the hosts of a hostfile that is given or lies in `folder`. Without one they are the nodes of a Slurm
    cluster, where this is its login node; else this machine alone, or its share in the allocation around it.

    Args:
        hostfile: path of a hostfile; a relative one is looked for in `folder`.
        folder: the working directory.
        machine: the machine that looks. None: this machine.
        study_folder: folder of the study that is to be written. None: `folder`. A study looks for a relative hostfile
            in its own folder, so that a study elsewhere gets the absolute path.

    Raises:
        RequestError: the hostfile cannot be read.
    """
    machine = machine or this_machine()
    system = system_of_job(os.environ)
    if hostfile is None and system is None:
        hostfile = _hostfile_in(folder)
    if hostfile is not None:
        return _hosts_of_file(hostfile, folder, machine, study_folder)
    is_login_node = system is None and not machine.gpus and shutil.which("sbatch") is not None
    partition = _default_partition() if is_login_node else None
    if partition is not None:
        return _hosts_of_partition(partition)
    return _this_machine_alone(machine, system)


def _this_machine_alone(machine: Machine, system: BatchSystemFacts | None) -> StudyMachines:
    """Return this machine as the only host. Args: system: whose job this process runs in; None outside jobs."""
    cores = machine.physical_cores
    gpus = len(machine.gpus)
    allocation = "" if system is None else f", in an allocation of {system.title}"
    return StudyMachines(
        cores,
        gpus,
        ranks_per_host=gpus or min(cores, _MOST_CPU_RANKS),
        hosts=1,
        launch=tuple(_mpi_line()),
        slurm=(),
        description=f"this machine: {_resources_text(cores, gpus)}{allocation}",
    )


def _hostfile_in(folder: Path) -> Path | None:
    """Return the first hostfile that lies in the folder, by the usual names."""
    for name in _USUAL_HOSTFILES:
        if (folder / name).is_file():
            return Path(name)
    return None


def _hosts_of_file(hostfile: Path, folder: Path, machine: Machine, study_folder: Path | None) -> StudyMachines:
    """Return the hosts of a hostfile, taken to be like this machine. Arguments as of `look_around`."""
    hosts = read_hostfile(folder / hostfile)
    cores = machine.physical_cores
    gpus = len(machine.gpus)
    slots = [host.slots for host in hosts if host.slots is not None]
    study_is_elsewhere = study_folder is not None and study_folder.resolve() != folder.resolve()
    written_path = (folder / hostfile).absolute() if study_is_elsewhere else hostfile
    return StudyMachines(
        cores,
        gpus,
        ranks_per_host=min(slots, default=gpus or cores),
        hosts=len(hosts),
        launch=(StudyLine("hostfile", str(written_path), "its hosts are reached by ssh"), *_mpi_line()),
        slurm=(),
        description=f"the {counted(len(hosts), 'host')} of {hostfile}; this machine has {_resources_text(cores, gpus)}",
    )


def _hosts_of_partition(partition: _Partition) -> StudyMachines:
    """Return the nodes of a Slurm cluster, seen from a login node."""
    cores = partition.cores
    gpus = partition.gpus
    return StudyMachines(
        cores,
        gpus,
        ranks_per_host=gpus or min(cores, _MOST_CPU_RANKS),
        hosts=1,
        launch=(
            StudyLine("scheduler", SLURM.name, "run submits jobs, and the same command again collects them"),
            StudyLine("launcher", "srun"),
        ),
        slurm=(
            StudyLine("partition", partition.name, "sinfo lists them"),
            StudyLine("time", "01:00:00", "of each job"),
        ),
        description=f"Slurm, from a login node; a node of {partition.name} has {_resources_text(cores, gpus)}",
    )


def _resources_text(cores: int, gpus: int) -> str:
    """Return "64 cores and 8 GPUs"."""
    gpu_words = counted(gpus, "GPU") if gpus else "no GPU"
    return f"{counted(cores, 'core')} and {gpu_words}"


def _mpi_line() -> list[StudyLine]:
    """Return a comment line on the installed MPI; none where there is none."""
    name = mpirun_name()
    if name is None:
        return []
    return [StudyLine("# launcher", "mpirun", f"{name} is here; by default local, of several hosts torchrun")]


class _Partition(NamedTuple):
    """A partition of Slurm, with the resources of one of its nodes."""

    name: str
    cores: int
    gpus: int


def _default_partition() -> _Partition | None:
    """Return the smallest nodes of the default partition (else of the first); None where they are unknown."""
    try:
        lines = ask("sinfo", "--noheader", "--format=%P|%c|%G").splitlines()
    except VitscaleError:
        return None
    rows = [line.strip().split("|") for line in lines]  # such as ["main*", "64+", "gpu:a100:4"]
    whole_rows = [row for row in rows if len(row) == 3]
    if not whole_rows:
        return None
    default_rows = [row for row in whole_rows if row[0].endswith("*")]
    name, cores, resources = (default_rows or whole_rows)[0]
    fewest_cores = cores.rstrip("+")  # "64+": the nodes differ, and this is the smallest
    if not fewest_cores.isdecimal() or int(fewest_cores) == 0:
        return None
    gpu_counts = [int(count) for count in _GPU_RESOURCE.findall(resources)]
    return _Partition(name.rstrip("*"), int(fewest_cores), gpus=sum(gpu_counts))


@dataclass(frozen=True)
class Wishes:
    """The wishes of the study's author; None: what fits."""

    model: str | None = None
    data: str | None = None
    root: str | None = None
    engine: str | None = None
    gpus: tuple[int, ...] | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    """Dotted fields that stand in a file of another program (`init --from`), with their values."""


_DATASETS_WITH_FILES = tuple(name for name in SOURCES if name not in (*_DATASETS_WITHOUT_FILES, "hf"))
"""Datasets whose files lie in a folder that the user has."""


def check_images(wishes: Wishes) -> None:
    """Refuse a path where `--data` needs a dataset's name, and a dataset of files without the folder of these files.

    Raises:
        RequestError: it says which options to give.
    """
    if wishes.data is None:
        return
    if wishes.data in SOURCES:
        _require_root(wishes.data, wishes.root)
    else:
        _refuse_path(wishes.data)


def _require_root(dataset: str, root: str | None) -> None:
    """Refuse a dataset of files where neither `--root` names their folder nor the usual folder exists.

    Raises:
        RequestError: the folder is missing.
    """
    is_found = root is not None or Path(_USUAL_ROOT).expanduser().is_dir()
    if dataset in _DATASETS_WITH_FILES and not is_found:
        raise RequestError(
            f"--data {dataset} is given, and not where its files lie",
            next_step=f"Add --root: --data {dataset} --root /path/to/images",
        )


def _refuse_path(data: str) -> None:
    """Refuse a value of `--data` that is a path. An unknown name passes: the study's own check refuses it.

    Raises:
        RequestError: the value is a path.
    """
    message = f"--data is the name of a dataset, and {shown(data)} is a path"
    if Path(data).expanduser().is_dir():
        raise RequestError(message, next_step=f"Write --data folder --root {shlex.quote(data)}")
    is_spelled_as_path = data.startswith(("/", "~", "./", "../")) or data in (".", "..")
    if is_spelled_as_path:
        raise RequestError(
            message,
            valid=[f"--data {name}" for name in _DATASETS_WITH_FILES],
            next_step=f"Write --data NAME --root {shlex.quote(data)}, once the path exists",
        )


def rank_counts_for(machines: StudyMachines) -> tuple[int, ...]:
    """Return numbers of ranks that double up to one host, then numbers of whole hosts that double up to all.

    Example: on 3 hosts of 6 ranks 1, 2, 4, 6, 12 and 18.
    """
    per_host = machines.ranks_per_host
    on_one_host = [*_powers_of_two(per_host), per_host]
    on_hosts = [per_host * hosts for hosts in (*_powers_of_two(machines.hosts), machines.hosts)]
    return tuple(sorted({*on_one_host, *on_hosts}))


def _powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4, ... up to the limit."""
    return [1 << power for power in range(limit.bit_length())]


def _usual_engine() -> str:
    """Return the engine of studies that name none."""
    return next(name for name, facts in ENGINES.items() if facts.usual)


def first_study(name: str, machines: StudyMachines, wishes: Wishes, repeats: int = 3) -> str:
    """Return the study as TOML, with comments on the lines that its author may want to change.

    Raises:
        RequestError: a folder of images is given, and the images are of no folder.
    """
    data = wishes.data or ("synthetic" if machines.gpus else "digits")
    if wishes.root is not None and data in _DATASETS_WITHOUT_FILES:
        raise RequestError(f"--root is given, and images of {data} are in no folder", next_step="Add --data folder")
    image_size = _image_size(data, is_small=_is_small(machines, wishes))
    sections = {
        "model": _model_lines(data, machines, wishes, image_size),
        "data": _data_lines(data, wishes, image_size),
        "train": _train_lines(machines, wishes),
        "parallel": (),
        "scaling": _scaling_lines(machines, wishes),
        "measure": _measure_lines(machines, repeats),
        "launch": machines.launch,
        "slurm": machines.slurm,
        "node": machines.node,
    }
    lines = [f"# Written by vitscale init for {machines.description}.", f"name = {toml_value(name)}"]
    for section, study_lines in sections.items():
        all_lines = _with_settings(study_lines, section, wishes.settings)
        if all_lines:
            lines += ["", f"[{section}]", *map(_study_line_text, all_lines)]
    lines += [
        "",
        f"{'# [sweep]':<{_COMMENT_COLUMN}}# what else varies: every combination is a curve",
        '# "train.engine" = ["ddp", "fsdp2"]',
    ]
    return "\n".join(lines) + "\n"


def _with_settings(lines: Sequence[StudyLine], section: str, settings: Mapping[str, object]) -> list[StudyLine]:
    """Return a section's lines with the settings of another program's file, which replace lines of their keys."""
    own_settings = {
        dotted.partition(".")[2]: value for dotted, value in settings.items() if dotted.partition(".")[0] == section
    }
    kept = [line for line in lines if line.key.removeprefix("# ") not in own_settings]
    return [*kept, *(StudyLine(key, value, "of the file") for key, value in own_settings.items())]


def _is_small(machines: StudyMachines, wishes: Wishes) -> bool:
    """Whether the study trains a model that was made small for processors: none is asked for, and there is no GPU."""
    return wishes.model is None and not machines.gpus


def _image_size(data: str, *, is_small: bool) -> int:
    """Return the pixels a side at which images are trained on."""
    if not is_small:
        return 224
    return 64 if data in _DATASETS_WITH_PIXEL_LABELS else 32


def _model_lines(data: str, machines: StudyMachines, wishes: Wishes, image_size: int) -> list[StudyLine]:
    """Return the lines of [model]."""
    has_pixel_labels = data in _DATASETS_WITH_PIXEL_LABELS
    is_small = _is_small(machines, wishes)
    usual_vit = "vit-ti16" if is_small else "vit-b16"
    usual_model = "swinv2-t" if has_pixel_labels else usual_vit
    lines = [
        StudyLine("name", wishes.model or usual_model, "vit-ti16 to vit-h14, swinv2-t to swinv2-l; or hf, factory")
    ]
    if has_pixel_labels:
        lines.append(StudyLine("task", "segmentation", "a label for each pixel"))
    lines.append(StudyLine("image_size", image_size, "pixels a side"))
    if is_small and not has_pixel_labels:
        lines += [
            StudyLine("patch_size", 8),
            StudyLine("layers", 4, "small, for processors; leave it out for the whole model"),
        ]
    return lines


def _data_lines(data: str, wishes: Wishes, image_size: int) -> list[StudyLine]:
    """Return the lines of [data]."""
    lines = [StudyLine("name", data, "digits, synthetic, cifar10, cifar100, folder, shards, ...")]
    if wishes.root is not None or data not in _DATASETS_WITHOUT_FILES:
        root = wishes.root or _USUAL_ROOT
        lines.append(StudyLine("root", root, "the archive, or the folder with train/ and val/"))
    if data.startswith("synthetic") or data in _DATASETS_OF_ANY_SIZE:
        lines.append(StudyLine("source_size", image_size, "at which images are made, or stored"))
    return lines


def _train_lines(machines: StudyMachines, wishes: Wishes) -> list[StudyLine]:
    """Return the lines of [train]."""
    return [
        StudyLine("engine", wishes.engine or _usual_engine(), ", ".join(ENGINES)),
        StudyLine("micro_batch", 64 if machines.gpus else 16, "images per rank"),
        StudyLine("# precision", "bf16", "by default what the device is fast at"),
    ]


def _scaling_lines(machines: StudyMachines, wishes: Wishes) -> list[StudyLine]:
    """Return the lines of [scaling]."""
    rank_counts = list(wishes.gpus or rank_counts_for(machines))
    return [
        StudyLine("mode", "strong-micro", "each rank keeps its batch; strong-global: all share one; weak"),
        StudyLine("gpus", rank_counts, "ranks in all" if machines.gpus else "ranks in all, on CPU too"),
    ]


def _measure_lines(machines: StudyMachines, repeats: int) -> list[StudyLine]:
    """Return the lines of [measure]."""
    return [
        StudyLine("steps", 50 if machines.gpus else 20, "optimizer steps after warm-up; or epochs in [train]"),
        StudyLine("repeats", repeats, "whole runs: 2 or fewer tell no two things apart"),
    ]


_COMMENT_COLUMN = 30
"""Column of the comments beside settings."""


def _study_line_text(line: StudyLine) -> str:
    """Return a line as it stands in the file."""
    setting = f"{line.key} = {toml_value(line.value)}"
    return f"{setting:<{_COMMENT_COLUMN - 1}} # {line.comment}" if line.comment else setting
