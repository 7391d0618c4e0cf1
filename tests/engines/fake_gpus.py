"""GPUs that are none, for tests of which one a library asks for: each tensor that is to lie on a GPU lies on the host.

As a program this is one rank that builds engines, with GPUs in place of which there is only a count of them. Each ask
for a GPU (by `torch.cuda.set_device`, by number in `device=` and in `device_ids=`) is noted, and refused as CUDA does
where there is no such one. torch's fake backend stands for NCCL: its collectives end at once, and send nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from typing_extensions import override


class FakeGpus:
    """`count` GPUs, and the numbers of those that were asked for."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked: set[int] = set()
        self.current = 0

    def ask(self, device: Any) -> torch.device:
        """Notes a device that something asks for; an int is a GPU's number.

        Raises:
            RuntimeError: there is no such GPU.
        """
        wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        number = self.current if wanted.index is None else wanted.index
        self.asked.add(number)
        if number >= self.count:
            raise RuntimeError(f"CUDA error: invalid device ordinal ({number} of {self.count})")
        return torch.device("cuda", number)

    def set_device(self, device: Any) -> None:
        """As `torch.cuda.set_device`."""
        self.current = self.ask(device).index

    def redirect(self) -> None:
        """Puts them in place of torch's GPUs for the rest of this process."""
        vars(torch.cuda).update(
            is_available=lambda: True,
            is_initialized=lambda: True,
            device_count=lambda: self.count,
            set_device=self.set_device,
            current_device=lambda: self.current,
            get_device_name=lambda *_: "Example GPU",
            get_device_properties=lambda *_: SimpleNamespace(total_memory=80 << 30, name="Example GPU"),
            memory_allocated=lambda *_: 0,
            get_device_capability=lambda *_: (9, 0),
            is_bf16_supported=lambda *_: True,
            device=type("device", (_Device,), {"gpus": self}),
            synchronize=lambda *_: None,
            empty_cache=lambda: None,
            reset_peak_memory_stats=lambda *_: None,
            Stream=_Stream,
            Event=_Stream,
            stream=lambda _: nullcontext(),
            current_stream=lambda *_: _Stream(),
            default_stream=lambda *_: _Stream(),
        )
        vars(torch.cuda.nvtx).update(range_push=lambda _: 0, range_pop=lambda: 0)
        vars(torch._C)["_get_accelerator"] = lambda: torch.device("cuda")
        original = DistributedDataParallel.__init__

        def wrap(module: Any, *args: Any, device_ids: Any = None, output_device: Any = None, **options: Any) -> None:
            for number in [*(device_ids or []), *([] if output_device is None else [output_device])]:
                self.ask(number)
            original(module, *args, **options)

        vars(sys.modules[DistributedDataParallel.__module__])["DistributedDataParallel"].__init__ = wrap
        _OnHost(self).__enter__()  # type: ignore[no-untyped-call]  # it stays until the process ends


class _Stream:
    """A stream or an event in which all is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: True


class _Device:
    """As `torch.cuda.device`, whose class libraries ask for."""

    gpus: FakeGpus

    def __init__(self, device: Any) -> None:
        self.gpus.ask(device)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


_GET_DEVICE = torch.Tensor.device.__get__


class _OnHost(TorchFunctionMode):
    """Makes tensors on the host that are asked for on a GPU; all tensors say that they lie on the current one."""

    def __init__(self, gpus: FakeGpus) -> None:
        super().__init__()
        self._gpus = gpus

    @override
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function == _GET_DEVICE:
            return torch.device("cuda", self._gpus.current)
        if function is torch.Tensor.record_stream:
            return None
        if function is torch.device:
            return function(*args, **(kwargs or {}))
        if function is torch.Tensor.cuda:
            self._gpus.ask(args[1] if len(args) > 1 else "cuda")
            return args[0]
        on_host = tuple(self._on_host(value) for value in args)
        options = {name: self._on_host(value) for name, value in (kwargs or {}).items()}
        if isinstance(options.get("device"), int):
            options["device"] = self._on_host(torch.device("cuda", options["device"]))
        result = function(*on_host, **options)
        if function is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")  # an optimizer looks for "torch.cuda.FloatTensor"
        return result

    def _on_host(self, value: Any) -> Any:
        """An argument of torch's; a GPU among them is asked for, and the host is in its place."""
        names_gpu = isinstance(value, str) and value.partition(":")[0] == "cuda"
        if names_gpu or (isinstance(value, torch.device) and value.type == "cuda"):
            self._gpus.ask(value)
            return torch.device("cpu")
        return value


def main(count: int, jobs: list[dict[str, Any]]) -> None:
    """Builds each engine as a rank does, and prints the numbers of the GPUs that it asked for."""
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
    from deepspeed.runtime.zero.utils import assert_ints_same_as_other_ranks

    from engines.curves import MODEL
    from engines.forgetting import forget_engines
    from results_factory import make_trial
    from vitscale import models
    from vitscale.engines import building
    from vitscale.worker import group
    from vitscale.worker.rank_process import RankInfo

    gpus = FakeGpus(count)
    gpus.redirect()
    set_accelerator(CUDA_Accelerator())  # it may have been imported for CPUs
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    variables = dict(os.environ)
    found = {}
    for job in jobs:
        gpus.asked.clear()
        forget_engines()
        os.environ |= variables
        trial = make_trial(job["engine"], world_size, device="cuda", **job.get("train", {}))
        trial = trial.model_copy(update={"model": MODEL})
        device = group.device_of("cuda", RankInfo(rank, world_size, local_rank, None))
        building.build(models.build(trial.model), trial, device)
        if trial.train.zero_stage == 3:
            assert_ints_same_as_other_ranks([1])  # as at the end of its first step
        found[job["name"]] = sorted(gpus.asked)
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
