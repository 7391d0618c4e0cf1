"""Models for the tests of tracing; those at the end cannot be traced."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import Tensor, nn

from vitscale.errors import VitscaleError


class Linear(nn.Module):
    """A classifier on the pixels."""

    def __init__(self, num_classes: int, image_size: int) -> None:
        super().__init__()
        self.head = nn.Linear(3 * image_size**2, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(images.flatten(1))
        return logits


def linear(num_classes: int, image_size: int) -> nn.Module:
    return Linear(num_classes, image_size)


def with_an_unused_layer(num_classes: int, image_size: int) -> nn.Module:
    model = Linear(num_classes, image_size)
    model.unused = nn.Linear(5, 5)
    return model


class Tied(nn.Module):
    """Two layers of one weight; only the second has a bias."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.head = nn.Linear(8, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.second(self.first(images.mean(dim=(1, 2)))))
        return logits


def tied(num_classes: int, image_size: int) -> nn.Module:
    model = Tied(num_classes)
    return model.cpu() if image_size else model


class Norms(nn.Module):
    """Batch norms that are called in another order than they are registered in."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.behind, self.before = nn.BatchNorm2d(4), nn.BatchNorm2d(3)
        self.widen = nn.Conv2d(3, 4, 1)
        self.head = nn.Linear(4, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.behind(self.widen(self.before(images))).mean(dim=(2, 3)))
        return logits


def norms(num_classes: int, image_size: int) -> nn.Module:
    return Norms(num_classes)


class Apart(nn.Module):
    """Two blocks with a layer between them."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for width in (3, 8))
        self.widen, self.head = nn.Linear(3, 8), nn.Linear(8, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.blocks[0](images.mean(dim=(2, 3)))
        logits: Tensor = self.head(self.blocks[1](self.widen(hidden)))
        return logits


def apart(num_classes: int, image_size: int) -> nn.Module:
    return Apart(num_classes)


class Staged(nn.Module):
    """Two blocks in a list, and two layers of their class outside of it."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images.mean(dim=(2, 3)))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def staged(num_classes: int, image_size: int) -> nn.Module:
    return Staged(num_classes)


class BlocksInFp32(Staged):
    """It switches autocast off around its blocks."""

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images.mean(dim=(2, 3)))
        with torch.autocast(images.device.type, enabled=False):
            hidden = hidden.float()
            for block in self.blocks:
                hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def blocks_in_fp32(num_classes: int, image_size: int) -> nn.Module:
    return BlocksInFp32(num_classes)


def built_from_values(num_classes: int, image_size: int) -> nn.Module:
    rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
    return Linear(num_classes, image_size) if rates[-1] == 1 else nn.Identity()


class Branching(Linear):
    """Its forward depends on values."""

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        return logits * 2 if logits.sum() > 0 else logits


def branching(num_classes: int, image_size: int) -> nn.Module:
    return Branching(num_classes, image_size)


class Unspeakable(Linear):
    """Its error has a character that no text may have."""

    def forward(self, images: Tensor) -> Tensor:
        raise ValueError("\udc80")


def unspeakable(num_classes: int, image_size: int) -> nn.Module:
    return Unspeakable(num_classes, image_size)


class WordlessError(VitscaleError):
    """An error that says nothing."""

    def __str__(self) -> str:
        return ""


class Wordless(Linear):
    """It raises one."""

    def forward(self, images: Tensor) -> Tensor:
        raise WordlessError("")


def wordless(num_classes: int, image_size: int) -> nn.Module:
    return Wordless(num_classes, image_size)


class Selecting(Linear):
    """The shape of its logits depends on values."""

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        return logits[torch.nonzero(logits[:, 0])[:, 0]]


def selecting(num_classes: int, image_size: int) -> nn.Module:
    return Selecting(num_classes, image_size)


class ThroughNumpy(Linear):
    """It computes outside of torch."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.from_numpy(super().forward(images).detach().numpy())


def through_numpy(num_classes: int, image_size: int) -> nn.Module:
    return ThroughNumpy(num_classes, image_size)


class ChangingWithTheBatch(Linear):
    """It does something else from three images on."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.sqrt() if len(images) > 2 else images)


def changing_with_the_batch(num_classes: int, image_size: int) -> nn.Module:
    return ChangingWithTheBatch(num_classes, image_size)


def without_classes(num_classes: int, image_size: int) -> nn.Module:
    return Linear(num_classes + 2, image_size)


def endless(num_classes: int, image_size: int) -> nn.Module:
    while True:
        torch.device("meta")


class Huge(Linear):
    """It takes 8 GB of address space, in plain Python."""

    def forward(self, images: Tensor) -> Tensor:
        bytearray(8 * 10**9)
        return super().forward(images)


def huge(num_classes: int, image_size: int) -> nn.Module:
    return Huge(num_classes, image_size)


def leaving(num_classes: int, image_size: int) -> nn.Module:
    print("what a model prints is no card")
    raise SystemExit(3)


def ending(num_classes: int, image_size: int) -> nn.Module:
    os._exit(3)


def modèle(num_classes: int, image_size: int) -> nn.Module:
    return Linear(num_classes, image_size)


def sleeping(num_classes: int, image_size: int) -> nn.Module:
    print("sleeping", file=sys.stderr, flush=True)
    time.sleep(60)
    return Linear(num_classes, image_size)
