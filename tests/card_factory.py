"""A card that one can add up by hand."""

from __future__ import annotations

from typing import Any

from vitscale.trial.model_card import CardModule, CardPart, ModelCard, PerImage, TraceRequest
from vitscale.trial.model_spec import ModelSpec, resolve

FACTORY = ModelSpec(factory="mine:build", image_size=4)
CLASSES = 3
STEM_ELEMENTS, BLOCK_ELEMENTS, HEAD_ELEMENTS = 52, 16, 15
PARAMETERS = STEM_ELEMENTS + 2 * BLOCK_ELEMENTS + HEAD_ELEMENTS


def _module(name: str, *shapes: tuple[int, ...]) -> CardModule:
    return CardModule(name=name, shapes=shapes, is_cast=True)


def without_blocks(card: ModelCard) -> ModelCard:
    """The same weights in one part, as of a model without repeated blocks."""
    modules = tuple(module for part in card.parts for module in part.modules)
    whole = CardPart(name="before the blocks", block=0, modules=modules, kept=PerImage(16, 550))
    return card.model_copy(update={"parts": (whole, card.parts[-1])})


def make_card(model: ModelSpec = FACTORY, **request: Any) -> ModelCard:
    """A stem of 4*3*2*2 + 4 = 52 weights, two blocks of 4*4 = 16, a head of 3*4 + 3 = 15.

    An image keeps 100 bytes in the stem, 200 in each block (and 8 whatever the batch), 50 in the head, 24 in the loss.
    """
    resolved = resolve(model, CLASSES)
    block_kept = PerImage(8, 200)
    parts = (
        CardPart(
            name="before the blocks", block=0, modules=(_module("stem", (4, 3, 2, 2), (4,)),), kept=PerImage(0, 100),
            backward=(PerImage(0, 40),), forward_flops=PerImage(0, 400),
        ),
        *(
            CardPart(
                name=f"blocks.{number}", block=number + 1, modules=(_module(f"blocks.{number}.fc", (4, 4)),),
                kept=block_kept, forward=(PerImage(0, 30), PerImage(500, 1)), backward=(PerImage(0, 60),),
                forward_flops=PerImage(0, 128),
            )
            for number in range(2)
        ),
        CardPart(
            name="after the blocks", block=-1, modules=(_module("head", (3, 4), (3,)),), kept=PerImage(0, 50),
            forward_flops=PerImage(0, 24),
        ),
        CardPart(name="loss", block=-1, kept=PerImage(0, 24), backward=(PerImage(0, 24),)),
    )  # fmt: skip
    return ModelCard(
        request=TraceRequest(model=resolved, **request),
        versions={"tracer": "1"},
        parts=parts,
        frozen_elements=3,
        buffer_bytes=11,
        logits=PerImage(0, 12),
        forward_flops={"matmul": PerImage(10, 280), "convolution": PerImage(0, 400)},
        backward_flops={"matmul": PerImage(20, 560), "convolution": PerImage(0, 400)},
    )
