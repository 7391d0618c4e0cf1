"""One rank of a group: batch norm over its share of some images, forward and backward, as `test_batch_norm` asks.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as any rank has them; its argument is a folder with `images.pt` (images
[n, C, h, w], the gradient of what comes out, and for each rank where its share begins, ends, and how many count).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from vitscale.models.batch_norm import BatchNorm, average_statistics


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    given = torch.load(folder / "images.pt", weights_only=True)
    first, last, real = given["shares"][rank].tolist()
    found = {}
    for kind in ("synchronised", "local"):
        own = nn.BatchNorm2d(given["images"].shape[1])
        with torch.no_grad():
            own.weight.copy_(given["weight"])
            own.bias.copy_(given["bias"])
        norm = BatchNorm(own, synchronised=kind == "synchronised")
        norm.real = real
        images = given["images"][first:last].clone().requires_grad_(True)
        normed = norm(images)
        torch.autograd.backward((normed * given["gradient"][first:last]).sum())
        norm.real = 0
        norm(images)  # padding alone on every rank, which leaves all as it is
        average_statistics([norm])
        tensors = {"normed": normed.detach(), "of_images": images.grad, "running_mean": norm.running_mean,
                   "running_var": norm.running_var, "batches": norm.num_batches_tracked}  # fmt: skip
        for name, parameter in norm.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient)
            tensors[name] = gradient
        found[kind] = tensors
    torch.save(found, folder / f"rank-{rank}.pt")
    dist.barrier()
    os._exit(0)  # taking process groups apart may hang


if __name__ == "__main__":
    main(Path(sys.argv[1]))
