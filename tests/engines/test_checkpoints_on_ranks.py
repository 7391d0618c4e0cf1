"""Real ranks: what any engine saved goes on in any other, at any number of ranks, as if nothing had happened."""

from __future__ import annotations

import json

import pytest

from engines import jobs
from engines.conftest import Worlds
from engines.curves import largest_difference

pytestmark = [
    pytest.mark.long(3),
    pytest.mark.xdist_group("worlds of engines"),
    pytest.mark.ranks,
    pytest.mark.timeout(1500),
]

EQUAL = 1e-6
"""Of the loss; the largest seen is 1.1e-7."""
RESUMED = slice(jobs.SAVED_BEFORE, jobs.RESUMED_UNTIL)


@pytest.mark.parametrize("setting", ["adamw-clipped", "sgd-clipped"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_training_goes_on_as_without_an_interruption(worlds: Worlds, ranks: int, setting: str) -> None:
    """Checkpoints of two ranks, restored on as many, fewer and more, by the same engine and by others."""
    uninterrupted = worlds[1][setting].losses
    pairs = {"adamw-clipped": jobs.RESUMED_BY_DAY if worlds.by_day else jobs.RESUMED, "sgd-clipped": jobs.RESUMED_SGD}
    for saved, resumed in pairs[setting][ranks]:
        curve = worlds[ranks][f"{resumed} from {saved} {setting}"]
        assert curve.first == jobs.SAVED_BEFORE
        assert largest_difference(curve.losses, uninterrupted[RESUMED]) < EQUAL, (saved, resumed)


def test_without_the_optimizers_states_it_would_not(worlds: Worlds) -> None:
    forgetting = worlds[2]["ddp forgetting from ddp adamw-clipped"]
    assert forgetting.losses[0] == pytest.approx(worlds[1]["adamw-clipped"].losses[jobs.SAVED_BEFORE], rel=EQUAL)
    assert largest_difference(forgetting.losses, worlds[1]["adamw-clipped"].losses[RESUMED]) > 1000 * EQUAL


def test_lamb_goes_on_under_another_engine(worlds: Worlds) -> None:
    resumed = worlds[2]["zero-0 lamb from ddp lamb"]
    assert largest_difference(resumed.losses, worlds[1]["lamb"].losses[RESUMED]) < EQUAL


def test_bf16_weights_go_on_from_the_fp32_weights_that_are_updated(worlds: Worlds) -> None:
    """Rounded to bf16 and back they would have lost what several steps had changed."""
    two = worlds[2]
    same = two["zero-0 pure from zero-0 pure"]
    assert largest_difference(same.losses, two["zero-0 pure"].losses[RESUMED]) < EQUAL
    other_stage = two["zero-3 pure from zero-1 pure"]
    assert largest_difference(other_stage.losses, two["zero-1 pure"].losses[RESUMED]) < 5e-4


def test_saving_disturbs_nothing(worlds: Worlds) -> None:
    """The curve that left the checkpoint went on equal to the reference."""
    for engine in jobs.SAVED:
        curve = worlds[2][f"{engine} adamw-clipped"]
        assert largest_difference(curve.losses, worlds[1]["adamw-clipped"].losses) < EQUAL, engine


def test_the_folder_holds_what_the_documentation_says(worlds: Worlds) -> None:
    worlds[2]
    for name, states in (("zero-3 adamw-clipped", ["exp_avg", "exp_avg_sq"]), ("ddp sgd-clipped", ["momentum_buffer"])):
        folder = worlds.folder / "2" / name
        names = {f"{state}.safetensors" for state in states} | {"weights.safetensors", "checkpoint.json"}
        assert {path.name for path in folder.iterdir()} == names
        assert json.loads((folder / "checkpoint.json").read_text()) == {
            "format": 1,
            "step": 4,
            "optimizer": name.split()[1].split("-")[0],
            "optimizer_steps": 4 if "adamw" in name else 0,
            "states": states,
            "loss_scale": None,
        }
    assert not list((worlds.folder / "2").glob(".*.draft"))


@pytest.mark.parametrize("engine", jobs.MEASURED)
def test_a_measured_checkpoint_restores_every_bit_and_leaves_no_file(worlds: Worlds, engine: str) -> None:
    lines = worlds[2][f"{engine} adamw-accumulated"].checkpoints
    assert len(lines) == 2
    for line in lines:
        assert line["save_seconds"] > 0
        assert line["load_seconds"] > 0
    # 12 bytes for each parameter, and what names them.
    assert len({line["bytes"] for line in lines}) == 1
    reference = sum(path.stat().st_size for path in (worlds.folder / "2" / "ddp adamw-clipped").iterdir())
    assert lines[0]["bytes"] == pytest.approx(reference, abs=4)
    assert not (worlds.folder / "2" / "checkpoint").exists()
