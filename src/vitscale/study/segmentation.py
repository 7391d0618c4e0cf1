"""What must hold of a trial that labels pixels, before anything of it starts."""

from __future__ import annotations

from collections.abc import Sequence

from vitscale.errors import RequestError, shown
from vitscale.sources import Summary
from vitscale.trial.hf_config import read_config
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.rank_batches import micro_batches
from vitscale.trial.trial import Trial, samples_used

_POOLING = ("upernet", "beit", "data2vec-vision")
"""Types of Hugging Face models with UperNet's pooling, by default to 1, 2, 3 and 6 pixels a side."""


def check(trial: Trial, summary: Summary) -> None:
    """Holds model, data and batch sizes of a trial against each other.

    Raises:
        RequestError: the model's labels are not the data's; it takes images of one size, and they are evaluated in
            their own; or a batch norm would be over a single image.
    """
    if trial.model.task != summary.task:
        raise RequestError(
            f"data.name = {shown(trial.data.name)} has labels for {summary.task}, and the model is for "
            f"{trial.model.task}",
            next_step=f"Set model.task = {shown(summary.task)}, or use other data",
        )
    own_sizes = summary.sizes_vary and trial.data.evaluation == "whole" and trial.window.evaluate
    if own_sizes and trial.model.name is not None and trial.model.depths is None:
        what = f"{trial.model.name} takes images of one size, and whole ones are evaluated in their own proportions"
        raise RequestError(what, next_step='Set data.evaluation = "sliding"')
    if trial.model.task == "segmentation" and _pools_to_one_pixel(trial.model):
        _check_batch_norm(trial, samples_used(summary.train_samples, trial.data.fraction))


def _pools_to_one_pixel(model: ModelSpec) -> bool:
    """Whether a norm has one value of each image; False too where that is not known."""
    config = read_config(model.hf) if model.hf is not None else None
    if config is None:
        return model.name is not None
    scales = config.get("pool_scales", (1,))
    return config.get("model_type") in _POOLING and isinstance(scales, (list, tuple)) and 1 in scales


def _check_batch_norm(trial: Trial, samples: int) -> None:
    train, sizes = trial.train, micro_batches(trial.train, trial.layout.data)
    local = train.batch_norm == "local"
    if fewest_normalised(sizes, train.grad_accum, samples, local=local, drop_last=train.drop_last) > 1:
        return
    if (min(sizes) if local else sum(sizes)) > 1:
        left = samples % trial.global_batch
        what, remedy = (
            f"the last step of an epoch, {left} images,",
            "Set train.drop_last = true, or another micro_batch",
        )
    else:
        what, remedy = f"train.micro_batch = {min(sizes)}", "Set train.micro_batch = 2 or more"
    whose = "a rank's own images" if local else "the images of all ranks"
    other = ', or train.batch_norm = "synchronised" on two ranks or more' if local else ""
    raise RequestError(
        f"on {trial.world.size} rank(s) {what} leaves a batch norm over {whose} only one of them, and UperNet "
        "pools each to a single pixel: one value has no variance",
        next_step=remedy + other,
    )


def fewest_normalised(sizes: Sequence[int], grad_accum: int, samples: int, *, local: bool, drop_last: bool) -> int:
    """The least number of images, above none, that one norm is over in any micro-step of an epoch.

    Args:
        sizes: images per micro-step of each rank.
        grad_accum: micro-steps of an optimizer step.
        samples: images of an epoch.
        local: whether a norm is over a rank's own images, and not over those of all ranks.
        drop_last: whether the short last step is left out.
    """
    global_batch = sum(sizes) * grad_accum
    left = samples % global_batch
    of_whole_steps = min(sizes) if local else sum(sizes)
    if not left or drop_last:
        return of_whole_steps
    # As `datasets.order` cuts the last step: slots shrink alike, and images fill them one after the other.
    entries = [-(-size * left // global_batch) for size in sizes]
    filled, rest = divmod(left, sum(entries))
    if not local:
        of_last = [sum(entries)] * (filled > 0) + [rest] * (rest > 0)
    else:
        of_last = entries if filled else []
        for entry in entries:
            of_last, rest = [*of_last, *([min(entry, rest)] if rest > 0 else [])], rest - entry
    whole = [of_whole_steps] if samples >= global_batch else []
    return min(whole + of_last)
