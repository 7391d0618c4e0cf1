"""What the examples train: a small vision transformer, on random images. No line of it is vitscale's."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import ViTConfig, ViTForImageClassification


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def build() -> nn.Module:
    config = ViTConfig(
        image_size=16, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        num_labels=10,
    )  # fmt: skip
    return ViTForImageClassification(config)


class Images(Dataset[dict[str, torch.Tensor]]):
    """Random ones, with their classes."""

    def __len__(self) -> int:
        return 640

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        drawn = torch.Generator().manual_seed(number)
        return {"pixel_values": torch.randn(3, 16, 16, generator=drawn), "labels": torch.tensor(number % 10)}
