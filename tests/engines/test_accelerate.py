"""Accelerate with FSDP2, which it refuses on a CPU: what can be seen of it without a GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from forks import prepared_here
from results_factory import make_trial
from vitscale import models
from vitscale.engines.accelerate.wrap import AccelerateEngine, fsdp2_plugin, replicas_config
from vitscale.models.tracing import trace
from vitscale.trial.model_card import TraceRequest
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.parallel import ParallelSpec


class Model(nn.Module):
    """Two blocks; notes in which dtype each of them computed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.computed: list[torch.dtype] = []

    def forward(self, images: Tensor) -> Tensor:
        for block in self.blocks:
            images = block(images)
            self.computed.append(images.dtype)
        return images


@pytest.fixture
def single_process() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped_by_accelerate(model: nn.Module) -> set[str]:
    """Names of the modules that Accelerate's own code wraps, which it does on a GPU alone."""
    trial = make_trial("accelerate", 2, accelerate_backend="fsdp2", device="cuda", precision="fp32")
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=fsdp2_plugin(model, trial.train)),
        mixed_precision="no",
        is_main_process=True,
        torch_device_mesh=None,
    )
    fsdp2_prepare_model(accelerator, model)
    return {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}


def test_accelerate_wraps_the_blocks_that_are_traced_and_nothing_else_of_their_class(single_process: None) -> None:
    spec = ModelSpec(factory="models.tracing.factories:staged", image_size=8, num_classes=7)
    traced_blocks = {part.name for part in trace(TraceRequest(model=spec)).parts if part.block > 0}
    model = models.build(spec)
    assert wrapped_by_accelerate(model) == {""} | traced_blocks == {"", "blocks.0", "blocks.1"}
    assert model(torch.ones(2, 3, 8, 8)).shape == (2, 7)


def test_accelerate_wraps_a_model_without_blocks_as_one(single_process: None) -> None:
    assert wrapped_by_accelerate(nn.Linear(4, 4)) == {""}


class WithoutEmbeddings(Model):
    """It answers as transformers' UperNet and ConvNeXt do."""

    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError


def test_accelerate_wraps_a_model_that_knows_no_embeddings_of_its_own(single_process: None) -> None:
    assert wrapped_by_accelerate(WithoutEmbeddings()) == {"", "blocks.0", "blocks.1"}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_accelerate_leaves_fsdp2_s_weights_and_gradients_in_fp32(precision: str) -> None:
    """What Accelerate does with a plugin once it knows of a mixed precision; left to itself it shards in that dtype."""
    trial = make_trial("accelerate", 2, accelerate_backend="fsdp2", device="cuda", precision=precision)
    plugin = fsdp2_plugin(Model(), trial.train)
    plugin.set_mixed_precision(precision)
    assert plugin.mixed_precision_policy == MixedPrecisionPolicy(param_dtype=None, reduce_dtype=None, output_dtype=None)
    plugin.mixed_precision_policy = None
    plugin.set_mixed_precision(precision)
    assert plugin.mixed_precision_policy.param_dtype in (torch.bfloat16, torch.float16)


def test_replicas_are_accelerates_mesh_whatever_the_shell_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks in two replicas: dimensions and sizes of the mesh that Accelerate 1.15 makes, replicas first."""
    for name in ("DP_REPLICATE_SIZE", "DP_SHARD_SIZE", "TP_SIZE", "CP_SIZE", "SP_SIZE"):
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}", "16")
    trial = make_trial("accelerate", 8, accelerate_backend="fsdp2", device="cuda")
    trial = trial.model_copy(update={"parallel": ParallelSpec(replicate=2)})
    config = replicas_config(trial)
    assert dict(zip(*config._get_mesh(), strict=True)) == {"dp_replicate": 2, "dp_shard": 4}
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    assert config.total_size == 8
    gpus = SimpleNamespace(multi_device=True, num_processes=8, is_fsdp2=True, is_main_process=True)
    config._validate_accelerator(gpus)  # which raises for ranks that do not fill the mesh
    with pytest.raises(ValueError, match="total_size"):
        config._validate_accelerator(SimpleNamespace(**vars(gpus) | {"num_processes": 4}))


def test_on_one_gpu_accelerate_wraps_nothing_in_ddp_and_that_is_taken_as_it_is() -> None:
    """Its one process is not distributed (1.15): a bare model is right there, and wrong with two."""
    engine: Any = AccelerateEngine.__new__(AccelerateEngine)
    engine.train_spec = make_trial("accelerate", 1, accelerate_backend="ddp", device="cuda").train
    engine.wrapped, engine.has_no_wrapper = Model(), True
    engine._check_wrapper()
    assert engine.module is engine.evaluated is engine.wrapped
    engine.has_no_wrapper = False
    with pytest.raises(RuntimeError, match="'ddp', but Accelerate made a Model of the model"):
        engine._check_wrapper()


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_bf16_is_autocast_over_fp32_weights_under_fsdp2_too(precision: str, dtype: torch.dtype) -> None:
    engine: Any = AccelerateEngine.__new__(AccelerateEngine)
    engine.train_spec = make_trial("accelerate", 2, accelerate_backend="fsdp2", precision=precision).train
    engine.device, engine.input_dtype, engine.wrapped = torch.device("cpu"), torch.float32, Model()
    engine.accelerator = SimpleNamespace(
        accumulate=lambda _: nullcontext(), sync_gradients=True, backward=lambda loss: loss.backward()
    )
    engine.micro_step(torch.ones(2, 4), Tensor.sum, last=True)
    engine.evaluate(torch.ones(2, 4))
    assert engine.wrapped.computed == [dtype] * 4
    assert {parameter.grad.dtype for parameter in engine.wrapped.parameters()} == {torch.float32}


SWIN_IN_BF16 = """
import os
import torch
import torch.distributed as dist
from results_factory import make_trial
from engines.curves import SWIN
from vitscale import models
from vitscale.engines import building

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
losses = []
for name, more in (("deepspeed", {}), ("accelerate", {"accelerate_backend": "deepspeed"})):
    trial = make_trial(name, 1, zero_stage=1, precision="bf16-params", bucket_mib=1, **more)
    trial = trial.model_copy(update={"model": SWIN})
    torch.manual_seed(0)
    engine = building.build(models.build(SWIN), trial, torch.device("cpu"))
    images = torch.randn(2, 3, 16, 16)
    losses.append(float(engine.micro_step(images, lambda logits: logits.float().square().mean(), last=True)))
    engine.step()
print(losses)
os._exit(0)
"""


def test_through_accelerate_deepspeed_gets_constants_in_the_weights_dtype_too(tmp_path: Path) -> None:
    """Swin V2's tables of positions are no parameters, and DeepSpeed casts nothing else."""
    script = tmp_path / "swin.py"
    script.write_text(SWIN_IN_BF16.replace("os._exit", "import sys; sys.stdout.flush(); os._exit"))
    answer = prepared_here().run({"kind": "script", "argv": [str(script)], "environment": dict(os.environ)}, 300)
    assert answer.returncode == 0, answer.stderr[-2000:]
    own, through = json.loads(answer.stdout.splitlines()[-1])
    assert own == through > 0
