"""Which DDP module says when a rank's last gradient was ready."""

from __future__ import annotations

import sys

import pytest
from torch import nn

from vitscale.hook.exchange import find_ddp


class Wrapped(nn.Module):
    """Stands in for DDP, which needs a process group."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


def test_of_several_ddp_modules_none_knows_when_the_last_gradient_was_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator and a discriminator, each in DDP; or one model, below another wrapper or counted twice."""
    distributed = pytest.importorskip("torch.nn.parallel.distributed")
    assert distributed is sys.modules["torch.nn.parallel.distributed"]
    monkeypatch.setattr(distributed, "DistributedDataParallel", Wrapped)
    generator, discriminator = Wrapped(), Wrapped()
    assert find_ddp([generator, discriminator]) is None
    assert find_ddp([nn.ModuleList([generator]), generator, nn.Linear(2, 2)]) is generator
    assert find_ddp([nn.Linear(2, 2)]) is None
