"""Swin V2's heads and MLPs over tensor ranks, and its modules in a row for stages.

Its classifier is transformers' own, whose attention reads how many heads there are, and the scale of each head's
logits, from itself: both are cut with the heads, and the small network of position biases by what it gives each head.
"""

from __future__ import annotations

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


def swin_in_order(depths: Sequence[int], heads: Sequence[str]) -> tuple[list[str], list[list[str]], list[str]]:
    """Names of the modules that make up the forward of a `Swinv2ForImageClassification`, or with `heads` of UperNet on
    a `Swinv2Backbone`, one after the other: those before its blocks, those of each block with what merges its stage
    behind the last one, and those behind."""
    units, body = [], "backbone" if heads else "swinv2"
    for stage, depth in enumerate(depths):
        path = f"{body}.encoder.layers.{stage}"
        units += [[f"{path}.blocks.{block}"] for block in range(depth)]
        if stage < len(depths) - 1:
            units[-1].append(f"{path}.downsample")
    return [f"{body}.embeddings"], units, list(heads) or ["swinv2.layernorm", "swinv2.pooler", "classifier"]


def swin_through(name: str, module: nn.Module, given: Tensor | Sequence[Tensor]) -> Tensor | Sequence[Tensor]:
    """What one of `swin_in_order` makes of hidden states [b, h, w, width], the embeddings of images, as transformers'
    modeling_swinv2.py goes through it. For heads of UperNet what each stage gave goes on beside them."""
    hidden, *maps = (given,) if isinstance(given, Tensor) else given
    if name.endswith("embeddings"):
        embedded, sides = module(hidden)
        whole: Tensor = embedded.unflatten(1, sides)
    elif ".layers." in name:
        height, width = hidden.shape[1:3]
        made = module(hidden.flatten(1, 2), (height, width))
        if name.endswith("downsample"):
            maps += [hidden] * name.startswith("backbone")
            height, width = (height + 1) // 2, (width + 1) // 2
        return (made[0] if isinstance(made, tuple) else made).unflatten(1, (height, width)), *maps
    elif name.endswith("_head"):
        whole = module([of_stage.permute(0, 3, 1, 2) for of_stage in (*maps, hidden)])
    elif name.endswith("pooler"):
        whole = module(hidden.flatten(1, 2).transpose(1, 2)).flatten(1)
    else:
        whole = module(hidden)
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
