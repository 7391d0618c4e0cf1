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
from vitscale import engines, models
from vitscale.model_spec import ModelSpec, resolve
from vitscale.probes.flight_recorder import size_ring
from vitscale.probes.traffic import TrafficCounter
from vitscale.trial import DataSpec, TrainSpec, Trial, WindowSpec, World
from vitscale.worker.counted_steps import COUNTED_STEPS, FIRST_USUAL_STEP

MODEL = resolve(ModelSpec(name="vit-ti16", image_size=32, patch_size=16, layers=2), 10)
"""0.9 million parameters: more than one bucket of 1 MiB."""
BATCH = 2
CPU = torch.device("cpu")


def trial_of(case: dict[str, Any], ranks: int) -> Trial:
    """A trial of `MODEL` with the given fields of its TrainSpec."""
    fields = {"precision": "fp32", "device": "cpu", "micro_batch": BATCH}
    return Trial(
        model=MODEL,
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
    engine = engines.build(models.build(trial.model), trial, CPU)
    counter = TrafficCounter()
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))

    def step() -> None:
        for micro_step in range(trial.train.grad_accum):
            engine.micro_step(
                images,
                lambda logits: torch.nn.functional.cross_entropy(logits, labels),
                last=micro_step == trial.train.grad_accum - 1,
            )
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
    size_ring()
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
