"""One rank of a process group in which many engines are built, one after the other, and the steps of each counted.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as any rank has them; its argument is a folder with `cases.json`, a list
of `TrainSpec` fields. It writes `rank-R.json`: for each case the traffic lines of two steps, and the dtype that the
engine names; or the error that ended it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engines.forgetting import forget_engines
from vitscale import models
from vitscale.engines import building
from vitscale.models.losses import label_losses
from vitscale.models.named import AuxiliaryLogits
from vitscale.probes.traffic import COUNTED_STEPS, FIRST_USUAL_STEP, TrafficCounter
from vitscale.processes.launch_file import RECORDER_RING
from vitscale.trial.model_spec import ModelSpec, resolve
from vitscale.trial.trial import DataSpec, TrainSpec, Trial, WindowSpec, World

MODEL = resolve(ModelSpec(name="vit-ti16", image_size=32, patch_size=16, layers=2), 10)
"""0.9 million parameters: more than one bucket of 1 MiB."""
SWIN: dict[str, Any] = {
    "name": "swinv2-t", "image_size": 32, "patch_size": 2, "hidden_size": 48, "heads": 3, "depths": (1, 1, 1),
    "window_size": 4,
}  # fmt: skip
UPERNET: dict[str, Any] = {"task": "segmentation", "decoder_size": 32}
MODELS = {
    "swin": resolve(ModelSpec(**SWIN), 10),
    "upernet": resolve(ModelSpec(**SWIN, **UPERNET), 10),
    "pyramid": resolve(ModelSpec(name="vit-ti16", image_size=32, patch_size=8, layers=2, **UPERNET), 10),
}
"""0.7 to 1.8 million parameters."""
BATCH = 2
CPU = torch.device("cpu")


def trial_of(case: dict[str, Any], ranks: int) -> Trial:
    """A trial with the given fields of its TrainSpec, of `MODEL` or, by "model", of one of `MODELS`."""
    fields = {"precision": "fp32", "device": "cpu", "micro_batch": BATCH}
    case = dict(case)
    model = MODELS[case.pop("model")] if "model" in case else MODEL
    if model.task == "segmentation":
        fields["batch_norm"] = "local"
    return Trial(
        model=model,
        data=DataSpec(name="synthetic"),
        train=TrainSpec.model_validate(fields | case),
        world=World(ranks_per_node=ranks, threads_per_rank=1),
        window=WindowSpec(),
        launcher="torchrun",
    )


def count(case: dict[str, Any]) -> dict[str, Any]:
    """The traffic of one engine."""
    trial = trial_of(case, dist.get_world_size())
    torch.manual_seed(0)
    engine = building.build(models.build(trial.model), trial, CPU)
    segments = trial.model.task == "segmentation"
    auxiliary = AuxiliaryLogits(engine.module, None) if segments else None
    counter = TrafficCounter()
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH, 32, 32) if segments else (BATCH,))

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        second = auxiliary.take() if auxiliary else None
        loss = label_losses(logits, labels).mean()
        return loss if second is None else loss + label_losses(second, labels).mean()

    def step() -> None:
        for micro_step in range(trial.train.grad_accum):
            engine.micro_step(images, loss_of, last=micro_step == trial.train.grad_accum - 1)
        engine.step()

    for _ in range(FIRST_USUAL_STEP):
        step()
    for number in range(FIRST_USUAL_STEP, FIRST_USUAL_STEP + COUNTED_STEPS):
        with counter.step(number):
            step()
    lines = counter.lines()
    return {"gradient_dtype": engine.gradient_dtype, "lines": [line.model_dump(mode="json") for line in lines]}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ[RECORDER_RING[0]] = "2048"  # enough for one engine; a ring that holds them all is read anew for each
    dist.init_process_group("gloo")
    found = []
    for case in json.loads((folder / "cases.json").read_text()):
        try:
            found.append(count(case))
        except Exception:
            found.append({"error": traceback.format_exc()})
        dist.barrier()
        forget_engines()
        gc.collect()
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # taking process groups apart may hang


if __name__ == "__main__":
    main(Path(sys.argv[1]))
