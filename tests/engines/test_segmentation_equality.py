"""Real ranks: with synchronised norms every engine labels pixels as a single process does, on 1, 2 and 3 of them.

By day some engines; every engine, optimizer and model at night.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from engines import jobs
from engines.curves import SEGMENTED_SAMPLES, SEGMENTED_STEPS, SEGMENTER, Curve, largest_difference, train
from engines.many_engines import trial_of
from forks import prepared_here
from image_files import blocks, write_scene
from vitscale.prediction.step.messages import norm_messages

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1500)]

EQUAL = 1e-5
"""Of the loss, in fp32 over all steps."""
FOLLOWED = 1e-4
"""Of a norm's running mean or variance, of which sixteen channels are added up; the largest seen is 2.0e-5."""
SIZES = [(48, 36), (30, 48), (40, 40), (12, 48), (20, 15), (96, 64), (48, 17)]
"""Heights and widths of scenes."""
RESUMED = slice(jobs.SEGMENTED_BEFORE, None)

Worlds = dict[int, dict[str, Curve]]


def trained(folder: Path, *, by_day: bool) -> Worlds:
    """Two ranks first: they leave the checkpoints."""
    for split, count in (("training", SEGMENTED_SAMPLES), ("validation", 7)):
        for number in range(count):
            write_scene(folder / "scenes", split, f"{number}", blocks(*SIZES[number % len(SIZES)], 5, number))
    return {
        ranks: train(
            jobs.segmented(ranks, folder / "2", by_day=by_day) + jobs.of_scenes(ranks, folder / "scenes"),
            ranks,
            folder / str(ranks),
            prepared_here(),
            1200.0,
        )
        for ranks in (2, 1, 3)
    }


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return trained(tmp_path_factory.mktemp("some"), by_day=True)


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return trained(tmp_path_factory.mktemp("every"), by_day=False)


@pytest.fixture(params=["some", pytest.param("every", marks=pytest.mark.nightly)])
def worlds(request: pytest.FixtureRequest) -> Worlds:
    found: Worlds = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_engines_train_as_one_process_does(worlds: Worlds, ranks: int) -> None:
    """Every third step has four images, so that on three ranks one has nothing but padding. Fine-tuned: AdamW at 6e-5.
    In two micro-steps as one process in two."""
    settings = ("segmented", "segmented fine-tuned", "segmented accumulated", "segmented vit")
    differences = {
        name: largest_difference(curve.losses, worlds[1][setting].losses)
        for name, curve in worlds[ranks].items()
        if (setting := name.partition(" ")[2]) in settings
    }
    assert differences or ranks == 1
    assert max(differences.values(), default=0.0) < EQUAL, differences
    followed = [curve.statistics for name, curve in worlds[ranks].items() if name.partition(" ")[2] == "segmented"]
    for statistics in chain.from_iterable(followed):
        assert len(statistics) == 2 * 11
        assert statistics == pytest.approx(worlds[1]["segmented"].statistics[0], rel=EQUAL, abs=FOLLOWED)
    reference = worlds[1]["segmented"].losses
    assert len(reference) == SEGMENTED_STEPS
    assert reference[0] - reference[-1] > 20 * EQUAL * reference[0], "it trains, by far more than the bound"
    halves = worlds[1]["segmented accumulated"].losses
    assert largest_difference(halves[:2], reference[:2]) > 10 * EQUAL, "norms see half"


def test_adamw_at_a_rate_that_amplifies_rounding(worlds: Worlds) -> None:
    """No further from one process than its own trainings are apart, twice over: also with torch's own norms, and with
    two threads, which add up in another order."""
    own = [worlds[1][f"segmented fast{how}"].losses for how in ("", " local", " threads")]
    reference, *others = own
    spread = max(largest_difference(left, right) for left in own for right in others)
    differences = {
        name: largest_difference(curve.losses, reference)
        for name, curve in worlds[2].items()
        if name.endswith(" segmented fast")
    }
    assert differences
    assert max(differences.values()) < max(EQUAL, 2 * spread), (differences, spread)


@pytest.mark.nightly
def test_local_norms_are_another_training(every: Worlds) -> None:
    """And the harness sees it."""
    local = every[2]["ddp segmented local"].losses
    assert largest_difference(local, every[1]["segmented"].losses) > 100 * EQUAL


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_scores_are_those_of_one_process_exactly(worlds: Worlds, ranks: int) -> None:
    """Of the same weights: accuracy and mean IoU to the last bit, on every rank; the loss but for its rounding."""
    loss, accuracy, mean_iou = worlds[1]["segmented"].scores[0]
    assert 0 < mean_iou < accuracy < 1
    for name in {"segmented", "ddp segmented", "zero-3 segmented"} & worlds[ranks].keys():
        for scores in worlds[ranks][name].scores:
            assert scores[1:] == [accuracy, mean_iou]
            assert scores[0] == pytest.approx(loss, rel=1e-6)


def test_training_goes_on_from_a_checkpoint_on_other_numbers_of_ranks(worlds: Worlds) -> None:
    """With the statistics that norms have followed: after four steps two thirds of them are still those from before."""
    resumed = {name: curve for ranks in worlds for name, curve in worlds[ranks].items() if " from " in name}
    assert len(resumed) >= 2
    uninterrupted = worlds[1]["segmented fine-tuned"].losses
    for name, curve in resumed.items():
        assert curve.first == jobs.SEGMENTED_BEFORE
        assert largest_difference(curve.losses, uninterrupted[RESUMED]) < EQUAL, name
        saved = worlds[2][f"{name.split()[2]} segmented fine-tuned"]
        for statistics in curve.statistics:
            assert statistics == pytest.approx(saved.statistics[0], rel=EQUAL, abs=EQUAL), name


def test_norms_and_the_count_of_pixels_are_sent_as_rows_of_their_own(worlds: Worlds) -> None:
    """UperNet on three maps has ten norms of 16 channels, and one of 8 in its auxiliary head: as arithmetic says."""
    counted = {name: curve.traffic[0] for name, curve in worlds[2].items() if curve.traffic}
    assert len(counted) >= 2
    for name, lines in counted.items():
        holds_norms_and_pixels(name, lines)


def holds_norms_and_pixels(name: str, lines: list[dict[str, Any]]) -> None:
    micro_steps = 2 if "accumulated" in name else 1
    calls, elements = 2 * 11, 10 * (33 + 32) + 17 + 16
    other = 2 if "zero-3" in name else 0  # two sums of its own, of one element each
    trial = trial_of({"engine": "ddp"} | jobs.SEGMENTED | {"grad_accum": micro_steps}, 2)
    messages = norm_messages(trial.model_copy(update={"model": SEGMENTER})) or ()
    assert sum(one.times(micro_steps) for one in messages) == micro_steps * calls
    assert sum(one.times(micro_steps) * one.tensor_bytes for one in messages) == micro_steps * elements * 8
    for line in lines:
        sent = [one for one in line["collectives"] if one["operation"] == "all_reduce"]
        doubles = [one["input_elements"] for one in sent if one["dtype"] == "float64"]
        assert (len(doubles), sum(doubles)) == (micro_steps * calls + other, micro_steps * elements + other)
        assert [one["input_elements"] for one in sent if one["dtype"] == "int64"] == [1]
        # Buffers are equal on all ranks already; a broadcast would hide who waits for whom.
        assert not [one for one in line["collectives"] if one["operation"] == "broadcast"]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_scenes_are_cut_and_scored_as_in_one_process(some: Worlds, ranks: int) -> None:
    """Pictures of unlike sizes from JPEG and PNG: whole or in windows, every rank counts what one process would."""
    reference = some[1]["none scenes"].losses
    for name in ("ddp scenes", "zero-3 scenes"):
        assert largest_difference(some[ranks][name].losses, reference) < EQUAL
        expected = some[1][name].scores[0]
        assert 0 < expected[2] < expected[1] < 1
        for scores in some[ranks][name].scores:
            assert scores[1:] == expected[1:]
            assert scores[0] == pytest.approx(expected[0], rel=1e-6)
    of_two = {"staged ddp scenes": "ddp scenes", "staged ddp shared-vit scenes": "none shared-vit scenes"}
    # They share every picture's tokens, whose windows they label together; a whole one one of them.
    of_two |= {f"ddp {model} scenes": f"none {model} scenes" for model in ("shared-vit", "shared-swin")}
    for name, alone in of_two.items() if ranks == 2 else ():
        whole, shared = some[1][alone], some[2][name]
        assert largest_difference(shared.losses, whole.losses) < EQUAL
        assert shared.scores == [pytest.approx(whole.scores[0], rel=1e-6)] * 2
    assert some[1]["ddp scenes"].scores == some[1]["none scenes"].scores
    assert some[1]["zero-3 scenes"].scores != some[1]["none scenes"].scores
