"""Swin V2's heads and MLPs over tensor ranks, and its modules in a row for stages.

Its classifier is transformers' own, whose attention reads how many heads there are, and the scale of each head's
logits, from itself: both are cut with the heads, and the small network of position biases by what it gives each head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as tp
from typing_extensions import override

from vitscale.trial.model_spec import Task

_SCALE = "logit_scale"


def swin_tensor_plan(task: Task) -> dict[str, tp.ParallelStyle]:
    """How DTensor cuts a `Swinv2ForImageClassification`, or UperNet on a `Swinv2Backbone`: in each block attention by
    heads and the MLP by its width, and the classifier of images by classes. Embedding, norms, what merges patches and
    UperNet's heads stay whole."""
    block = f"{'backbone' if task == 'segmentation' else 'swinv2'}.encoder.layers.*.blocks.*"
    attention = f"{block}.attention.self"
    by_heads = ("query", "key", "value", "continuous_position_bias_mlp.2")
    plan: dict[str, tp.ParallelStyle] = {f"{attention}.{name}": tp.ColwiseParallel() for name in by_heads}
    plan[attention] = _Heads()
    plan |= {
        f"{block}.attention.output.dense": tp.RowwiseParallel(),
        f"{block}.intermediate.dense": tp.ColwiseParallel(),
        f"{block}.output.dense": tp.RowwiseParallel(),
    }
    if task == "classification":
        plan["classifier"] = tp.ColwiseParallel(output_layouts=Replicate())
    return plan


def swin_in_order(depths: Sequence[int]) -> tuple[list[str], list[list[str]], list[str]]:
    """Names of the modules that make up a `Swinv2ForImageClassification`'s forward, one after the other: those before
    its blocks, those of each block with what merges its stage behind the last one, and those behind."""
    units = []
    for stage, depth in enumerate(depths):
        path = f"swinv2.encoder.layers.{stage}"
        units += [[f"{path}.blocks.{block}"] for block in range(depth)]
        if stage < len(depths) - 1:
            units[-1].append(f"{path}.downsample")
    return ["swinv2.embeddings"], units, ["swinv2.layernorm", "swinv2.pooler", "classifier"]


def swin_through(name: str, module: nn.Module, hidden: Tensor) -> Tensor:
    """What one of `swin_in_order` makes of [b, tokens, width], the embeddings of images, as transformers'
    modeling_swinv2.py goes through it; maps are square."""
    if ".layers." in name:
        side = math.isqrt(hidden.shape[1])
        given = module(hidden, (side, side))
    else:
        given = module(hidden.transpose(1, 2)).flatten(1) if name.endswith("pooler") else module(hidden)
    whole: Tensor = given[0] if isinstance(given, tuple) else given
    return whole


class _Heads(tp.ParallelStyle):
    """Attention that has a part of the heads; its input becomes one DTensor for the three matrices that read it, whose
    gradients are then reduced once."""

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        heads: Any = module
        heads.num_attention_heads //= device_mesh.size()
        heads.all_head_size //= device_mesh.size()
        whole: nn.Parameter = heads.logit_scale
        shared = distribute_tensor(whole.data, device_mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(_SCALE, nn.Parameter(shared, whole.requires_grad))

        def take_parts(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            scale = module.get_parameter(_SCALE)
            if isinstance(scale, DTensor):
                # An attribute hides the parameter for as long as forward takes.
                module.__dict__[_SCALE] = scale.to_local()
            hidden: Tensor = inputs[0]
            return DTensor.from_local(hidden, device_mesh, [Replicate()], run_check=False), *inputs[1:]

        def leave_parts(module: nn.Module, *_: object) -> None:
            module.__dict__.pop(_SCALE, None)

        module.register_forward_pre_hook(take_parts)
        module.register_forward_hook(leave_parts, always_call=True)
        return module
