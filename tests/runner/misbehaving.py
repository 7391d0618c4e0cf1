"""Models that go wrong on rank 1 in the middle of training, each in its own way."""

import os
import signal
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

STEPS_BEFORE = 3


class Misbehaving(nn.Module):
    """A linear classifier whose forward calls `act` on rank 1 after a few steps."""

    def __init__(self, num_classes: int, image_size: int, act: Callable[[], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * image_size * image_size, num_classes)
        self.calls = 0
        self.act = act

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            if self.calls > STEPS_BEFORE and os.environ.get("RANK") == "1":
                self.act()
        logits: torch.Tensor = self.linear(images.flatten(1))
        return logits


def _raise() -> None:
    raise ValueError("the sensor on rank 1 reads nonsense")


def _out_of_memory() -> None:
    torch.empty(1 << 60)


def _lose_link() -> None:
    """As NCCL's watchdog ends a rank (ProcessGroupNCCL.cpp): its words, and SIGABRT."""
    sys.stderr.write(
        "[rank1]:[E810 03:05:11.149121725 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process "
        "group watchdog thread terminated with exception: NCCL error: remote process exited or there was a network "
        "error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a network error or a remote "
        "process exiting prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer node2<4711>\n"
    )
    sys.stderr.flush()
    os.abort()


def loses_link(num_classes: int, image_size: int) -> nn.Module:
    return Misbehaving(num_classes, image_size, _lose_link)


def well(num_classes: int, image_size: int) -> nn.Module:
    return Misbehaving(num_classes, image_size, lambda: None)


def raises(num_classes: int, image_size: int) -> nn.Module:
    return Misbehaving(num_classes, image_size, _raise)


def out_of_memory(num_classes: int, image_size: int) -> nn.Module:
    return Misbehaving(num_classes, image_size, _out_of_memory)


def exits_early(num_classes: int, image_size: int) -> nn.Module:
    return Misbehaving(num_classes, image_size, lambda: os._exit(0))


def killed(num_classes: int, image_size: int) -> nn.Module:
    return Misbehaving(num_classes, image_size, lambda: os.kill(os.getpid(), signal.SIGKILL))


def hangs(num_classes: int, image_size: int) -> nn.Module:
    return Misbehaving(num_classes, image_size, lambda: time.sleep(3600))


class Lonely(Misbehaving):
    """Rank 1 enters a collective of a group that both have made, and rank 0 never does."""

    group: dist.ProcessGroup | None = None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.group = self.group or dist.new_group()
        return super().forward(images)


def stuck_in_a_collective(num_classes: int, image_size: int) -> nn.Module:
    model = Lonely(num_classes, image_size, lambda: dist.all_reduce(torch.zeros(1), group=model.group))
    return model


def sys_exit(num_classes: int, image_size: int) -> nn.Module:
    return Misbehaving(num_classes, image_size, lambda: sys.exit(3))
