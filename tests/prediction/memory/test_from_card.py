"""Memory of a traced model, added up by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from card_factory import CLASSES, FACTORY, PARAMETERS, make_card, without_blocks
from vitscale.prediction.memory import forecast as forecasts
from vitscale.prediction.memory import from_card
from vitscale.prediction.memory.forecast import forecast, forecast_bytes, peak_bytes_of_many, unavailable
from vitscale.prediction.shares import compute_share, slowest_ranks
from vitscale.prediction.step.messages import messages
from vitscale.trial import model_cost
from vitscale.trial.known_models import KnownModels
from vitscale.trial.model_card import ModelCard, PerImage
from vitscale.trial.model_spec import resolve
from vitscale.trial.parallel import ParallelSpec
from vitscale.trial.trial import DataSpec, TrainSpec, Trial, WindowSpec, World

FROZEN_BYTES, BUFFER_BYTES = 4 * 3, 11


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> KnownModels:
    own = KnownModels()
    for module in (model_cost, from_card, forecasts):
        monkeypatch.setattr(module, "KNOWN_MODELS", own)
    return own


def trial(ranks: int = 1, **train: Any) -> Trial:
    fields: dict[str, Any] = {"engine": "none", "precision": "fp32", "micro_batch": 2, "device": "cpu"} | train
    return Trial(
        model=resolve(FACTORY, CLASSES),
        data=DataSpec(name="synthetic"),
        train=TrainSpec(**fields),
        world=World(ranks_per_node=ranks, threads_per_rank=1),
        window=WindowSpec(steps=1),
        launcher="torchrun",
    )


@pytest.mark.parametrize(
    ("images", "highest_in_forward"),
    [
        (2, 16 + 2 * (100 + 200 + 200) + 502),  # in the second block, which holds 500 + 1 an image for a moment
        (1000, 16 + 1000 * (100 + 200 + 200 + 50 + 24)),  # at the end; 12 bytes an image of the head's 50 are logits
    ],
)
def test_plain_training_adds_states_images_and_what_the_parts_keep(
    known: KnownModels, images: int, highest_in_forward: int
) -> None:
    known.put(make_card())
    moments = forecast(trial(micro_batch=images))
    assert moments is not None
    steady = 12 * PARAMETERS  # fp32 weights, and AdamW's two moments
    beside = 4 * images * 3 * 4 * 4 + 8 * images + FROZEN_BYTES + BUFFER_BYTES
    kept = 16 + images * (100 + 200 + 200 + 50 + 24)
    assert sum(moments.moments["end of forward"].values()) == steady + beside + highest_in_forward
    # Backward begins with the loss, before any gradient is there.
    backward = moments.moments["backward"]
    first_moment = steady + beside + kept + 24 * images
    assert sum(backward.values()) >= first_moment
    step = moments.moments["step"]
    assert sum(step.values()) == steady + beside + 4 * PARAMETERS


def test_of_several_lines_the_highest_counts(known: KnownModels) -> None:
    """A block's forward holds 30 bytes an image, or 500 and 1 an image: equal at 17.2 images."""
    known.put(make_card())
    few = from_card.card_pieces(trial(micro_batch=2), make_card()).parts[1]
    many = from_card.card_pieces(trial(micro_batch=100), make_card()).parts[1]
    assert max(few.forward) == 502
    assert max(many.forward) == 3000


@pytest.mark.parametrize(("precision", "bytes_of_weight"), [("fp32", 4), ("bf16", 2)])
def test_on_a_cpu_a_convolution_s_backward_copies_its_weights_and_their_gradient(
    precision: str, bytes_of_weight: int
) -> None:
    """The stem has 4*3*2*2 = 48 weights; the blocks have matrices."""
    images = 2
    on_cpu, on_gpu = (
        from_card.card_pieces(trial(micro_batch=images, precision=precision, device=device), make_card()).parts
        for device in ("cpu", "cuda")
    )
    assert on_gpu[0].backward == (40 * images,)
    assert on_cpu[0].backward == (40 * images + 48 * (bytes_of_weight + 2 * 4),)
    assert on_cpu[1].backward == on_gpu[1].backward


def test_many_configurations_have_the_same_peaks_as_each_alone(known: KnownModels) -> None:
    known.put(make_card())
    gpus, micro_batches = np.array([1, 1, 2, 4]), np.array([1, 64, 7, 300])
    peaks = peak_bytes_of_many(trial(2, engine="ddp"), gpus, gpus, 1, micro_batches)
    alone = [
        forecast_bytes(trial(int(ranks), engine="ddp", micro_batch=int(batch)))
        for ranks, batch in zip(gpus, micro_batches, strict=True)
    ]
    assert peaks.tolist() == alone


@pytest.mark.parametrize("card", [make_card(), without_blocks(make_card())], ids=["blocks", "no blocks"])
@pytest.mark.parametrize(
    "train",
    [
        {"engine": "ddp"},
        {"engine": "fsdp2"},
        *({"engine": "deepspeed", "zero_stage": stage, "bucket_mib": 1} for stage in range(4)),
        {"engine": "accelerate", "accelerate_backend": "fsdp2"},
    ],
)
def test_every_engine_knows_what_it_holds_and_sends_of_a_traced_model(
    known: KnownModels, train: dict[str, Any], card: ModelCard
) -> None:
    asked = trial(2, **train)
    assert forecast_bytes(asked) is None
    assert messages(asked) is None
    known.put(card)
    plain, there = forecast_bytes(trial(1)), forecast_bytes(asked)
    assert plain is not None
    assert there is not None
    assert there > 0.5 * plain
    sent = messages(asked)
    assert sent is not None
    assert sum(message.tensor_bytes * message.times(1) for message in sent) >= 4 * PARAMETERS


def test_what_was_not_traced_says_so(known: KnownModels) -> None:
    assert unavailable(trial()) == "no formula and no card counts this model"
    known.put(make_card())
    assert unavailable(trial()) == ""
    assert unavailable(trial(device="cuda", precision="bf16")) == "this model was not traced for bf16 on cuda"
    known.replace_with_reason(make_card(checkpointing=True).request, "aten::nonzero needs values")
    assert unavailable(trial(activation_checkpointing=True)) == "aten::nonzero needs values"


def test_logits_stay_until_backward_is_over(known: KnownModels) -> None:
    """They are counted once: beside the part that makes them, which the loop holds."""
    card = make_card()
    pieces = from_card.card_pieces(trial(micro_batch=10), card)
    assert pieces.logits == 120
    assert [part.kept for part in pieces.parts] == [1000, 2008, 2008, 500 - 120, 240]


def test_copies_of_weights_are_those_that_were_traced(known: KnownModels) -> None:
    card = make_card(device="cuda", autocast_dtype="bf16")
    head = card.parts[3].modules[0].model_copy(update={"is_cast": False, "cast_elements": 1000})
    part = card.parts[3].model_copy(update={"modules": (head,)})
    parts = (*card.parts[:3], part, card.parts[4])
    pieces = from_card.card_pieces(trial(device="cuda", precision="bf16"), card.model_copy(update={"parts": parts}))
    assert [part.cast_bytes(linear=True) for part in pieces.parts] == [0, 0, 0, 2000, 0]


@pytest.mark.parametrize(
    ("changes", "card", "reason"),
    [
        ({"parallel": ParallelSpec(tensor=2)}, {}, "not modelled where ranks share it"),
        ({"train": {"engine": "fsdp2"}}, {"frozen_elements": 1000}, "frozen weights"),
        ({"train": {"engine": "deepspeed", "zero_stage": 3}}, {"frozen_elements": 1000}, "frozen weights"),
        ({"train": {"engine": "ddp"}}, {"frozen_elements": 1000, "batch_norm_channels": (4,)}, ""),
    ],
)
def test_what_a_card_does_not_tell_is_unavailable(
    known: KnownModels, changes: dict[str, Any], card: dict[str, Any], reason: str
) -> None:
    known.put(make_card().model_copy(update=card))
    asked = trial(2, **changes.get("train", {"engine": "ddp"}))
    asked = asked.model_copy(update={"parallel": changes.get("parallel", asked.parallel)})
    assert reason in unavailable(asked)
    assert bool(unavailable(asked)) == bool(reason)


def test_stages_of_a_traced_model_are_taken_as_equal(known: KnownModels) -> None:
    """How a factory's module cuts itself is not known here."""
    known.put(make_card())
    asked = trial(2, engine="ddp", grad_accum=2).model_copy(update={"parallel": ParallelSpec(pipeline=2)})
    assert compute_share(asked) == 1
    assert slowest_ranks(asked) == [0, 1]


def test_norms_over_ranks_work_on_three_copies_of_their_input(known: KnownModels) -> None:
    card = make_card()
    normed = card.parts[1].model_copy(update={"largest_batch_norm": PerImage(0, 1000)})
    card = card.model_copy(update={"parts": (card.parts[0], normed, *card.parts[2:])})
    local, synchronised = (
        from_card.card_pieces(trial(2, engine="ddp", batch_norm=scope), card) for scope in ("local", "synchronised")
    )
    alone = from_card.card_pieces(trial(1, engine="ddp", batch_norm="synchronised"), card)
    assert local == alone
    assert local.parts[1].backward == (2 * 60,)
    assert synchronised.parts[1].backward == (2 * 60 + 3 * 2000,)
