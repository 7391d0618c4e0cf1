"""DeepSpeed, ZeRO-1. Its engine counts micro-steps itself; a Probe counts the same ones."""

import deepspeed
import torch
from tiny import Images, arguments, build
from torch.utils.data import DataLoader, DistributedSampler

from vitscale import Probe  # <- 1

options = arguments()
if not torch.cuda.is_available():  # else it would compile a kernel of its inference for a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
torch.manual_seed(options.seed)
model = build()
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_micro_batch_size_per_gpu": options.batch_size,
        "gradient_accumulation_steps": options.accumulate,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": 1},
    },
)
sampler = DistributedSampler(Images(), drop_last=True)
loader = DataLoader(Images(), options.batch_size, sampler=sampler, drop_last=True)
probe = Probe()  # <- 2

while not probe.done:
    for batch in probe.steps(loader, accumulate=options.accumulate):  # <- 3
        loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
        engine.backward(loss)
        engine.step()
