"""Loss curves of many engines, trained on real ranks: what is to be trained, and what came of it."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from forks import Cold, Starts
from vitscale.trial.model_spec import ModelSpec, resolve

MODEL = resolve(
    ModelSpec(name="vit-ti16", image_size=16, patch_size=8, layers=2, hidden_size=32, heads=2, mlp_size=64), 10
)
MANY_HEADS = resolve(
    ModelSpec(name="vit-ti16", image_size=24, patch_size=8, layers=2, hidden_size=48, heads=12, mlp_size=96), 10
)
"""Heads for 1, 2, 3 and 4 ranks and pairs of them, and 10 tokens, which 3 and 4 do not divide."""
SWIN = resolve(
    ModelSpec(name="swinv2-t", image_size=16, patch_size=2, hidden_size=32, heads=4, depths=(2, 1), window_size=4), 10
)
"""Heads for 1, 2 and 4 ranks in its first stage; the second block's windows are shifted."""
SHAPES = {
    "swinv2:tiny": SWIN,
    "swinv2-4:tiny": SWIN.model_copy(update={"depths": (2, 2)}),
    "swinv2-odd:tiny": SWIN.model_copy(update={"depths": (2, 2), "image_size": 20}),
    "vit-24:tiny": MANY_HEADS.model_copy(update={"heads": 24}),
}
"""By the names of jobs. Two have blocks for 4 stages; of the third neither windows nor ranks divide the 10 and 5 rows
of tokens; the last has heads for pairs of 2 and 4 ranks."""
SEGMENTER = resolve(
    ModelSpec(
        task="segmentation", name="swinv2-t", image_size=32, patch_size=2, hidden_size=8, heads=1, depths=(1, 1, 1),
        window_size=4, decoder_size=16,
    ),
    5,
)  # fmt: skip
PYRAMID = resolve(
    ModelSpec(
        task="segmentation", name="vit-ti16", image_size=32, patch_size=8, layers=1, hidden_size=16, heads=2,
        decoder_size=16,
    ),
    5,
)  # fmt: skip
SEGMENTERS = {
    "swin": SEGMENTER,
    "vit": PYRAMID,
    "shared-swin": SEGMENTER.model_copy(update={"hidden_size": 32, "heads": 4, "patch_size": 4, "decoder_size": 8}),
    "shared-vit": PYRAMID.model_copy(
        update={"hidden_size": 48, "heads": 12, "layers": 2, "mlp_size": 96, "decoder_size": 8}
    ),
}
"""By the names of jobs. Those that ranks share have heads for 1 to 4 of them and 17 tokens, and more weights in their
blocks than in their heads, so that FSDP2 wraps the former."""
SEGMENTED_STEPS = 8
SEGMENTED_BATCH = 12
SEGMENTED_SAMPLES = 2 * SEGMENTED_BATCH + 4
"""Every third step has 4 images: on three ranks two and two, and the third takes padding alone."""
GLOBAL_BATCH = 36
"""Divides over 1, 2 and 3 ranks, each with 1 and 3 micro-steps, and into 4 micro-batches."""
SAMPLES = 2 * GLOBAL_BATCH + 7
"""Every third step has 7 images: padding, and slots that hold nothing else."""
STEPS = 5
"""An epoch, and two steps of the next."""
_SCRIPT = Path(__file__).with_name("curve_ranks.py")


class Job(TypedDict):
    """One training on all ranks."""

    name: str
    train: dict[str, Any]
    """Fields of its TrainSpec; the micro-batch follows from the ranks and `grad_accum`."""
    steps: int
    parallel: NotRequired[dict[str, Any]]
    """Fields of its ParallelSpec."""
    many_heads: NotRequired[bool]
    """Trains `MANY_HEADS`."""
    layers: NotRequired[int]
    """Of that, for stages."""
    factory: NotRequired[str]
    """Trains what a factory of examples/own_models makes, or one of `SHAPES`."""
    evaluate: NotRequired[bool]
    """Measures held-out loss and accuracy at the end."""
    gradients: NotRequired[bool]
    """Writes the whole gradient of the last step to NAME.safetensors."""
    segments: NotRequired[str]
    """Labels pixels instead of images, by one of `SEGMENTERS`."""
    grown: NotRequired[float]
    """Multiplies the weights of layers and convolutions that it begins with (not those of Swin's position biases)."""
    threads: NotRequired[int]
    """Of each rank; 1 by default."""
    scenes: NotRequired[str]
    """Of files in ADE20K's layout: that folder."""
    evaluation: NotRequired[str]
    """Of these: "whole" or "sliding"."""
    save_before: NotRequired[int]
    """Saves a checkpoint, named as the job, before this step."""
    load: NotRequired[str]
    """Begins with this checkpoint."""
    forget: NotRequired[bool]
    """Drops the optimizer's states that it has loaded."""
    wrong: NotRequired[str]
    """Broken on purpose: see `curve_ranks.make_wrong`."""
    rehearse: NotRequired[bool]
    """Takes a micro-batch of the last step's size through the engine before the first step, as compiled runs do."""
    traffic: NotRequired[bool]
    """Counts what two steps more send."""
    measure: NotRequired[bool]
    """At the end measures a checkpoint as a run does."""


@dataclass(frozen=True)
class Curve:
    """What one job left, over all ranks."""

    first: int
    """The first step."""
    losses: list[float]
    """Means over the step's real images."""
    ids: list[list[int]]
    """The images of each step, sorted."""
    gradient_dtype: str | None
    checkpoints: list[dict[str, float]]
    """Of each rank, where measured."""
    scores: list[list[float]]
    """Of each rank, of segmentation: held-out loss, pixel accuracy and mean IoU before the first step. Where asked for,
    of classification: held-out loss and accuracy after the last."""
    statistics: list[list[float]]
    """Of each rank, of segmentation: mean and variance that each norm has followed, summed over its channels."""
    traffic: list[list[dict[str, Any]]]
    """Of each rank, where counted: the lines of its steps."""

    def __post_init__(self) -> None:
        assert len(self.losses) == len(self.ids) > 0


def train(
    jobs: list[Job],
    ranks: int,
    folder: Path,
    starts: Starts | None = None,
    timeout: float = 500.0,
    script: Path = _SCRIPT,
) -> dict[str, Curve]:
    """Runs all jobs on one set of ranks, in order; fails with the traceback where any of them failed.

    `starts` starts the ranks; without it each is started anew. Without an engine (`none`) there are no ranks to share
    the images: only for `ranks` = 1. `script`: what a rank runs.
    """
    folder.mkdir()
    (folder / "jobs.json").write_text(json.dumps(jobs))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    own = starts or Cold()
    try:
        forks = [
            own.start(
                script,
                folder,
                log=folder / f"log-{rank}.txt",
                environment={
                    "RANK": rank,
                    "LOCAL_RANK": rank,
                    "WORLD_SIZE": ranks,
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "OMP_NUM_THREADS": 1,
                },
            )
            for rank in range(ranks)
        ]
        codes = [fork.wait(timeout) for fork in forks]
    finally:
        if starts is None:
            own.close()
    logs = [(folder / f"log-{rank}.txt").read_text()[-3000:] for rank in range(ranks)]
    assert codes == [0] * ranks, "\n".join(logs)
    return curves_in(folder, ranks)


def curves_in(folder: Path, ranks: int) -> dict[str, Curve]:
    """What was trained there, by the job's name; empty where that came to no end."""
    paths = [folder / f"rank-{rank}.json" for rank in range(ranks)]
    if not all(path.exists() for path in paths):
        return {}
    of_ranks = [json.loads(path.read_text()) for path in paths]
    return {name: _joined([of_rank[name] for of_rank in of_ranks]) for name in of_ranks[0]}


def _joined(parts: list[dict[str, Any]]) -> Curve:
    return Curve(
        first=parts[0]["first"],
        losses=[sum(losses) / len(losses) for losses in zip(*(part["losses"] for part in parts), strict=True)],
        ids=[sorted(chain.from_iterable(step)) for step in zip(*(part["ids"] for part in parts), strict=True)],
        gradient_dtype=parts[0]["gradient_dtype"],
        checkpoints=[part["checkpoint"] for part in parts if "checkpoint" in part],
        scores=[part["scores"] for part in parts if "scores" in part],
        statistics=[part["statistics"] for part in parts if "statistics" in part],
        traffic=[part["traffic"] for part in parts if "traffic" in part],
    )


def largest_difference(curve: list[float], reference: list[float]) -> float:
    """The largest difference of a step's loss, as a share of the reference's, which may go on for longer."""
    return max(abs(loss - known) / abs(known) for loss, known in zip(curve, reference[: len(curve)], strict=True))
