"""Lightning: one callback, which also ends training when enough is measured. The study's launcher starts the ranks."""

import os

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from tiny import Images, arguments, build
from torch.utils.data import DataLoader

from vitscale import lightning_callback  # <- 1

options = arguments()
torch.manual_seed(options.seed)


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = build()

    def training_step(self, batch: dict[str, torch.Tensor], _number: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


on_this_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
trainer = Trainer(
    strategy="ddp",
    devices=on_this_host,
    num_nodes=int(os.environ.get("WORLD_SIZE", "1")) // on_this_host,
    plugins=[TorchElasticEnvironment()],  # ranks are those of RANK and WORLD_SIZE, whoever has set them
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    accumulate_grad_batches=options.accumulate,
    max_epochs=90,
    callbacks=[lightning_callback()],  # <- 2
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(), DataLoader(Images(), options.batch_size, drop_last=True))
