"""Trainers of others under the hook: Hugging Face's Trainer, Accelerate, and DeepSpeed's engine by a stand-in."""

from __future__ import annotations

from pathlib import Path

import pytest

from hook_runs import run_hooked
from vitscale.hook.lines import HookedLoaderLine, HookedModelLine, HookedOptimizerLine

pytestmark = pytest.mark.ranks

TRAINER = """
import torch
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

class Pictures(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        return {"pixel_values": torch.randn(3, 8, 8), "labels": torch.tensor(index % 5)}

config = ViTConfig(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4,
    num_labels=5,
)
arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=2, eval_strategy="steps",
    eval_steps=3, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, bf16=True,
)
model = ViTForImageClassification(config)
Trainer(model, arguments, train_dataset=Pictures(32), eval_dataset=Pictures(16)).train()
"""


def test_hugging_face_trainer(tmp_path: Path) -> None:
    rank = run_hooked(tmp_path, TRAINER).only_rank
    assert [(step.micro_steps, step.images) for step in rank.steps[1:]] == [(2, 8)] * 7
    assert [(cut.after_step, cut.kind, cut.evaluated_batches) for cut in rank.breaks] == [
        (3, "evaluation", 2),
        (6, "evaluation", 2),
    ]
    model = rank.of(HookedModelLine)[-1]
    assert (model.class_name, model.autocast, model.compiled) == ("ViTForImageClassification", "bfloat16", False)
    (loader,) = rank.of(HookedLoaderLine)
    assert (loader.batch_size, loader.dataset) == (4, "Pictures")
    assert [line.class_name for line in rank.of(HookedOptimizerLine)] == ["AdamW"]
    assert rank.notes == []


ACCELERATE = """
import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
data = torch.utils.data.TensorDataset(torch.randn(32, 20), torch.zeros(32).long())
model = nn.Sequential(nn.Linear(20, 8), nn.Linear(8, 5))
optimizer = torch.optim.AdamW(model.parameters())
training = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
validation = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer, training, validation = accelerator.prepare(model, optimizer, training, validation)
for epoch in range(2):
    for values, labels in training:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(values), labels))
            optimizer.step()
            optimizer.zero_grad()
    with torch.inference_mode():
        for values, labels in validation:
            model(values)
"""


def test_accelerate(tmp_path: Path) -> None:
    rank = run_hooked(tmp_path, ACCELERATE).only_rank
    assert [(step.micro_steps, step.images) for step in rank.steps[1:]] == [(2, 8)] * 7
    assert [(cut.after_step, cut.kind, cut.evaluated_batches) for cut in rank.breaks] == [(4, "evaluation", 4)]
    assert rank.notes == []


ENGINE = """
import importlib
import torch
from torch import nn

Engine = importlib.import_module("deepspeed.runtime.engine").DeepSpeedEngine
engine = Engine(nn.Linear(6, 3))
for _ in range(12):
    engine(torch.randn(5, 6)).sum().backward()
    engine.step()
"""
ENGINE_MODULE = '''
import torch

class DeepSpeedEngine(torch.nn.Module):
    """Steps at each third call, an optimizer for each of two groups, as ZeRO's optimizer does inside."""
    def __init__(self, module):
        super().__init__()
        self.module = module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        self.bias = torch.optim.SGD([module.bias], lr=0.01)
        self.calls = self.global_steps = 0
    def forward(self, values):
        return self.module(values)
    def zero_optimization_stage(self):
        return 2
    def step(self):
        self.calls += 1
        if self.calls % 3 == 0:
            self.optimizer.step()
            self.bias.step()
            self.global_steps += 1
'''


def test_deepspeed_steps_end_at_its_boundary(tmp_path: Path) -> None:
    """An engine of its name and its calls: DeepSpeed itself builds an extension at first, which takes minutes."""
    package = tmp_path / "deepspeed/runtime"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "engine.py").write_text(ENGINE_MODULE)
    rank = run_hooked(tmp_path, ENGINE).only_rank
    assert [(step.micro_steps, step.images) for step in rank.steps] == [(3, None), (3, None), (3, 15), (3, 15)]
    model = rank.of(HookedModelLine)[-1]
    assert (model.class_name, model.strategy) == ("Linear", "DeepSpeed ZeRO-2")
    assert [line.class_name for line in rank.of(HookedOptimizerLine)] == ["SGD"]
    assert rank.notes == []
