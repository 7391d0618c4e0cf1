"""A loop as torchtitan has it: FSDP2, batches taken inside of the step, one call for each step."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from tiny import Images, arguments, build
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from vitscale import Probe  # <- 1

options = arguments()
dist.init_process_group()
torch.manual_seed(options.seed)
model = build()
probe = Probe()  # <- 2
probe.describe(model)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())


def batches() -> Iterator[dict[str, torch.Tensor]]:
    sampler = DistributedSampler(Images(), drop_last=True)
    loader = DataLoader(Images(), options.batch_size, sampler=sampler, drop_last=True)
    while True:
        yield from loader


def train_step(endless: Iterator[dict[str, torch.Tensor]]) -> None:
    optimizer.zero_grad()
    for _ in range(options.accumulate):
        with probe.phase("data"):
            batch = next(endless)
        loss = model(**batch).loss / options.accumulate
        loss.backward()
    optimizer.step()


endless = batches()
for step in range(1, 1_000):
    with probe.step(images=options.batch_size * options.accumulate):  # <- 3
        train_step(endless)
    if step % 20 == 0:
        with probe.pause():
            model.eval()  # a checkpoint, an evaluation
            model.train()
    if probe.done:
        break

dist.destroy_process_group()
