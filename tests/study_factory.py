"""Study files, machines and datasets of known content, for tests of what comes before a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vitscale.machine.hardware import Gpu, Machine
from vitscale.sources import Summary
from vitscale.study.expand import Expansion, expand
from vitscale.study.file import StudyFile
from vitscale.trial.trial import DataSpec

MINIMAL: dict[str, dict[str, Any]] = {
    "model": {"name": "vit-ti16", "image_size": 32, "patch_size": 8},
    "data": {"name": "digits"},
    "train": {"micro_batch": 32, "epochs": 3},
    "scaling": {"gpus": [1, 2]},
}
EIGHT_CORES = Machine(cores=8, cpu_quota_cores=None, gpus=(), cpu_has_fast_bf16=False)


def gpus(count: int, capability: tuple[int, int] | None = (9, 0)) -> tuple[Gpu, ...]:
    """`count` GPUs of one kind."""
    return tuple(Gpu(f"GPU-{n}", "Example", 16 * 2**30, "570", capability) for n in range(count))


def toml(changes: dict[str, dict[str, Any]] | None = None, name: str = "example") -> str:
    """A valid study with `changes` put in by section; a value of None takes the key out."""
    sections = {section: dict(keys) for section, keys in MINIMAL.items()}
    for section, keys in (changes or {}).items():
        sections.setdefault(section, {}).update(keys)
    lines = [f"name = {json.dumps(name)}"]
    for section, keys in sections.items():
        lines.append(f"[{section}]")
        # A JSON string, list, number or boolean is a TOML one too.
        lines += [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in keys.items() if value is not None]
    return "\n".join(lines) + "\n"


def write_study(folder: Path, changes: dict[str, dict[str, Any]] | None = None, name: str = "example") -> Path:
    path = folder / "study.toml"
    path.write_text(toml(changes, name), encoding="utf-8")
    return path


def summary(train_samples: int = 1437, classes: int = 10, fingerprint: str = "f" * 16) -> Summary:
    return Summary(train_samples, 360, tuple(str(n) for n in range(classes)), (8, 8, 3), fingerprint)


def expanded(
    folder: Path,
    changes: dict[str, dict[str, Any]] | None = None,
    machine: Machine = EIGHT_CORES,
    train_samples: int = 1437,
) -> Expansion:
    """The expansion of `toml(changes)` on a machine and a dataset that the test names."""

    def check(_: DataSpec) -> Summary:
        return summary(train_samples)

    return expand(StudyFile.read(write_study(folder, changes)), machine, check)
