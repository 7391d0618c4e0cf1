"""A loop with events as Composer's, each of which its callbacks hear: `composer_callback()` fits Composer's own too."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tiny import Images, arguments, build
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from vitscale import composer_callback  # <- 1

options = arguments()
dist.init_process_group()
torch.manual_seed(options.seed)


class Trainer:
    """As much of one as there must be."""

    def __init__(self, callbacks: list[Any]) -> None:
        self.callbacks = callbacks
        self.state = SimpleNamespace(batch=None, stop=False)
        self.state.stop_training = lambda: setattr(self.state, "stop", True)

    def event(self, name: str) -> None:
        for callback in self.callbacks:
            if hear := getattr(callback, name, None):
                hear(self.state, None)

    def fit(self, model: torch.nn.Module, loader: DataLoader[Any]) -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        while not self.state.stop:
            self.event("epoch_start")
            for self.state.batch in loader:
                self.event("batch_start")
                optimizer.zero_grad()
                parts = {key: value.chunk(options.accumulate) for key, value in self.state.batch.items()}
                for part in range(options.accumulate):
                    loss = model(**{key: chunks[part] for key, chunks in parts.items()}).loss
                    (loss / options.accumulate).backward()
                optimizer.step()
                self.event("batch_end")
                if self.state.stop:
                    break
            self.event("eval_start")
            self.event("eval_end")


sampler = DistributedSampler(Images(), drop_last=True)
loader = DataLoader(Images(), options.batch_size * options.accumulate, sampler=sampler, drop_last=True)
Trainer(callbacks=[composer_callback()]).fit(DistributedDataParallel(build()), loader)  # <- 2
dist.destroy_process_group()
