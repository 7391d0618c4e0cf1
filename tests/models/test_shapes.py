"""Tensors by arithmetic against the real models: as they are registered, wrapped, and given gradients by autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vitscale import models
from vitscale.engines.gradients import tensors
from vitscale.models.blocks import blocks_of
from vitscale.models.named import AuxiliaryLogits
from vitscale.trial import model_cost
from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.model_spec import ModelSpec, resolve

SWIN: dict[str, Any] = {"name": "swinv2-t", "image_size": 32, "patch_size": 2, "hidden_size": 24, "heads": 3}
SEGMENTS: dict[str, Any] = {"task": "segmentation", "decoder_size": 12}
STAGES: dict[str, Any] = SWIN | {"depths": (2, 1, 1), "window_size": 4}
VIT: dict[str, Any] = {"name": "vit-ti16", "image_size": 32, "patch_size": 8, "hidden_size": 24, "heads": 2}


def shapes_of(spec: ModelSpec) -> ParameterShapes:
    shapes = model_cost.parameter_shapes(spec)
    assert shapes is not None
    return shapes


@pytest.mark.parametrize(
    "shape",
    [
        STAGES,
        SWIN | {"depths": (2,), "window_size": 8},  # no list of stages: the stage's own blocks are wrapped
        STAGES | SEGMENTS,
        STAGES | SEGMENTS | {"depths": (1, 1, 2, 1), "auxiliary_weight": 0.0},
        VIT | {"layers": 3},
        VIT | {"layers": 1},  # a list of one block is none
        VIT | {"layers": 2} | SEGMENTS,
        VIT | {"layers": 2} | SEGMENTS | {"decoder_size": 64},  # whose convolutions outweigh the blocks
    ],
    ids=["swin", "one stage", "upernet", "without auxiliary head", "vit", "one block", "pyramid", "wide decoder"],
)
def test_tensors_are_those_of_the_model_in_both_orders(shape: dict[str, Any]) -> None:
    spec = resolve(ModelSpec(**shape), 5)
    model, shapes = models.build(spec), shapes_of(spec)
    parameters = list(model.parameters())
    assert shapes.tensors() == [tuple(parameter.shape) for parameter in parameters]
    wrapped = [sum(p.numel() for p in block.parameters()) for block in blocks_of(model)]
    assert [block.elements for block in shapes.each() if block.wrapped] == wrapped

    made: list[tuple[int, ...]] = []
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda one: made.append(tuple(one.shape)))
    auxiliary = AuxiliaryLogits(model, spec.auxiliary_weight)
    output = model.train()(torch.randn(2, 3, 32, 32))
    loss = getattr(output, "logits", output).square().sum()
    if (second := auxiliary.take()) is not None:
        loss = loss + second.square().sum()
    loss.backward()
    assert made == [one.shape for one in reversed(tensors(shapes))]
