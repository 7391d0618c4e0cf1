"""A user's own loop: a linear layer under DDP, as plain as can be."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

from vitscale import Probe

micro_batch, batches = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(12, 10))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = [(torch.randn(micro_batch, 12), torch.randint(10, (micro_batch,))) for _ in range(batches)]
probe = Probe()
probe.describe(model, flops_per_image=720)
while not probe.done:
    for images, labels in probe.steps(loader):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        probe.loss(loss)
dist.destroy_process_group()
