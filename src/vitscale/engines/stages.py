"""A vision transformer in pipeline stages: which modules a rank keeps, under their names in the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from vitscale.engines.splits import own_group
from vitscale.models.named import VisionTransformer
from vitscale.trial.model_cost import stage_blocks
from vitscale.trial.trial import Trial


class Stage(nn.Module):
    """Some blocks of a vision transformer, with the embedding before the first one and the head behind the last."""

    def __init__(self, model: VisionTransformer, blocks: Sequence[int]) -> None:
        """`blocks`: which, in order. The modules are the model's own, and so are their names."""
        super().__init__()
        encoder = model.vit
        self.first, self.last = 0 in blocks, len(encoder.layers) - 1 in blocks
        self.vit = nn.Module()
        if self.first:
            self.vit.embeddings = encoder.embeddings
        self.vit.layers = nn.Module()
        for block in blocks:
            self.vit.layers.add_module(str(block), encoder.layers[block])
        if self.last:
            self.vit.layernorm, self.classifier = encoder.layernorm, model.classifier
            self.class_token_of = model.class_token_of

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [b, tokens, h] of hidden states; the first stage takes images, the last one makes logits."""
        if self.first:
            hidden = self.vit.get_submodule("embeddings")(hidden)
        for block in self.vit.get_submodule("layers").children():
            hidden = block(hidden)
        if self.last:
            hidden = self.classifier(self.class_token_of(self.vit.get_submodule("layernorm")(hidden)))
        return hidden


@dataclass(frozen=True)
class Whole:
    """A parameter of the whole model."""

    parameter: nn.Parameter
    """Without elements (device "meta")."""
    owner: int
    """The rank of the pipeline's group that holds it."""


class Stages(nn.Module):
    """What one rank holds of a model in stages."""

    def __init__(self, model: VisionTransformer, trial: Trial, wrap: Callable[[nn.Module], nn.Module]) -> None:
        """See `in_stages`; all ranks make one at once."""
        super().__init__()
        layout, ranks = trial.layout, trial.parallel.pipeline
        self.group = own_group(layout.groups("pipeline"))
        blocks = stage_blocks(trial.model, trial.parallel.stages)
        rank = layout.coordinates(dist.get_rank()).pipeline
        self.own = Stage(model, [block for of_stage in blocks[rank::ranks] for block in of_stage])
        """All that lies here; nothing goes forward through it, but names and weights are right."""
        holders = [Stage(model, [block for own in blocks[other::ranks] for block in own]) for other in range(ranks)]
        owners = {name: other for other, held in enumerate(holders) for name, _ in held.named_parameters()}
        self.whole = {
            name: Whole(nn.Parameter(torch.empty(own.shape, device="meta"), own.requires_grad), owners[name])
            for name, own in model.named_parameters()
        }
        embeddings = model.vit.embeddings
        tokens = embeddings.own_tokens
        self.hidden_shape = (
            embeddings.position_embeddings.shape[1] if tokens is None else len(tokens), model.vit.width
        )  # fmt: skip
        """Of what a stage hands on of each image: tokens of this rank and their width."""
        self.wrapped = nn.ModuleList(wrap(Stage(model, of_stage)) for of_stage in blocks[rank::ranks])
        """One for each stage of this rank, in the order of the model."""


def in_stages(model: nn.Module, trial: Trial, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Wraps the model; or, where ranks hold stages of it, each of this rank's stages (`Stages`).

    Args:
        model: on its device, alike on all ranks and with its blocks' options; cut along the other axes already.
        trial: whose layout says where this rank stands.
        wrap: what distributes a module over the ranks that hold the same of it.
    """
    if trial.parallel.pipeline == 1:
        return wrap(model)
    if not isinstance(model, VisionTransformer):
        raise TypeError(f"{type(model).__name__} cannot be cut into stages")
    return Stages(model, trial, wrap)
