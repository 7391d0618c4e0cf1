"""Hugging Face Trainer: one callback, which also ends training when enough is measured."""

import tempfile

import torch
from tiny import Images, arguments, build
from transformers import Trainer, TrainingArguments

from vitscale import trainer_callback  # <- 1

options = arguments()
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        build(),
        TrainingArguments(
            folder,
            per_device_train_batch_size=options.batch_size,
            gradient_accumulation_steps=options.accumulate,
            dataloader_drop_last=True,
            num_train_epochs=90,
            seed=options.seed,
            use_cpu=not torch.cuda.is_available(),  # else it sees no ranks on a CPU, and each trains alone
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
        ),
        train_dataset=Images(),
        callbacks=[trainer_callback()],  # <- 2
    )
    trainer.train()
