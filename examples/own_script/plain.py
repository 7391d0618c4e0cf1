"""Plain PyTorch with DDP. The lines of vitscale are marked; outside a study they do nothing."""

import torch
import torch.distributed as dist
from tiny import Images, arguments, build
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from vitscale import Probe  # <- 1

options = arguments()
dist.init_process_group()
torch.manual_seed(options.seed)
model = DistributedDataParallel(build())
optimizer = torch.optim.AdamW(model.parameters())
sampler = DistributedSampler(Images(), drop_last=True)
loader = DataLoader(Images(), options.batch_size, sampler=sampler, drop_last=True)
probe = Probe()  # <- 2

for epoch in range(90):
    sampler.set_epoch(epoch)
    for number, batch in enumerate(probe.steps(loader, accumulate=options.accumulate), start=1):  # <- 3
        loss = model(**batch).loss / options.accumulate
        loss.backward()
        if number % options.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    if probe.done:
        break

dist.destroy_process_group()
