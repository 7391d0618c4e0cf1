"""Does a rank's work from the first import of torch to the last step: builds all in the order of start-up's phases."""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from threadpoolctl import ThreadpoolController

from vitscale import models, sources
from vitscale.engines import building, wrapper_facts
from vitscale.engines.base import Engine
from vitscale.engines.deepspeed.config import synchronised
from vitscale.engines.packages import installed_versions
from vitscale.engines.shared.checkpoint import WEIGHTS, contents
from vitscale.probes.matmul import measured_matmul
from vitscale.probes.steps import finish_device_work
from vitscale.processes.heartbeat import PROGRESS, STARTING
from vitscale.store import RankLog
from vitscale.store.records import CheckpointLine, ModelLine, PhaseLine
from vitscale.store.results import RunHeader
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.trial import TrainSpec
from vitscale.worker import extensions, group
from vitscale.worker.environment import start_line
from vitscale.worker.group import barrier
from vitscale.worker.rank_process import RankInfo
from vitscale.worker.training import Training


def train(
    header: RunHeader, rank: RankInfo, log: RankLog, began: float, *, silence_seconds: float | None = None
) -> Training:
    """Builds and trains; returns objects that must not be destroyed before the process ends.

    Args:
        header: the run's trial, and its seed.
        rank: which rank this is.
        log: its record.
        began: `time.perf_counter()` before torch was imported.
        silence_seconds: how long a driver waits for a sign of any rank; None: there is no driver.

    Raises:
        RuntimeError: the data is not what the study was started with.
    """
    trial = header.trial
    seed = trial.train.seed if header.seed is None else header.seed
    laps = _Laps(log, began)
    preload(trial.train, trial.model)
    gc.freeze()
    gc.enable()
    _set_thread_pools(trial.world.threads_per_rank)
    laps.end("imports")

    device = group.device_of(trial.train.device, rank)
    if device.type == "cpu":
        keep_freed_memory()
    dataset = sources.load(trial.data)
    _refuse_other_data(dataset.summary.fingerprint, header.dataset_fingerprint)
    laps.end("data")

    # The same weights on every rank, and in every repeat unless repeats are to differ.
    torch.manual_seed(seed)
    model = models.build(trial.model)
    evaluates_whole_images = dataset.summary.sizes_vary and trial.data.evaluation == "whole" and trial.window.evaluate
    if evaluates_whole_images and trial.model.own_name is None:
        models.refuse_other_sizes(model, trial.model)
    # From here on ranks draw their own numbers: what a model drops out differs between them. But the ranks of a tensor
    # group, which are neighbours, have the same activations, and whole weights that must stay alike.
    torch.manual_seed(seed + rank.rank // trial.parallel.tensor)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    laps.end("model")

    facts = wrapper_facts(trial.train)
    on_host = facts.gradients_on_host(trial.train)
    with extensions.watched() as compiled:
        backend = group.join(
            rank, device, alone=facts.alone, gradients_on_host=on_host, silence_seconds=silence_seconds
        )
        engine = building.build(model, trial, device)
    log.write(start_line(header, rank, device, backend, engines=(trial.train.engine,)))
    laps.end("engine", compiled)

    log.write(
        ModelLine(
            parameters=parameters,
            gradient_dtype=engine.gradient_dtype,
            synchronised_timing=synchronised(trial.train.deepspeed_config),
            dataset_fingerprint=dataset.summary.fingerprint,
            train_samples=dataset.summary.train_samples,
            held_out_samples=dataset.summary.held_out_samples,
        )
    )
    training = Training(trial, rank, dataset, engine, device, log, seed)
    training.run()
    # On all ranks at once, as in training; afterwards, so that it disturbs nothing.
    rate = measured_matmul(device, trial.train.precision)
    if rate is not None:
        log.write(rate)
    if trial.window.checkpoint:
        log.write(measured_checkpoint(engine, device, log.path.parent, training.step, log.alive))
    # No rank leaves while another still talks to it.
    group.barrier()
    return training


def _refuse_other_data(fingerprint: str, expected: str) -> None:
    """Raises `RuntimeError` unless the data here has the fingerprint with which the study was started."""
    if fingerprint != expected:
        raise RuntimeError(
            f"the data here is not what the study was started with: its fingerprint is {fingerprint}, "
            f"and was {expected}. Files have changed, this host's copy has other times of change "
            "(cp -a and rsync -a keep them), or another version of vitscale reads them in another order"
        )


def preload(train: TrainSpec, model: ModelSpec) -> None:
    """Imports what training needs beyond this module, so that nothing is imported inside a step.

    It also looks up the versions of packages and the thread pools, which forks of this process would else look up each.
    """
    building.preload(train)
    models.preload(model)
    installed_versions((train.engine,))
    _thread_pools()


def _set_thread_pools(threads: int) -> None:
    """Sets the number of threads of torch and of numpy's BLAS.

    OMP_NUM_THREADS does so only before they are loaded, which in a fork of a prepared process they are already. What
    OPENBLAS_NUM_THREADS says of the BLAS is kept.
    """
    torch.set_num_threads(threads)
    variable = os.environ.get("OPENBLAS_NUM_THREADS", "")
    blas_threads = int(variable) if variable.isdecimal() else 0
    if blas_threads == 0:
        blas_threads = min(threads, len(os.sched_getaffinity(0)))
    _thread_pools().limit(limits=blas_threads, user_api="blas")


@functools.cache
def _thread_pools() -> ThreadpoolController:
    """Returns the thread pools of the libraries that are loaded at the first call.

    Libraries that are loaded later read their number of threads from the variables.
    """
    return ThreadpoolController()


def keep_freed_memory() -> None:
    """Makes glibc keep for the next step what a step frees, in pieces of up to 32 MiB (mallopt(3); decision 0033).

    By default it gives most of it back to the kernel, which hands it out again page by page. What the user has set
    stands.
    """
    is_set_by_user = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if is_set_by_user:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, -1)  # never give memory at the heap's end back
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)


_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
"""Numbers of two parameters of mallopt(3), from malloc.h."""
_LARGEST_KEPT_BYTES = 32 << 20
"""The most that glibc takes for M_MMAP_THRESHOLD on 64-bit machines."""


_NEXT_PHASE = {"imports": "data", "data": "model", "model": "engine", "engine": "first step"}


class _Laps:
    """Shows each phase of a rank's start-up while it lasts, and records it when it ends."""

    def __init__(self, log: RankLog, began: float) -> None:
        """`began`: `time.perf_counter()` at the beginning of the first phase."""
        self._log = log
        self._began = began
        PROGRESS.phase = f"{STARTING}imports"

    def end(self, name: str, compiled: Sequence[str] = ()) -> None:
        """Ends the phase under way, and begins the next one.

        Args:
            name: the phase that ends.
            compiled: names of what was compiled in it.
        """
        ended = time.perf_counter()
        fields = {"name": name, "seconds": ended - self._began, "compiled": tuple(compiled)}
        self._log.write(PhaseLine.model_validate(fields))
        self._began = ended
        PROGRESS.phase = STARTING + _NEXT_PHASE[name]


def measured_checkpoint(
    engine: Engine, device: torch.device, run_folder: Path, step: int, alive: Callable[[], None]
) -> CheckpointLine:
    """Saves a checkpoint, spoils the model, restores it and removes the files. All ranks call this at once.

    Both times begin and end with all ranks together. Saving includes that the files are on the disk; restoring reads
    what the operating system may still have in memory.

    Args:
        engine: holds the model and its optimizer.
        device: the device of this rank.
        run_folder: the run's folder, in which the checkpoint lies for a while.
        step: number of optimizer steps so far.
        alive: is called now and then, to show that this rank goes on.

    Raises:
        RuntimeError: a weight, an optimizer state or, on rank 0, a buffer is not bit for bit what it was.
        RequestError: this engine or optimizer cannot be saved.
        OSError: the disk is full, or does not take it for another reason.
    """
    folder = run_folder / "checkpoint"
    digests_before = _tensor_digests(engine, alive)
    save_seconds = _seconds_on_all_ranks(lambda: engine.save_checkpoint(folder, step, alive), device)
    checkpoint_bytes = sum(path.stat().st_size for path in folder.iterdir())
    _spoil_model(engine)
    _require_other_weights(digests_before, spoiled=_tensor_digests(engine, alive))
    load_seconds = _seconds_on_all_ranks(lambda: engine.load_checkpoint(folder, alive), device)
    _require_same_tensors(digests_before, restored=_tensor_digests(engine, alive))
    barrier()  # no rank reads any more
    shutil.rmtree(folder, ignore_errors=True)  # by the first rank that comes
    return CheckpointLine(save_seconds=save_seconds, load_seconds=load_seconds, bytes=checkpoint_bytes)


class _TensorName(NamedTuple):
    """A tensor of a checkpoint."""

    file: str
    name: str


_Digests = Mapping[_TensorName, str]
"""SHA-256 of each tensor of a checkpoint."""


def _require_other_weights(saved: _Digests, spoiled: _Digests) -> None:
    """Raises `RuntimeError` if no weight has changed since it was saved: restoring would then prove nothing."""
    weights = [tensor for tensor in saved if tensor.file == WEIGHTS]
    if all(spoiled[tensor] == saved[tensor] for tensor in weights):
        raise RuntimeError("the checkpoint was not tried: the weights could not be made others")


def _require_same_tensors(saved: _Digests, restored: _Digests) -> None:
    """Raises `RuntimeError`, which names a tensor, if one differs from what was saved or is missing."""
    different = sorted(tensor for tensor in saved if restored.get(tensor) != saved[tensor])
    if different:
        first = different[0]
        raise RuntimeError(
            f"the checkpoint does not restore what was saved: {len(different)} of {len(saved)} tensors differ, "
            f"the first is {first.file}/{first.name}"
        )


def _spoil_model(engine: Engine) -> None:
    """Sets weights and buffers to zero and drops the optimizer's states: what is there afterwards was restored."""
    tensors = engine.whole_tensors()
    for name in tensors.parameters:
        tensors.set_weight(name, torch.zeros(tensors.shape(name)))
    for name, buffer in tensors.buffers.items():
        tensors.set_buffer(name, torch.zeros_like(buffer))
    tensors.make_states((), (), 0)


def _seconds_on_all_ranks(work: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds that all ranks take for `work`, which all of them do at once."""
    barrier()
    began = time.perf_counter()
    work()
    finish_device_work(device)
    barrier()
    return time.perf_counter() - began


def _tensor_digests(engine: Engine, alive: Callable[[], None]) -> dict[_TensorName, str]:
    """Returns the SHA-256 of every whole tensor, and the number of the optimizer's steps as a text."""
    tensors = engine.whole_tensors()
    digests = {_TensorName("optimizer", "steps"): str(tensors.steps())}
    for file, name, tensor in contents(tensors):
        bits = tensor.cpu().contiguous().flatten().view(torch.uint8)
        digests[_TensorName(file, name)] = hashlib.sha256(bits.numpy().data).hexdigest()
        alive()
    return digests
