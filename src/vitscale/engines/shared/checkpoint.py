"""Checkpoints: one format for all engines, so that each restores any other's, at any number of ranks.

A folder of `checkpoint.json`, `weights.safetensors`, a file like `exp_avg.safetensors` for each state the optimizer
keeps, and `buffers.safetensors` where the model has buffers. Tensors are whole, fp32 (buffers: their own dtype), under
the parameter's name in the model. There is no pickle: safetensors holds only numbers.

Rank 0 writes; while it writes a file it holds that file's tensors in host memory, 4 bytes per parameter. Every rank
reads, one tensor at a time.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitscale.base.files import read_text
from vitscale.engines.shared.whole_tensors import STATES, WholeTensors
from vitscale.errors import RequestError, shown

FORMAT: Literal[1] = 1
_DESCRIPTION = "checkpoint.json"
_NEXT_STEP = "Name the folder of a checkpoint that was written whole, of this model and optimizer"
Count = Annotated[int, Field(ge=0)]
Shapes = Mapping[str, tuple[int, ...]]


class Scale(BaseModel):
    """The loss scale as checkpoint.json has it; see `LossScale`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    factor: Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
    steps: Count


class Description(BaseModel):
    """What checkpoint.json says."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1]
    step: Count
    """Optimizer steps taken."""
    optimizer: str
    optimizer_steps: Count
    """The optimizer's own count of steps, without those that overflowed; 0 where it does not count."""
    states: list[str]
    loss_scale: Scale | None


def write_description(folder: Path, description: Description) -> None:
    """Writes checkpoint.json and waits until it is on the disk."""
    path = folder / _DESCRIPTION
    path.write_text(description.model_dump_json(indent=1) + "\n", encoding="utf-8")
    sync(path)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes one file of tensors that lie on the host, and waits until it is on the disk.

    Raises:
        OSError: it cannot be written.
    """
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        # The library reports a full disk only in words; the record tells it apart by its number.
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from error
    sync(path)


class TensorFile:
    """One file of tensors; it is checked to hold what is expected before anything is taken from it."""

    def __init__(self, folder: Path, name: str, expected: Shapes, *, fp32: bool) -> None:
        """`expected`: names and shapes of all tensors; `fp32`: whether they must be in fp32.

        Raises:
            RequestError: the file is missing, cut off, or holds something else.
        """
        path = folder / f"{name}.safetensors"
        try:
            self._file = cast(Any, safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise refused(folder, f"cannot be used: {path.name}: {error}") from None
        slices = {key: self._file.get_slice(key) for key in self._file.keys()}  # noqa: SIM118 - it is no mapping
        missing, foreign = sorted(expected.keys() - slices.keys()), sorted(slices.keys() - expected.keys())
        if missing or foreign:
            what = f"lacks {shown(missing[0])}" if missing else f"has {shown(foreign[0])}, which the model has not"
            raise refused(folder, f"is of another model: {path.name} {what}")
        for key, shape in expected.items():
            if tuple(slices[key].get_shape()) != shape:
                raise refused(
                    folder, f"is of another model: {shown(key)} is {slices[key].get_shape()}, here {list(shape)}"
                )
            if fp32 and slices[key].get_dtype() != "F32":
                raise refused(folder, f"cannot be used: {shown(key)} in {path.name} is {slices[key].get_dtype()}")
        self._names = list(expected)

    def tensors(self, alive: Callable[[], object]) -> Iterator[tuple[str, Tensor]]:
        """Each tensor with its name, one at a time, in the model's order."""
        for name in self._names:
            yield name, self._file.get_tensor(name)
            alive()


def read_description(folder: Path) -> Description:
    """Reads checkpoint.json.

    Raises:
        RequestError: the file is missing, newer than this program, or something else.
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
    return RequestError(f"the checkpoint {shown(str(folder))} {why}", next_step=_NEXT_STEP)


def sync(path: Path) -> None:
    """Waits until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


WEIGHTS, _BUFFERS = "weights", "buffers"
Alive = Callable[[], object]
"""Called after each tensor, because a large model's tensors take minutes."""


def save(whole: WholeTensors, folder: Path, step: int, alive: Alive) -> None:
    """Writes a checkpoint after `step` optimizer steps; all ranks call it. `folder` appears whole or not at all.

    Raises:
        RequestError: the folder exists, or the optimizer's states cannot be saved.
        OSError: it cannot be written.
    """
    if folder.exists():
        raise RequestError(f"{shown(str(folder))} exists already", next_step="Name a folder that does not")
    description = _describe(whole, step)
    _wait()  # until all ranks have looked, as the folder will be there soon
    draft = folder.with_name(f".{folder.name}.draft")
    try:
        if _rank() == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
        for file in _files(whole, description.states):
            _save_file(whole, file, draft, alive)
        if _rank() == 0:
            write_description(draft, description)
            sync(draft)
            draft.rename(folder)
            sync(folder.parent)
    except BaseException:
        if _rank() == 0:
            shutil.rmtree(draft, ignore_errors=True)
        raise
    _wait()


def contents(whole: WholeTensors) -> Iterator[tuple[str, str, Tensor]]:
    """All that a checkpoint would hold now: file, name and whole tensor, one at a time; all ranks call it alike.

    Buffers come on rank 0 alone, which writes its own: statistics of local batch norms differ from rank to rank.
    """
    for file in _files(whole, _describe(whole, 0).states):
        for name in _shapes(whole, file):
            tensor = _tensor(whole, file, name)
            if file != _BUFFERS or _rank() == 0:
                yield file, name, tensor


def _save_file(whole: WholeTensors, file: str, folder: Path, alive: Alive) -> None:
    gathered = {}
    for name in _shapes(whole, file):
        tensor = _tensor(whole, file, name)
        if _rank() == 0:
            gathered[name] = tensor.to("cpu", copy=True).contiguous()
        alive()
    if _rank() == 0:
        write_tensors(folder / f"{file}.safetensors", gathered)


def load(whole: WholeTensors, folder: Path, alive: Alive) -> int:
    """Puts a checkpoint's weights and states in place; all ranks call it, and all can read `folder`.

    The learning rate is not part of it: the trial sets it, and its global batch may be another.

    Returns:
        Optimizer steps taken when the checkpoint was saved.

    Raises:
        RequestError: it is missing, not whole, or of another model or optimizer; nothing has been changed then.
    """
    description = read_description(folder)
    if description.optimizer != whole.kind:
        raise refused(folder, f"is of the optimizer {shown(description.optimizer)}, not of {shown(whole.kind)}")
    if description.states not in ([], list(STATES[whole.kind])):
        raise refused(folder, f"has the states {shown(description.states)}, and {whole.kind} keeps others")
    files = {
        file: TensorFile(folder, file, _shapes(whole, file), fp32=file != _BUFFERS)
        for file in _files(whole, description.states)
    }
    for name, tensor in files[WEIGHTS].tensors(alive):
        whole.set_weight(name, tensor)
    whole.make_states(whole.trained if description.states else (), description.states, description.optimizer_steps)
    for key in description.states:
        for name, tensor in files[key].tensors(alive):
            whole.set_state(name, key, tensor)
    if _BUFFERS in files:
        for name, tensor in files[_BUFFERS].tensors(alive):
            whole.set_buffer(name, tensor)
    if whole.loss_scale is not None and description.loss_scale is not None:
        whole.loss_scale.set(description.loss_scale.factor, description.loss_scale.steps)
    _wait()
    return description.step


def _describe(whole: WholeTensors, step: int) -> Description:
    """The checkpoint's description; raises a RequestError where the optimizer has states of only some parameters."""
    kept = [[key for key in STATES[whole.kind] if whole.has_state(name, key)] for name in whole.trained]
    if any(states != kept[0] for states in kept):
        some = next(name for name, states in zip(whole.trained, kept, strict=True) if states != max(kept))
        what = f"the optimizer cannot be saved: no update has reached the parameter {shown(some)} yet"
        raise RequestError(what, next_step="Freeze parameters that no image reaches, or use all of them in every step")
    scale = whole.loss_scale.get() if whole.loss_scale else None
    return Description(
        format=FORMAT,
        step=step,
        optimizer=whole.kind,
        optimizer_steps=whole.steps(),
        states=kept[0] if kept else [],
        loss_scale=None if scale is None else Scale(factor=scale[0], steps=scale[1]),
    )


def _files(whole: WholeTensors, states: list[str]) -> list[str]:
    return [WEIGHTS, *states, *([_BUFFERS] if whole.buffers else [])]


def _shapes(whole: WholeTensors, file: str) -> Shapes:
    """Names and shapes of the tensors in a file."""
    if file == _BUFFERS:
        return {name: tuple(buffer.shape) for name, buffer in whole.buffers.items()}
    return {name: whole.shape(name) for name in (whole.parameters if file == WEIGHTS else whole.trained)}


def _tensor(whole: WholeTensors, file: str, name: str) -> Tensor:
    if file == _BUFFERS:
        return whole.buffer(name)
    return (whole.weight(name) if file == WEIGHTS else whole.state(name, file)).float()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _wait() -> None:
    if dist.is_initialized():
        dist.barrier()
