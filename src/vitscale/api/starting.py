"""init: a first study for the machines that are there."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitscale import runner
from vitscale.api.arguments import StrPath, path_of, path_or_none, rank_counts
from vitscale.api.new_files import write_new
from vitscale.engines import ENGINES
from vitscale.errors import RequestError, shown
from vitscale.preflight.first_study import (
    StudyMachines,
    Wishes,
    check_images,
    first_study,
    look_around,
    rank_counts_for,
)
from vitscale.preflight.foreign_file import ForeignSettings, read_foreign
from vitscale.study.file import StudyFile
from vitscale.study.schema import study_schema

_SCHEMA_FILE = "study.schema.json"
_MOST_NAME_LETTERS = 100


@dataclass(frozen=True)
class InitResult:
    """A first study that is written."""

    study: Path
    """The study file; its schema lies beside it."""
    hosts: str
    """The hosts that it is for, in words."""
    runs: int
    """Runs of the study."""
    uncarried: tuple[str, ...] = ()
    """Settings of `from_file` that the study does not take over as they stand, each with the reason."""


def init(
    output: StrPath = "study.toml",
    *,
    model: str | None = None,
    data: str | None = None,
    root: str | None = None,
    engine: str | None = None,
    gpus: Sequence[int] | int | None = None,
    hostfile: StrPath | None = None,
    from_file: StrPath | None = None,
    where: StudyMachines | None = None,
) -> InitResult:
    """Writes a first study for this machine, its hostfile or its Slurm. It asks nothing: what is missing is an error.

    Args:
        output: the study file to write, which must not be there yet.
        model: vit-ti16 ... vit-h14, swinv2-t ... swinv2-l; None: by what the machine has.
        data: digits, synthetic, cifar10, folder, ...; None: digits, on GPUs synthetic.
        root: the folder of these images.
        engine: ddp, fsdp2, deepspeed, ...; None: by what the machine has.
        gpus: rank counts; None: doublings up to all there are.
        hostfile: hosts to run on: a file with one `NAME slots=N` a line.
        from_file: a configuration to take over: DeepSpeed's JSON, or the YAML of `accelerate launch`. What is given
            here besides comes before it.
        where: the machines, where `machines_for` has looked at them already.

    Returns:
        The file, the hosts that it is for, and its number of runs.

    Raises:
        RequestError: the file is there already, an argument is wrong, or nobody says where the images lie; the message
            names the argument.

    Example:
        >>> from pathlib import Path
        >>> Path("first.toml").unlink(missing_ok=True)
        >>> vitscale.init("first.toml", model="vit-ti16", data="digits", engine="ddp", gpus=[1]).runs
        3
    """
    file = path_of(output)
    machines = machines_for(file, hostfile) if where is None else where
    check_images(Wishes(data=data, root=root))
    foreign = None if from_file is None else _with_engine(read_foreign(path_of(from_file), file), engine)
    counts = rank_counts(gpus) or _counts_up_to(foreign) or usual_counts(machines)
    root_in_study = None if root is None else _root_in_study(root, file)
    settings = {} if foreign is None else foreign.fields
    wishes = Wishes(model, data, root_in_study, engine, counts, settings)
    text = f"#:schema {_SCHEMA_FILE}\n{first_study(_study_name(file), machines, wishes)}"
    planned = runner.plan(StudyFile.checked(file, text))
    write_new(file, text)
    schema = file.parent / _SCHEMA_FILE
    if not schema.exists():
        write_new(schema, json.dumps(study_schema(), indent=1) + "\n")
    uncarried = () if foreign is None else foreign.uncarried
    return InitResult(file, machines.description, len(planned.tasks), uncarried)


def _counts_up_to(foreign: ForeignSettings | None) -> tuple[int, ...]:
    """Return rank counts that double up to those of another program's file; empty where it does not say.

    Counts that a replica for each host does not divide are left out.
    """
    if foreign is None:
        return ()
    engine = foreign.fields.get("train.engine")
    if isinstance(engine, str) and ENGINES[engine].alone:
        return (1,)
    if foreign.ranks is None:
        return ()
    replicas = foreign.fields.get("parallel.replicate", 1)
    smallest = replicas if isinstance(replicas, int) else 1
    counts = {foreign.ranks}
    count = smallest
    while count < foreign.ranks:
        counts.add(count)
        count *= 2
    return tuple(sorted(counts))


_SETTINGS_OF_ANY_ENGINE = ("train.precision", "train.device", "scaling.gpus_per_node")


def _with_engine(foreign: ForeignSettings, engine: str | None) -> ForeignSettings:
    """Return the settings of another program's file where another engine than its own may be asked for.

    What belongs to its engine is then not taken over, and the result says so of each setting.
    """
    own_engine = foreign.fields.get("train.engine")
    if engine is None or engine == own_engine:
        return foreign
    kept = {dotted: value for dotted, value in foreign.fields.items() if dotted in _SETTINGS_OF_ANY_ENGINE}
    dropped = [
        f"{dotted} = {value}: it belongs to the engine {own_engine}, and {engine} is asked for"
        for dotted, value in foreign.fields.items()
        if dotted not in kept and dotted != "train.engine"
    ]
    return foreign._replace(fields=kept, uncarried=(*foreign.uncarried, *dropped))


def machines_for(output: StrPath, hostfile: StrPath | None = None) -> StudyMachines:
    """Look at the machines for a study that is to be written.

    Raises:
        RequestError: the study is there already, or the hostfile cannot be used.
    """
    file = path_of(output)
    if file.exists() and str(file) != "-":
        raise RequestError(f"{shown(str(file))} is there already", next_step="Name another file with -o")
    return look_around(path_or_none(hostfile), Path.cwd(), study_folder=file.parent)


def usual_counts(machines: StudyMachines) -> tuple[int, ...]:
    """Return rank counts that suit these machines: doublings up to all there are."""
    return rank_counts_for(machines)


def _root_in_study(root: str, study: Path) -> str:
    """Return the folder of the images as a study names it: paths in a study start in the study's own folder."""
    if root.startswith("~") or Path(root).is_absolute():
        return root
    if not study.parent.is_dir():
        return str(Path(root).absolute())  # from a folder that is still to be made there is no way up
    return os.path.relpath(root, study.parent.resolve())


def _study_name(study: Path) -> str:
    """Return the name of a study by that of its file: "my study.toml" gives "my-study"."""
    letters = [letter if _is_allowed_in_name(letter) else "-" for letter in study.stem]
    return "".join(letters).lstrip("._-")[:_MOST_NAME_LETTERS] or "study"


def _is_allowed_in_name(letter: str) -> bool:
    return letter.isascii() and (letter.isalnum() or letter in "._-")
