"""Real ranks: with synchronised norms every engine labels pixels as a single process does, on 1, 2 and 3 of them."""

from __future__ import annotations

import pytest

from engines import jobs
from engines.curves import SEGMENTED_STEPS, Curve, largest_difference, train
from forks import prepared_here

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1500)]

EQUAL = 1e-5
"""Of the loss, in fp32 over all steps."""


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Curve]]:
    folder = tmp_path_factory.mktemp("segmented")
    return {ranks: train(jobs.segmented(ranks), ranks, folder / str(ranks), prepared_here()) for ranks in (1, 2, 3)}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_engine_trains_as_one_process_does(worlds: dict[int, dict[str, Curve]], ranks: int) -> None:
    """Every third step has four images, so that on three ranks one has nothing but padding."""
    reference = worlds[1]["segmented"].losses
    assert len(reference) == SEGMENTED_STEPS
    assert reference[0] - reference[-1] > 20 * EQUAL * reference[0], "it trains, by far more than the bound"
    differences = {
        engine: largest_difference(worlds[ranks][f"{engine} segmented"].losses, reference) for engine in jobs.ENGINES
    }
    assert max(differences.values()) < EQUAL, differences


@pytest.mark.parametrize("engine", jobs.FULLY)
def test_fine_tuning_is_equal_too(worlds: dict[int, dict[str, Curve]], engine: str) -> None:
    """AdamW at 6e-5."""
    curve, reference = worlds[2][f"{engine} segmented fine-tuned"], worlds[1]["segmented fine-tuned"]
    difference = largest_difference(curve.losses, reference.losses)
    assert difference < EQUAL


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero-2"])
def test_two_micro_steps_are_those_of_one_process(worlds: dict[int, dict[str, Curve]], engine: str) -> None:
    curve, reference = worlds[2][f"{engine} segmented accumulated"], worlds[1]["segmented accumulated"]
    assert largest_difference(curve.losses, reference.losses) < EQUAL
    assert largest_difference(curve.losses[:2], worlds[1]["segmented"].losses[:2]) > 10 * EQUAL, "norms see half"


def test_a_vit_on_its_pyramid_is_equal_too(worlds: dict[int, dict[str, Curve]]) -> None:
    curve, reference = worlds[2]["ddp segmented vit"], worlds[1]["segmented vit"]
    assert largest_difference(curve.losses, reference.losses) < EQUAL


def test_local_norms_are_another_training(worlds: dict[int, dict[str, Curve]]) -> None:
    """And the harness sees it."""
    local = worlds[2]["ddp segmented local"].losses
    assert largest_difference(local, worlds[1]["segmented"].losses) > 100 * EQUAL


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_scores_are_those_of_one_process_exactly(worlds: dict[int, dict[str, Curve]], ranks: int) -> None:
    """Of the same weights: accuracy and mean IoU to the last bit, on every rank; the loss but for its rounding."""
    loss, accuracy, mean_iou = worlds[1]["segmented"].scores[0]
    assert 0 < mean_iou < accuracy < 1
    for name in ("ddp segmented", "zero-3 segmented"):
        for scores in worlds[ranks][name].scores:
            assert scores[1:] == [accuracy, mean_iou]
            assert scores[0] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("name", jobs.COUNTED)
def test_norms_and_the_count_of_pixels_are_sent_as_rows_of_their_own(
    worlds: dict[int, dict[str, Curve]], name: str
) -> None:
    """UperNet on three maps has ten norms of 16 channels, and one of 8 in its auxiliary head."""
    micro_steps = 2 if "accumulated" in name else 1
    calls, elements = 2 * 11, 10 * (33 + 32) + 17 + 16
    other = 2 if "zero-3" in name else 0  # two sums of its own, of one element each
    for line in worlds[2][name].traffic[0]:
        sent = [one for one in line["collectives"] if one["operation"] == "all_reduce"]
        doubles = [one["input_elements"] for one in sent if one["dtype"] == "float64"]
        assert (len(doubles), sum(doubles)) == (micro_steps * calls + other, micro_steps * elements + other)
        assert [one["input_elements"] for one in sent if one["dtype"] == "int64"] == [1]
        # Buffers are equal on all ranks already; a broadcast would hide who waits for whom.
        assert not [one for one in line["collectives"] if one["operation"] == "broadcast"]
