"""Checks, before anything starts, of a model that several ranks share and of one that labels pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vitscale.engines import ENGINES, of_engine
from vitscale.errors import RequestError, shown
from vitscale.present.units import counted
from vitscale.trial.model_cost import most_stages, recorded_shapes, swin_shape
from vitscale.trial.model_counts import stages
from vitscale.trial.model_spec import ModelSpec, read_config
from vitscale.trial.parallel import Axis, ParallelSpec
from vitscale.trial.rank_batches import micro_batches
from vitscale.trial.trial import TrainSpec, Trial, samples_used

if TYPE_CHECKING:
    from vitscale.sources import Summary


def check_ranks(parallel: ParallelSpec, gpus: Sequence[int], engine: str) -> None:
    """Checks that the rank counts of a study are multiples of the ranks that share one model, and that its engine may
    have several.

    Raises:
        RequestError: a count is no multiple; it names multiples that are near. Or an engine that trains on one rank
            is split.
    """
    each = parallel.ranks_per_model
    if of_engine(engine).alone and each > 1:
        taking = max(ENGINES, key=lambda name: len({*parallel.split_axes} & {*ENGINES[name].splits}))
        split = parallel.model_dump(mode="json", exclude_defaults=True).items()
        quoted = {field: f'"{value}"' if isinstance(value, str) else f"{value}".lower() for field, value in split}
        fields = ", ".join(f'"parallel.{field}" = {value}' for field, value in quoted.items())
        raise RequestError(
            f"train.engine = {shown(engine)} trains on one rank and takes no split, and {parallel.in_words} ranks "
            "share one model",
            next_step="To sweep both, put 1 into scaling.gpus and the split into tables of [sweep], not [parallel]: "
            f'train = [{{ engine = "{engine}" }}, {{ engine = "{taking}", {fields} }}]. Or use that engine alone',
        )
    if wrong := [ranks for ranks in gpus if ranks % each]:
        ranks = wrong[0]
        near = sorted({max(each, ranks // each * each), -(-ranks // each) * each})
        raise RequestError(
            f"scaling.gpus holds {ranks}, and {parallel.in_words} ranks share one model",
            valid=[f"{each} and multiples of it, such as {' or '.join(map(str, near))}"],
            next_step="Change scaling.gpus, or split the model less",
        )


def check_split(
    parallel: ParallelSpec, train: TrainSpec, model: ModelSpec, divided: tuple[int, int] | None = None
) -> None:
    """Checks that the engine and the model's shape allow a split of the model.

    Args:
        parallel: the split at one point of a study.
        train: the training of one of its trials.
        model: the model, resolved.
        divided: where micro-batches follow from a global batch, that, and the most data-parallel ranks of its curve.

    Raises:
        RequestError: the engine or the model does not allow it; the error names what is possible.
    """
    if parallel.shard_norms and parallel.tensor == 1:
        what = "parallel.shard_norms has no meaning with parallel.tensor = 1: it is tensor ranks that share the norms"
        raise RequestError(what, next_step="Remove it, or set tensor = 2 or more")
    _check_schedule(parallel)
    if parallel.ranks_per_model == 1:
        return
    for axis in parallel.split_axes:
        _check_engine(parallel, axis, train)
    if train.micro_batches is not None:
        raise RequestError(
            f"train.rank_speeds gives ranks unequal shares, and {parallel.in_words} ranks share one model and its "
            "images",
            next_step="Remove rank_speeds, or the split",
        )
    _check_options(parallel, train)
    for refusal in of_engine(train.engine).split_refusals(parallel, model):
        raise RequestError(refusal.what, valid=refusal.valid, next_step=refusal.next_step)
    _check_shape(parallel, model)
    if parallel.pipeline > 1:
        _check_stages(parallel, train, model, divided)


def _check_schedule(parallel: ParallelSpec) -> None:
    """Refuses settings of a schedule that have no meaning without the field that they belong to."""
    default = ParallelSpec()
    if parallel.pipeline == 1 and parallel.schedule != default.schedule:
        what = f"parallel.schedule = {shown(parallel.schedule)} has no meaning with parallel.pipeline = 1"
        raise RequestError(f"{what}: it is of stages", next_step="Remove it, or set pipeline = 2 or more")
    if parallel.schedule != "interleaved" and parallel.stages_per_rank != default.stages_per_rank:
        what = f"parallel.stages_per_rank has no meaning with parallel.schedule = {shown(parallel.schedule)}"
        raise RequestError(what, next_step="Remove it, or set schedule = 'interleaved'")
    if parallel.schedule == "interleaved" and parallel.stages_per_rank == 1:
        what = "parallel.schedule = 'interleaved' takes several stages by turns, and parallel.stages_per_rank is 1"
        raise RequestError(what, valid=["stages_per_rank of 2 or more"], next_step="Or set schedule = '1f1b'")


def _check_stages(parallel: ParallelSpec, train: TrainSpec, model: ModelSpec, divided: tuple[int, int] | None) -> None:
    """Checks that each stage has blocks, and that there are as many micro-batches as the schedule needs."""
    if parallel.shard_norms:
        what = "parallel.shard_norms does not go with parallel.pipeline: stages hand on whole tokens"
        raise RequestError(what, next_step="Remove shard_norms, or set pipeline = 1")
    most, stages, ranks, count = most_stages(model), parallel.stages, parallel.pipeline, train.grad_accum
    each = stages // ranks
    if most < stages and model.factory is None:  # for a factory's model only its ranks can tell
        heads = " and heads that may be a stage" * (model.task == "segmentation")
        raise RequestError(
            f"{parallel.in_words}{f' with {each} stages each' if each > 1 else ''} is {stages} stages, and "
            f"{model.name} has {model.blocks} blocks{heads}",
            valid=[f"pipeline of 1 to {most // each}"] if most >= 2 * each else [],
            next_step="Set a smaller pipeline, or a model with more blocks (model.layers, of Swin model.depths)",
        )
    rounds = max(1, count // ranks)
    what = f"train.grad_accum = {count} micro-batches"
    what += f" (what a global batch of {divided[0]} leaves)" if divided else ""
    if parallel.schedule == "1f1b" and count < ranks:
        raise RequestError(
            f"{what} are too few for parallel.schedule = '1f1b' on {ranks} stages, which take one by one",
            valid=[_dividing(divided, ranks) if divided else f"grad_accum of {ranks} or more"],
            next_step=f"Set it{'' if divided else ', and micro_batch smaller by as much'}; or schedule = 'gpipe', "
            "which takes any number",
        )
    if parallel.schedule == "interleaved" and count % rounds:
        near = sorted({count // ranks * ranks, -(-count // ranks) * ranks})
        raise RequestError(
            f"{what} do not divide into {rounds} equal rounds, as parallel.schedule = 'interleaved' takes them on "
            f"{ranks} ranks",
            valid=[
                _dividing(divided, ranks, train.micro_batch)
                if divided
                else f"multiples of {ranks}, such as {' or '.join(map(str, near))}"
            ],
            next_step=f"{'Set it' if divided else 'Change grad_accum'}, or set schedule = '1f1b'",
        )


def _dividing(divided: tuple[int, int], ranks: int, most: int | None = None) -> str:
    """What to set so that a global batch leaves micro-batches for all `ranks` of a pipeline on the whole curve.

    With `most` images to a micro-batch they are a multiple of `ranks`. The global batch changes only if it must.
    """
    images, models = divided
    share = images // models
    if share < ranks or (most and share % ranks):
        images = -(-images // (ranks * models)) * ranks * models
    size = images // models // ranks
    if most:
        size = next(smaller for smaller in range(min(most, size), 0, -1) if size % smaller == 0)
    return f"train.micro_batch {'=' if most else 'of at most'} {size} with train.global_batch = {images}"


def _check_engine(parallel: ParallelSpec, axis: Axis, train: TrainSpec) -> None:
    if axis in of_engine(train.engine).splits:
        return
    taking = [
        f"train.engine = {shown(name)}"
        for name, facts in ENGINES.items()
        if axis in facts.splits and not facts.unavailable(train.device)
    ]
    asked = f"parallel.{axis} = {getattr(parallel, axis)}"
    what = f"{asked} is not taken by train.engine = {shown(train.engine)}"
    raise RequestError(what, valid=taking, next_step=f"Use one of these, or set {axis} = 1")


def _check_options(parallel: ParallelSpec, train: TrainSpec) -> None:
    """Refuses options that have not been shown to train the same with a model that ranks share."""
    wrong = None
    if train.precision == "fp16":
        wrong = ("train.precision = 'fp16'", "its loss scale is kept by each rank for itself", "precision = 'bf16'")
    elif train.compile:
        wrong = ("train.compile = true", "blocks are compiled only where no exchange lies in them", "compile = false")
    elif train.optimizer == "lamb" and parallel.tensor > 1:
        wrong = ("train.optimizer = 'lamb'", "it divides by norms of whole tensors", "optimizer = 'adamw' or 'sgd'")
    elif train.optimizer == "lamb" and parallel.pipeline > 1:
        wrong = ("train.optimizer = 'lamb'", "it has not been tried together", "optimizer = 'adamw' or 'sgd'")
    elif train.static_graph and parallel.pipeline > 1:
        wrong = ("train.static_graph = true", "a stage's graph is another in each micro-batch", "static_graph = false")
    elif train.offload != "none":
        wrong = (f"train.offload = {shown(train.offload)}", "it has not been tried together", "offload = 'none'")
    if wrong is not None:
        what, why, instead = wrong
        raise RequestError(
            f"{what} does not go with {parallel.in_words}: {why}", next_step=f"Set {instead}, or do not split"
        )


def _check_shape(parallel: ParallelSpec, model: ModelSpec) -> None:
    if model.factory is not None and model.task == "classification":
        if parallel.sequence > 1 and parallel.pipeline > 1:
            what = f"{parallel.in_words} do not go together for model.factory = {shown(model.factory)}"
            raise RequestError(f"{what}: what stages of a part of the tokens hand on is not known", next_step="Set one")
        return  # only its ranks can tell what it offers, and for how many ranks
    segments = model.task == "segmentation"
    if model.name is None or model.heads is None:
        named = [(key, value) for key in ("name", "hf", "factory") if (value := getattr(model, key)) is not None]
        what = f"model.{named[0][0]} = {shown(named[0][1])}" if named else "a model of train.script's own"
        vits, swins = "vit-ti16, vit-s16, vit-b16 and their like, of any shape", "swinv2-t and its like"
        raise RequestError(
            f"{what}{' with model.task = ' * segments}{shown('segmentation') * segments} cannot be split: "
            f"{parallel.in_words} is known to train the same for vitscale's own models",
            valid=[vits, swins, *(() if segments else ("a factory that says how it is split",))],
            next_step="Use one of these, or leave [parallel] out",
        )
    swin = swin_shape(model)
    if swin is not None and parallel.shard_norms:
        raise RequestError(
            f"{parallel.in_words} with shard_norms cannot be trained of {model.name}: windows join tokens of several "
            "ranks",
            valid=["shard_norms = false; parallel.sequence shares tokens, of norms too"],
            next_step="Use that, or a vision transformer",
        )
    if swin is not None and segments and parallel.sequence > 1 and parallel.pipeline > 1:
        what = f"{parallel.in_words} do not go together for {model.name} with model.task = 'segmentation'"
        raise RequestError(
            f"{what}: maps of all stages would be exchanged before its heads", next_step="Set one of them to 1"
        )
    ranks = parallel.tensor * parallel.sequence
    if model.heads % ranks:
        splits = ", ".join(str(n) for n in range(1, model.heads + 1) if model.heads % n == 0)
        of_stage = " of its first stage" * (model.depths is not None)
        raise RequestError(
            f"{parallel.in_words} ranks share {model.name}'s {model.heads} heads{of_stage}, which they do not divide",
            valid=[f"tensor x sequence of {splits}"],
            next_step="Or take a model with other heads (model.heads)",
        )
    if model.mlp_size is not None and model.mlp_size % parallel.tensor:
        what = f"parallel.tensor = {parallel.tensor} does not divide model.mlp_size = {model.mlp_size}"
        raise RequestError(what, next_step="Set another mlp_size, or tensor to a divisor of it")
    if swin is not None:
        parts, of_them = stages(swin)[-1].side, f"rows of tokens in {model.name}'s last stage"
    else:
        parts, of_them = (model.image_size // (model.patch_size or 1)) ** 2 + 1, "tokens"
    ranks = parallel.sequence * (parallel.tensor if parallel.shard_norms else 1)
    if parts < ranks:
        raise RequestError(
            f"images of {model.image_size} pixels are {parts} {of_them}, too few to share by {parallel.in_words}",
            valid=[f"up to {counted(parts, 'rank')} for each image"],
            next_step="Use a larger model.image_size, or split the tokens less",
        )


def check_blocks(trial: Trial) -> None:
    """Refuses options that work block by block for a model that is known to have no repeated blocks.

    Raises:
        RequestError: the model has no two blocks of one kind, which otherwise only its ranks would notice.
    """
    shapes = recorded_shapes(trial.model)
    if shapes is None or any(block.wrapped for block in shapes.blocks):
        return
    named = shown(trial.model.name or trial.model.hf)
    for option in ("activation_checkpointing", "compile"):
        if getattr(trial.train, option):
            raise RequestError(
                f"train.{option} works block by block, and {named} has one block here",
                next_step="Set more blocks (model.layers, of Swin model.depths), or leave it out",
            )


_POOLING = ("upernet", "beit", "data2vec-vision", "mobilevit", "mobilevitv2", "mobilenet_v2")
"""Types of Hugging Face models whose decoders pool to 1 pixel a side: UperNet's pyramid unless told, and DeepLab's."""


def check_labels(trial: Trial, summary: Summary) -> None:
    """Checks that model, data and batch sizes of a trial go together.

    Raises:
        RequestError: the model's labels are not the data's; the model takes images of one size, and they are evaluated
            in their own; or a batch norm would be over a single image.
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
    """Whether one of the model's norms gets a single value from each image; False too where that is not known."""
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
    several = 2 * trial.parallel.ranks_per_model
    other = f', or train.batch_norm = "synchronised" on {several} ranks or more' if local else ""
    raise RequestError(
        f"on {counted(trial.world.size, 'rank')} {what} leaves a batch norm over {whose} only one of them, and the "
        "decoder pools each to a single pixel: one value has no variance",
        next_step=remedy + other,
    )


def fewest_normalised(sizes: Sequence[int], grad_accum: int, samples: int, *, local: bool, drop_last: bool) -> int:
    """The smallest number of images, above 0, that one norm is taken over in any micro-step of an epoch.

    Args:
        sizes: images per micro-step of each rank.
        grad_accum: micro-steps of an optimizer step.
        samples: images of an epoch.
        local: whether a norm is taken over a rank's own images, and not over those of all ranks.
        drop_last: whether the short last step is left out.
    """
    global_batch = sum(sizes) * grad_accum
    left = samples % global_batch
    of_whole_steps = min(sizes) if local else sum(sizes)
    if not left or drop_last:
        return of_whole_steps
    # `datasets.batches` cuts the last step like this: slots shrink alike, and images fill them one after the other.
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
