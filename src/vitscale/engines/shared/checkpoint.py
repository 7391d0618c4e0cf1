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
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitscale.base.files import read_text
from vitscale.engines.shared.whole_tensors import STATES, WholeTensors
from vitscale.errors import RequestError, shown

FORMAT: Literal[1] = 1
_DESCRIPTION_FILE = "checkpoint.json"
_NEXT_STEP = "Name the folder of a checkpoint that was written whole, of this model and optimizer"
ShapesByName = Mapping[str, tuple[int, ...]]


class Scale(BaseModel):
    """The loss scale as checkpoint.json has it; see `LossScale`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    factor: Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
    steps: NonNegativeInt
    """Optimizer steps since the factor last changed."""


class Description(BaseModel):
    """The contents of checkpoint.json."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1]
    step: NonNegativeInt
    """Optimizer steps taken."""
    optimizer: str
    optimizer_steps: NonNegativeInt
    """The optimizer's own count of steps, without those that overflowed; 0 where it does not count."""
    states: list[str]
    loss_scale: Scale | None


def write_description(folder: Path, description: Description) -> None:
    """Write checkpoint.json and wait until it is on the disk."""
    path = folder / _DESCRIPTION_FILE
    path.write_text(description.model_dump_json(indent=1) + "\n", encoding="utf-8")
    sync(path)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write one file of tensors that lie on the host, and wait until it is on the disk.

    Raises:
        OSError: it cannot be written.
    """
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        # The library reports a full disk only in words, as "... (os error 28)"; the record tells it by its number.
        match = re.search(r"os error (\d+)", str(error))
        error_number = int(match[1]) if match else errno.EIO
        raise OSError(error_number, str(error), str(path)) from error
    sync(path)


class TensorFile:
    """One file of tensors; it is checked to hold what is expected before anything is taken from it."""

    def __init__(self, folder: Path, name: str, expected: ShapesByName, *, fp32: bool) -> None:
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
        _check_names(folder, path.name, slices.keys(), expected.keys())
        for key, shape in expected.items():
            stored_shape = slices[key].get_shape()
            stored_dtype = slices[key].get_dtype()
            if tuple(stored_shape) != shape:
                raise refused(folder, f"is of another model: {shown(key)} is {stored_shape}, here {list(shape)}")
            if fp32 and stored_dtype != "F32":
                raise refused(folder, f"cannot be used: {shown(key)} in {path.name} is {stored_dtype}")
        self._names = list(expected)

    def tensors(self, alive: Callable[[], object]) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor with its name, one at a time, in the model's order."""
        for name in self._names:
            yield name, self._file.get_tensor(name)
            alive()


def _check_names(folder: Path, file_name: str, stored: Set[str], expected: Set[str]) -> None:
    """Check that a file has the model's tensors and no others.

    Raises:
        RequestError: it lacks one or has another one; the error names the first that it lacks, else the first other.
    """
    missing = sorted(expected - stored)
    foreign = sorted(stored - expected)
    if missing:
        raise refused(folder, f"is of another model: {file_name} lacks {shown(missing[0])}")
    if foreign:
        raise refused(folder, f"is of another model: {file_name} has {shown(foreign[0])}, which the model has not")


def read_description(folder: Path) -> Description:
    """Return the contents of checkpoint.json.

    Raises:
        RequestError: the file is missing, newer than this program, or something else.
    """
    text = read_text(folder / _DESCRIPTION_FILE, "checkpoint", next_step=_NEXT_STEP)
    try:
        version = json.loads(text).get("format")
        is_newer = isinstance(version, int) and version > FORMAT
        if is_newer:
            raise refused(folder, f"has format {version}; this program reads {FORMAT}")
        return Description.model_validate_json(text)
    except (ValidationError, ValueError, AttributeError, RecursionError):
        raise refused(folder, f"cannot be used: {_DESCRIPTION_FILE} is not what this program writes") from None


def refused(folder: Path, reason: str) -> RequestError:
    """Return the error for a checkpoint that cannot be restored; `reason`: "is of another model: ..."."""
    return RequestError(f"the checkpoint {shown(str(folder))} {reason}", next_step=_NEXT_STEP)


def sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


WEIGHTS = "weights"
"""Name of the file of weights, without its ending."""
_BUFFERS = "buffers"
Alive = Callable[[], object]
"""A sign of life: saving and loading call it after each tensor, because a large model's tensors take minutes."""


def save(engine_tensors: WholeTensors, folder: Path, step: int, alive: Alive) -> None:
    """Write a checkpoint after `step` optimizer steps; all ranks call it. `folder` appears whole or not at all.

    Raises:
        RequestError: the folder exists, or the optimizer's states cannot be saved.
        OSError: it cannot be written.
    """
    if folder.exists():
        raise RequestError(f"{shown(str(folder))} exists already", next_step="Name a folder that does not")
    description = _describe(engine_tensors, step)
    _wait_for_all_ranks()  # until all have looked, as the folder will be there soon
    draft = folder.with_name(f".{folder.name}.draft")
    try:
        if _rank() == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
        for file in _files(engine_tensors, description.states):
            _save_file(engine_tensors, file, draft, alive)
        if _rank() == 0:
            write_description(draft, description)
            sync(draft)
            draft.rename(folder)
            sync(folder.parent)
    except BaseException:
        if _rank() == 0:
            shutil.rmtree(draft, ignore_errors=True)
        raise
    _wait_for_all_ranks()


def contents(engine_tensors: WholeTensors) -> Iterator[tuple[str, str, Tensor]]:
    """Yield all that a checkpoint would hold now: file, name and whole tensor, one at a time; all ranks call it alike.

    Buffers come on rank 0 alone, which writes its own: statistics of local batch norms differ from rank to rank.
    """
    for file in _files(engine_tensors, _describe(engine_tensors, 0).states):
        for name in _shapes(engine_tensors, file):
            tensor = _tensor(engine_tensors, file, name)
            if file != _BUFFERS or _rank() == 0:
                yield file, name, tensor


def _save_file(engine_tensors: WholeTensors, file: str, folder: Path, alive: Alive) -> None:
    """Gather the tensors of a file, and write it on rank 0."""
    gathered = {}
    for name in _shapes(engine_tensors, file):
        tensor = _tensor(engine_tensors, file, name)
        if _rank() == 0:
            gathered[name] = tensor.to("cpu", copy=True).contiguous()
        alive()
    if _rank() == 0:
        write_tensors(folder / f"{file}.safetensors", gathered)


def load(engine_tensors: WholeTensors, folder: Path, alive: Alive) -> int:
    """Overwrite weights and states by those of a checkpoint; all ranks call it, and all can read `folder`.

    The learning rate is not part of it: the trial sets it, and its global batch may be another.

    Returns:
        Optimizer steps taken when the checkpoint was saved.

    Raises:
        RequestError: it is missing, not whole, or of another model or optimizer; nothing has been changed then.
    """
    description = read_description(folder)
    _check_optimizer(folder, description, engine_tensors.optimizer_name)
    files = {
        file: TensorFile(folder, file, _shapes(engine_tensors, file), fp32=file != _BUFFERS)
        for file in _files(engine_tensors, description.states)
    }
    for name, tensor in files[WEIGHTS].tensors(alive):
        engine_tensors.set_weight(name, tensor)
    names_with_states = engine_tensors.trained if description.states else ()
    engine_tensors.make_states(names_with_states, description.states, description.optimizer_steps)
    for key in description.states:
        for name, tensor in files[key].tensors(alive):
            engine_tensors.set_state(name, key, tensor)
    if _BUFFERS in files:
        for name, tensor in files[_BUFFERS].tensors(alive):
            engine_tensors.set_buffer(name, tensor)
    if engine_tensors.loss_scale is not None and description.loss_scale is not None:
        engine_tensors.loss_scale.set(description.loss_scale.factor, description.loss_scale.steps)
    _wait_for_all_ranks()
    return description.step


def _check_optimizer(folder: Path, description: Description, optimizer_name: str) -> None:
    """Check that a checkpoint is of this optimizer, and has all of its states or, before its first step, none.

    Raises:
        RequestError: it is of another one, or has other states.
    """
    if description.optimizer != optimizer_name:
        raise refused(folder, f"is of the optimizer {shown(description.optimizer)}, not of {shown(optimizer_name)}")
    if description.states not in ([], list(STATES[optimizer_name])):
        raise refused(folder, f"has the states {shown(description.states)}, and {optimizer_name} keeps others")


def _describe(engine_tensors: WholeTensors, step: int) -> Description:
    """Return the contents of checkpoint.json.

    Args:
        engine_tensors: what is saved.
        step: optimizer steps that training has taken. The optimizer's own count (`optimizer_steps`) is without those
            that were skipped because fp16 overflowed.

    Raises:
        RequestError: the optimizer has states of only some parameters.
    """
    states = _common_states(engine_tensors)
    saved_scale = None
    if engine_tensors.loss_scale is not None:
        scale = engine_tensors.loss_scale.get()
        saved_scale = Scale(factor=scale.factor, steps=scale.steps)
    return Description(
        format=FORMAT,
        step=step,
        optimizer=engine_tensors.optimizer_name,
        optimizer_steps=engine_tensors.steps(),
        states=states,
        loss_scale=saved_scale,
    )


def _common_states(engine_tensors: WholeTensors) -> list[str]:
    """Return the states that the optimizer has of every trained parameter; none before its first step.

    Raises:
        RequestError: it has more states of some parameters than of others.
    """
    states_by_parameter = {name: _states_of(engine_tensors, name) for name in engine_tensors.trained}
    all_states = max(states_by_parameter.values(), default=[])  # lists of names: [] is the least
    for name, states in states_by_parameter.items():
        if states != all_states:
            raise RequestError(
                f"the optimizer cannot be saved: no update has reached the parameter {shown(name)} yet",
                next_step="Freeze parameters that no image reaches, or use all of them in every step",
            )
    return all_states


def _states_of(engine_tensors: WholeTensors, name: str) -> list[str]:
    """Return the states that the optimizer has of a parameter."""
    return [key for key in STATES[engine_tensors.optimizer_name] if engine_tensors.has_state(name, key)]


def _files(engine_tensors: WholeTensors, states: list[str]) -> list[str]:
    """Return the names of a checkpoint's files of tensors, without their ending."""
    files = [WEIGHTS, *states]
    return [*files, _BUFFERS] if engine_tensors.buffers else files


def _shapes(engine_tensors: WholeTensors, file: str) -> ShapesByName:
    """Return the names and shapes of the tensors in a file."""
    if file == _BUFFERS:
        return {name: tuple(buffer.shape) for name, buffer in engine_tensors.buffers.items()}
    names = engine_tensors.parameters if file == WEIGHTS else engine_tensors.trained
    return {name: engine_tensors.shape(name) for name in names}


def _tensor(engine_tensors: WholeTensors, file: str, name: str) -> Tensor:
    """Return a whole tensor as a file has it."""
    if file == _BUFFERS:
        return engine_tensors.buffer(name)
    if file == WEIGHTS:
        return engine_tensors.weight(name).float()
    return engine_tensors.state(name, file).float()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _wait_for_all_ranks() -> None:
    if dist.is_initialized():
        dist.barrier()
