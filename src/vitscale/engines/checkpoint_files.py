"""The files of a checkpoint: what describes it, and tensors by name; untrusted where they are read."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitscale.base.text_file import read_text
from vitscale.errors import RequestError, explain, shown

FORMAT: Literal[1] = 1
_DESCRIPTION = "checkpoint.json"
_NEXT_STEP = "Name the folder of a checkpoint that was written whole, of this model and optimizer"
Count = Annotated[int, Field(ge=0)]
Shapes = Mapping[str, tuple[int, ...]]


class Scale(BaseModel):
    """See `LossScale`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    factor: Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
    steps: Count


class Description(BaseModel):
    """checkpoint.json."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1]
    step: Count
    """Optimizer steps taken."""
    optimizer: str
    optimizer_steps: Count
    """As the optimizer itself counts: steps that overflowed are not in it. 0 where it does not count."""
    states: list[str]
    loss_scale: Scale | None


def write_description(folder: Path, description: Description) -> None:
    """Writes checkpoint.json, to the disk itself."""
    path = folder / _DESCRIPTION
    path.write_text(description.model_dump_json(indent=1) + "\n", encoding="utf-8")
    sync(path)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes one file of tensors that lie on the host, to the disk itself.

    Raises:
        OSError: it cannot be written.
    """
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        # The library tells a full disk in words alone; the record tells it apart by its number.
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from error
    sync(path)


class TensorFile:
    """One file of tensors, found to hold what is expected before anything is taken from it."""

    def __init__(self, folder: Path, name: str, expected: Shapes, *, fp32: bool) -> None:
        """`expected`: names and shapes of all tensors; `fp32`: whether they must be that.

        Raises:
            RequestError: it is missing, cut off, or holds something else.
        """
        path = folder / f"{name}.safetensors"
        try:
            self._file = cast(Any, safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise refused(folder, f"cannot be used: {path.name}: {error}") from None
        found = {key: self._file.get_slice(key) for key in self._file.keys()}  # noqa: SIM118 - it is no mapping
        missing, foreign = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        if missing or foreign:
            what = f"lacks {shown(missing[0])}" if missing else f"has {shown(foreign[0])}, which the model has not"
            raise refused(folder, f"is of another model: {path.name} {what}")
        for key, shape in expected.items():
            if tuple(found[key].get_shape()) != shape:
                raise refused(
                    folder, f"is of another model: {shown(key)} is {found[key].get_shape()}, here {list(shape)}"
                )
            if fp32 and found[key].get_dtype() != "F32":
                raise refused(folder, f"cannot be used: {shown(key)} in {path.name} is {found[key].get_dtype()}")
        self._names = list(expected)

    def tensors(self, alive: Callable[[], object]) -> Iterator[tuple[str, Tensor]]:
        """One at a time, in the model's order."""
        for name in self._names:
            yield name, self._file.get_tensor(name)
            alive()


def read_description(folder: Path) -> Description:
    """Reads checkpoint.json.

    Raises:
        RequestError: it is missing, newer than this program, or something else.
    """
    text = read_text(folder / _DESCRIPTION, "checkpoint", next_step=_NEXT_STEP)
    try:
        version = json.loads(text).get("format")
        if isinstance(version, int) and version > FORMAT:
            raise refused(folder, f"has format {version}; this program reads {FORMAT}")
        return Description.model_validate_json(text)
    except (ValidationError, ValueError, AttributeError, RecursionError):
        raise refused(folder, f"cannot be used: {_DESCRIPTION} is not what this program writes") from None


def refused(folder: Path, why: str) -> RequestError:
    """The error for a checkpoint that cannot be restored."""
    return RequestError(explain(f"the checkpoint {shown(str(folder))} {why}", next_step=_NEXT_STEP))


def sync(path: Path) -> None:
    """Waits until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
