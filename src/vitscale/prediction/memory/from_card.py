"""A traced model part by part, for one micro-batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vitscale.engines import wrapper_facts
from vitscale.engines.dtypes import weight_bytes
from vitscale.engines.parts import Part
from vitscale.engines.trace_requests import trace_request
from vitscale.prediction.memory.pieces import Pieces
from vitscale.trial.known_models import KNOWN_MODELS
from vitscale.trial.model_card import CardPart, ModelCard, PerImage
from vitscale.trial.model_cost import card_block
from vitscale.trial.rank_batches import largest_micro_batch
from vitscale.trial.trial import TrainSpec, Trial

_PIXEL_BYTES = 4
"""Bytes of a channel of a pixel in the float images that the loop makes."""
_LABEL_BYTES = 8


def card_of(trial: Trial) -> ModelCard | None:
    """Return the card of a trial's model under the trial's conditions; None where there is none."""
    return KNOWN_MODELS.card(trace_request(trial))


_FEW_FROZEN = 0.05
"""Share of frozen parameters up to which it matters little how an engine shards them."""


def why_card_does_not_suffice(trial: Trial, card: ModelCard) -> str:
    """Return why a card, which is of a whole model on one rank, does not give a trial's memory; empty where it does."""
    if trial.parallel.ranks_per_model > 1:
        return "the memory of a traced model is not modelled where ranks share it"
    has_several_ranks = trial.world.size > 1
    gathers_around_parts = bool(wrapper_facts(trial.train).around_parts)
    shards_weights = gathers_around_parts or trial.train.zero_stage == 3
    if has_several_ranks and shards_weights and card.frozen_elements > _FEW_FROZEN * card.parameters:
        return "frozen weights of a traced model are not modelled where ranks share the weights"
    return ""


def card_pieces(trial: Trial, card: ModelCard) -> Pieces:
    """Return the parts of a traced model, and the bytes beside them, for the rank's micro-batch."""
    images = largest_micro_batch(trial.train)
    element_bytes = weight_bytes(trial.train)
    has_norms_over_ranks = trial.train.batch_norm == "synchronised" and trial.world.size > 1
    parts = []
    for card_part in card.parts:
        part = _part(card_part, images, has_norms_over_ranks=has_norms_over_ranks)
        scratch_bytes = _convolution_scratch_bytes(card_part, trial.train)
        parts.append(part._replace(backward=tuple(amount + scratch_bytes for amount in part.backward)))
    logits = card.logits.of(images)
    if len(parts) > 1:
        # The part before the loss makes the logits. They are counted apart, for the loop holds them until all of
        # backward is over.
        head = parts[-2]
        parts[-2] = head._replace(kept=max(0, head.kept - logits))
    return Pieces(
        parts=tuple(parts),
        images=_input_bytes(trial, images),
        logits=logits,
        buffers=card.buffer_bytes + card.frozen_elements * element_bytes,
    )


def _input_bytes(trial: Trial, images: int) -> int:
    """Return the bytes of a micro-batch: of its images, of their cast to narrow weights' dtype, and of its labels."""
    element_bytes = weight_bytes(trial.train)
    cast_bytes = element_bytes if element_bytes < _PIXEL_BYTES else 0
    pixels = images * trial.model.image_size**2
    labels = pixels if trial.model.task == "segmentation" else images
    return pixels * trial.model.channels * (_PIXEL_BYTES + cast_bytes) + labels * _LABEL_BYTES


_GRADIENT_COPY_BYTES = 2 * 4
"""Bytes of an element in oneDNN's two copies of the gradient of a convolution's weights, which it sums up in fp32."""


def _convolution_scratch_bytes(part: CardPart, train: TrainSpec) -> int:
    """Return the bytes that the backward of a part's largest convolution takes for copies of weights, on a CPU.

    oneDNN works on copies of the weights and of their gradient in blocks of channels, whose number is not documented:
    resnet18 of torchvision took three times the 9.4 MB of its largest convolution (docs/memory.md).
    """
    if train.device != "cpu":
        return 0
    weights = [shape for module in part.modules for shape in module.shapes if len(shape) == _CONVOLUTION_DIMENSIONS]
    largest = max(map(math.prod, weights), default=0)
    product_bytes = 4 if train.precision == "fp32" else 2
    return largest * (product_bytes + _GRADIENT_COPY_BYTES)


_CONVOLUTION_DIMENSIONS = 4
"""Dimensions of the weights of a convolution over images: outputs, inputs, height, width."""
_COPIES_OF_NORMS_OVER_RANKS = 3
"""Copies of its input on which a batch norm over several ranks works in backward (`models.batch_norm`), beside what a
local one takes."""


def _part(part: CardPart, images: int, *, has_norms_over_ranks: bool) -> Part:
    """Return a part of a card for so many images."""
    copies = _COPIES_OF_NORMS_OVER_RANKS * part.largest_batch_norm.of(images) if has_norms_over_ranks else 0
    return Part(
        kept=part.kept.of(images),
        forward=_amounts(part.forward, images),
        backward=tuple(amount + copies for amount in _amounts(part.backward, images)),
        modules=card_block(part).in_forward,
        copied_elements=sum(module.cast_elements for module in part.modules),
        block=part.block,
    )


def _amounts(lines: Sequence[PerImage], images: int) -> tuple[int, ...]:
    return tuple(line.of(images) for line in lines)
