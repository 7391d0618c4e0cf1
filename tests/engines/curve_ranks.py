"""One rank of a process group in which many engines train, one after the other, on the same images in the same order.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as any rank has them; its argument is a folder with `jobs.json`, a list of
`curves.Job`. It writes `rank-R.json`: for each job this rank's losses, the images it took, and what else was asked
for. The first error ends it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from engines import curves
from engines.curves import Job
from engines.forgetting import forget_engines
from vitscale import models, sources
from vitscale.datasets.batches import Batch
from vitscale.engines import base, building
from vitscale.engines.deepspeed import wrap as deepspeed
from vitscale.engines.deepspeed.wrap import configuration
from vitscale.engines.megatron.wrap import MegatronEngine
from vitscale.engines.shared.splits import clip
from vitscale.models.losses import slot_loss
from vitscale.probes.steps import no_phase
from vitscale.probes.traffic import COUNTED_STEPS, FIRST_USUAL_STEP, TrafficCounter
from vitscale.processes.launch_file import RECORDER_RING
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.parallel import ParallelSpec
from vitscale.trial.trial import DataSpec, TrainSpec, Trial, WindowSpec, World
from vitscale.worker import passes
from vitscale.worker.group import device_of, join
from vitscale.worker.passes import Passes
from vitscale.worker.rank_process import RankInfo
from vitscale.worker.session import measured_checkpoint

OWN_MODELS = str(Path(__file__).parents[2] / "examples" / "own_models")
PLACE = RankInfo(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]), None)


def trial_of(job: Job) -> Trial:
    """The job's trial: the global batch is cut into as many parts as ranks and micro-steps ask for."""
    train = job["train"]
    ranks = PLACE.world_size
    parallel = ParallelSpec.model_validate(job.get("parallel", {}))
    parts = ranks // parallel.ranks_per_model * train.get("grad_accum", 1)
    model, batch = curves.MODEL, curves.GLOBAL_BATCH
    if job.get("many_heads"):
        model = curves.MANY_HEADS.model_copy(update={"layers": job["layers"]} if "layers" in job else {})
    data = DataSpec(name="synthetic", samples=curves.SAMPLES, source_size=16, augment=True)
    if "factory" in job:
        if OWN_MODELS not in sys.path:
            sys.path.append(OWN_MODELS)
        channels = 12 if job["factory"].startswith("clip") else 3
        data = data.model_copy(update={"channels": channels})
        own = ModelSpec(factory=job["factory"], image_size=16, num_classes=10, channels=channels)
        model = curves.SHAPES.get(job["factory"], own)
    if "segments" in job:
        model = curves.SEGMENTERS[job["segments"]]
        batch = curves.SEGMENTED_BATCH
        data = DataSpec(name="synthetic-masks", samples=curves.SEGMENTED_SAMPLES, source_size=32, classes=5)
    if "scenes" in job:
        of_files: dict[str, Any] = {"root": job["scenes"], "evaluation": job["evaluation"]}
        data = DataSpec(name="ade20k", source_size=48, classes=5, **of_files)
    assert batch % parts == 0
    fields = {"precision": "fp32", "device": "cpu", "micro_batch": batch // parts} | train
    return Trial(
        model=model,
        data=data,
        train=TrainSpec.model_validate(fields),
        world=World(ranks_per_node=ranks, threads_per_rank=1),
        window=WindowSpec(),
        launcher="torchrun",
        parallel=parallel,
    )


def batches_of(own: Passes, first: int, last: int) -> Iterator[tuple[int, int, list[Batch]]]:
    """(step, epoch, the step's micro-batches) of the steps from `first` to before `last`."""
    step = epoch = 0
    while step < last:
        order = own.order(epoch)
        with own.batches(order) as batches:
            for _ in range(min(order.steps, last - step)):
                micro_batches = [next(batches) for _ in range(order.grad_accum)]
                if step >= first:
                    yield step, epoch, micro_batches
                step += 1
        epoch += 1


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Trains as the worker does, from the first step or from a checkpoint."""
    torch.set_num_threads(job.get("threads", 1))
    trial = trial_of(job)
    device = device_of(trial.train.device, PLACE)
    torch.manual_seed(trial.train.seed)
    module = models.build(trial.model)
    for name, weights in module.named_parameters():
        if weights.dim() in (2, 4) and "position_bias" not in name:
            weights.data *= job.get("grown", 1.0)
    engine = building.build(module, trial, device)
    own = Passes(trial, PLACE, sources.load(trial.data), engine, device, trial.train.seed)
    first = engine.load_checkpoint(Path(job["load"])) if "load" in job else 0
    if job.get("forget"):
        engine.whole_tensors().make_states((), (), 0)
    if job.get("rehearse"):
        own.rehearse_last_step()
    scores = own.evaluate(lambda: None) if "segments" in job else None
    losses, ids = [], []
    at = trial.layout.coordinates(PLACE.rank)
    tells = at.pipeline == at.sequence == at.tensor == 0  # of the images that ranks which share a model take together
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for step, epoch, micro_batches in batches_of(own, first, job["steps"]):
        if step == job.get("save_before"):
            engine.save_checkpoint(folder / job["name"], step)
        if 0 < trial.train.learning_rate_warmup_steps >= step:
            engine.set_learning_rate(trial.learning_rate_at(step))
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for number, batch in enumerate(own.step(iter(micro_batches), epoch=epoch, phase=no_phase)):
            last = number == len(micro_batches) - 1
            loss += own.micro_step(batch, sums, last=last, phase=no_phase) / len(micro_batches)
        if job.get("gradients") and step == job["steps"] - 1:
            save_gradients(engine, folder / f"{job['name']}.safetensors")
        engine.step()
        losses.append(float(loss))
        ids.append([i for batch in micro_batches for i in batch.ids[: batch.real].tolist()] if tells else [])
    found: dict[str, Any] = {"first": first, "losses": losses, "ids": ids, "gradient_dtype": engine.gradient_dtype}
    if scores is not None:
        found["scores"] = [scores.loss, scores.accuracy, scores.mean_iou]
        found["statistics"] = [
            float(followed.double().sum())
            for name, followed in sorted(engine.module.named_buffers())
            if name.endswith(("running_mean", "running_var"))
        ]
    if job.get("evaluate"):
        held_out = own.evaluate(lambda: None)
        found["scores"] = [held_out.loss, held_out.accuracy]
    if job.get("traffic"):
        found["traffic"] = counted_traffic(own, engine, job["steps"])
    if job.get("measure"):
        line = measured_checkpoint(engine, device, folder, job["steps"], lambda: None)
        found["checkpoint"] = line.model_dump(mode="json")
    return found


def counted_traffic(own: Passes, engine: base.Engine, done: int) -> list[dict[str, Any]]:
    """Trains some steps more than the `done` ones, and counts what they send, as the worker does."""
    counter = TrafficCounter()
    first = max(done, FIRST_USUAL_STEP)
    grad_accum = own.trial.train.grad_accum
    sums = torch.zeros(3, dtype=torch.float64, device=own.device)
    for step, epoch, micro_batches in batches_of(own, done, first + COUNTED_STEPS):
        with counter.step(step) if step >= first else nullcontext():
            for number, batch in enumerate(own.step(iter(micro_batches), epoch=epoch, phase=no_phase), start=1):
                own.micro_step(batch, sums, last=number == grad_accum, phase=no_phase)
            engine.step()
    return [line.model_dump(mode="json") for line in counter.lines()]


def save_gradients(engine: base.Engine, path: Path) -> None:
    """Writes the whole gradient, as rank 0 knows it once ranks have exchanged."""
    whole = {
        name: (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
        for name, parameter in engine.module.named_parameters()
        if (grad := parameter.grad) is not None
    }
    if isinstance(engine, MegatronEngine):  # whose optimizer takes gradients from buffers of its own
        held = engine.whole_tensors()
        buffers = {name: vars(parameter)["main_grad"] for name, parameter in held.parameters.items()}
        whole = {name: held.gathered(name, held.own_run(name, buffer)) for name, buffer in buffers.items()}
    of_ranks: list[dict[str, torch.Tensor]] = [{} for _ in range(PLACE.world_size)]
    dist.all_gather_object(of_ranks, whole)  # stages lie on several
    if PLACE.rank == 0:
        save_file({name: own for of_rank in of_ranks for name, own in of_rank.items()}, path)


def make_wrong(how: str | None) -> None:
    """Breaks an engine in a known way: `default-clipping`, `summed-gradients`, `unweighted`, `local-norm` and
    `stage-norm`; None mends it."""

    def without_clipping(trial: Trial) -> dict[str, Any]:
        config = configuration(trial)
        del config["gradient_clipping"]
        return config

    def summed(*arguments: Any) -> torch.Tensor:
        loss = slot_loss(*arguments)
        # The loss as it was, the gradient as many times as there are ranks.
        return loss.detach() + PLACE.world_size * (loss - loss.detach())

    def unweighted(losses: torch.Tensor, *counts: int) -> torch.Tensor:
        own_mean = losses.sum() / max(1, int((losses > 0).sum()))  # the loss of what does not count is 0
        return slot_loss(losses, *counts).detach() + own_mean - own_mean.detach()

    def local_norm(parameters: Any, largest: float, ranks: int) -> None:
        del ranks
        own = [p.grad.to_local() for p in parameters if isinstance(p.grad, DTensor)]
        norm = torch.stack([shard.norm() for shard in own]).norm()
        for shard in own:
            shard.mul_((largest / norm).clamp(max=1.0))

    def stage_norm(parameters: Any, largest: float, ranks: int) -> None:
        del ranks
        torch.nn.utils.clip_grad_norm_(parameters, largest)

    vars(base)["clip"] = {"local-norm": local_norm, "stage-norm": stage_norm}.get(how or "", clip)
    given = without_clipping if how == "default-clipping" else configuration
    loss_of_slot = {"summed-gradients": summed, "unweighted": unweighted}.get(how or "", slot_loss)
    vars(deepspeed)["configuration"], vars(passes)["slot_loss"] = given, loss_of_slot


def main(folder: Path) -> None:
    jobs: list[Job] = json.loads((folder / "jobs.json").read_text())
    device = jobs[0]["train"].get("device", "cpu")
    os.environ[RECORDER_RING[0]] = "2048"  # enough for one job; a ring that holds them all is read anew for each
    on_host = any(job["train"]["engine"] == "fsdp2" and "offload" in job["train"] for job in jobs)
    join(PLACE, device_of(device, PLACE), gradients_on_host=on_host)
    found = {}
    for job in jobs:
        print(job["name"], round(time.monotonic()), flush=True)
        make_wrong(job.get("wrong"))
        try:
            found[job["name"]] = run(job, folder)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # the other ranks lose their connection, and end too
        forget_engines()
        dist.barrier()
    (folder / f"rank-{PLACE.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # taking process groups apart may hang


if __name__ == "__main__":
    main(Path(sys.argv[1]))
