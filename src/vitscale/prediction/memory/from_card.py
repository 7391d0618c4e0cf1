"""A traced model part by part, for one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

from vitscale.engines.dtypes import weight_bytes
from vitscale.engines.parts import Part
from vitscale.engines.trace_requests import trace_request
from vitscale.prediction.memory.pieces import Pieces
from vitscale.trial.known_models import KNOWN_MODELS
from vitscale.trial.model_card import CardPart, ModelCard, PerImage
from vitscale.trial.model_cost import card_block
from vitscale.trial.rank_batches import largest_micro_batch
from vitscale.trial.trial import Trial

_PIXEL_BYTES = 4
"""Bytes of a channel of a pixel in the float images that the loop makes."""
_LABEL_BYTES = 8


def card_of(trial: Trial) -> ModelCard | None:
    """Return the card of a trial's model under the trial's conditions; None where there is none."""
    return KNOWN_MODELS.card(trace_request(trial))


def card_pieces(trial: Trial, card: ModelCard) -> Pieces:
    """Return the parts of a traced model, and the bytes beside them, for the rank's micro-batch."""
    images = largest_micro_batch(trial.train)
    element_bytes = weight_bytes(trial.train)
    parts = [_part(part, images) for part in card.parts]
    return Pieces(
        parts=tuple(parts),
        images=_image_bytes(trial, images),
        logits=card.logits.of(images),
        buffers=card.buffer_bytes + card.frozen_elements * element_bytes,
    )


def _image_bytes(trial: Trial, images: int) -> int:
    """Return the bytes of a micro-batch's images, of their cast to narrow weights' dtype, and of its labels."""
    pixels = images * trial.model.image_size**2
    pixel_bytes = _PIXEL_BYTES
    if weight_bytes(trial.train) == 2:
        pixel_bytes += 2
    is_segmentation = trial.model.task == "segmentation"
    labels = pixels if is_segmentation else images
    return pixels * trial.model.channels * pixel_bytes + labels * _LABEL_BYTES


def _part(part: CardPart, images: int) -> Part:
    """Return a part of a card for so many images."""
    return Part(
        kept=part.kept.of(images),
        forward=_amounts(part.forward, images),
        backward=_amounts(part.backward, images),
        modules=card_block(part).in_forward,
        block=part.block,
    )


def _amounts(lines: Sequence[PerImage], images: int) -> tuple[int, ...]:
    return tuple(line.of(images) for line in lines)
