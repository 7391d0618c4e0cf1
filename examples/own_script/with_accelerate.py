"""Hugging Face Accelerate, with its own accumulation. Phases and the loss are told too, which nobody must."""

import torch
from accelerate import Accelerator
from tiny import Images, arguments, build
from torch.utils.data import DataLoader

from vitscale import Probe  # <- 1

options = arguments()
torch.manual_seed(options.seed)
accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=options.accumulate)
model = build()
probe = Probe()  # <- 2
probe.describe(model, precision="fp32")
loader = DataLoader(Images(), options.batch_size, shuffle=True, drop_last=True)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)

while not probe.done:
    for batch in probe.steps(loader, accumulate=options.accumulate):  # <- 3
        with accelerator.accumulate(model):
            with probe.phase("forward"):
                loss = model(**batch).loss
            with probe.phase("backward"):
                accelerator.backward(loss)
            with probe.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
        probe.loss(loss)

accelerator.end_training()
