"""What saving and restoring a checkpoint takes, and whether all comes back: measured after training."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch

from vitscale.engines import Engine
from vitscale.engines.checkpoint import WEIGHTS, contents
from vitscale.store.records import CheckpointLine
from vitscale.worker.group import barrier


def measured_checkpoint(
    engine: Engine, device: torch.device, run_folder: Path, step: int, alive: Callable[[], None]
) -> CheckpointLine:
    """Saves a checkpoint into the run's folder, spoils the model, restores it, removes the files. All ranks at once.

    Both times begin and end with all ranks together. Saving includes that the files are on the disk; restoring reads
    what the operating system may still have in memory.

    Raises:
        RuntimeError: a weight or an optimizer state is not bit for bit what it was.
        RequestError: this engine or optimizer cannot be saved.
        OSError: the disk is full, or does not take it for another reason.
    """
    folder = run_folder / "checkpoint"
    before = _digests(engine, alive)
    saved = _timed(lambda: engine.save_checkpoint(folder, step, alive), device)
    written = sum(path.stat().st_size for path in folder.iterdir())
    _spoil(engine)
    spoiled = _digests(engine, alive)
    if all(spoiled[tensor] == digest for tensor, digest in before.items() if tensor[0] == WEIGHTS):
        raise RuntimeError("the checkpoint was not tried: the weights could not be made others")
    restored = _timed(lambda: engine.load_checkpoint(folder, alive), device)
    after = _digests(engine, alive)
    different = sorted(tensor for tensor in before if after.get(tensor) != before[tensor])
    if different:
        raise RuntimeError(
            f"the checkpoint does not restore what was saved: {len(different)} of {len(before)} tensors differ, "
            f"the first is {'/'.join(different[0])}"
        )
    barrier()  # nobody reads any more
    shutil.rmtree(folder, ignore_errors=True)  # by whoever comes first
    return CheckpointLine(save_seconds=saved, load_seconds=restored, bytes=written)


def _spoil(engine: Engine) -> None:
    """Sets the weights to zero and forgets the optimizer's states, so that what is there afterwards was restored."""
    whole = engine.whole_tensors()
    for name in whole.parameters:
        whole.set_weight(name, torch.zeros(whole.shape(name)))
    whole.make_states((), (), 0)


def _timed(work: Callable[[], object], device: torch.device) -> float:
    barrier()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    barrier()
    return time.perf_counter() - began


def _digests(engine: Engine, alive: Callable[[], None]) -> dict[tuple[str, str], str]:
    """SHA-256 of every whole tensor by file and name, and the optimizer's count."""
    whole = engine.whole_tensors()
    digests = {("optimizer", "steps"): str(whole.steps())}
    for file, name, tensor in contents(whole):
        bits = tensor.cpu().contiguous().flatten().view(torch.uint8)
        digests[file, name] = hashlib.sha256(bits.numpy().data).hexdigest()
        alive()
    return digests
