"""Checks, before anything starts, of a model that several ranks share, of replicas, and of a model that labels pixels.

Each raises `RequestError` with what is wrong, the valid values and the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from vitscale.engines import ENGINES, of_engine, wrapper_facts
from vitscale.engines.checks import engine_in_words
from vitscale.errors import RequestError, shown
from vitscale.present.units import counted
from vitscale.trial.model_cost import most_stages, recorded_shapes, swin_shape
from vitscale.trial.model_counts import stages
from vitscale.trial.model_spec import ModelSpec, read_config
from vitscale.trial.parallel import ParallelAxis, ParallelSpec
from vitscale.trial.rank_batches import largest_divisor, micro_batches
from vitscale.trial.trial import TrainSpec, Trial, samples_used

if TYPE_CHECKING:
    from vitscale.sources import Summary


def check_ranks(parallel: ParallelSpec, gpus: Sequence[int], engine: str) -> None:
    """Check that each rank count makes a whole number of models and of equal replicas.

    Args:
        parallel: the split of the model at one point of a study.
        gpus: the rank counts of its curve.
        engine: name of its engine.

    Raises:
        RequestError: a count is no multiple of the ranks that share one model, or of the replicas; the error names
            values close to it. Or the model is split or replicated under an engine that trains on one rank.
    """
    ranks_per_model = parallel.ranks_per_model
    if of_engine(engine).alone and parallel.least_ranks > 1:
        raise _split_of_one_rank(parallel, engine)
    for ranks in gpus:
        if ranks % parallel.replicate:
            raise _uneven_replicas(parallel.replicate, ranks)
        if parallel.replicate == ranks > 1 and of_engine(engine).replicas_must_shard:
            raise RequestError(
                f"parallel.replicate = {parallel.replicate} on {ranks} ranks leaves replicas of one rank, which "
                f"train.engine = {shown(engine)} does not take",
                next_step="Set fewer replicas; or train with DDP, which does the same",
            )
        if ranks % ranks_per_model:
            nearest = _nearest_multiples(ranks, ranks_per_model)
            raise RequestError(
                f"scaling.gpus holds {ranks}, and {parallel.in_words} ranks share one model",
                valid=[f"{ranks_per_model} and multiples of it, such as {nearest}"],
                next_step="Change scaling.gpus, or split the model less",
            )


def _uneven_replicas(replicas: int, ranks: int) -> RequestError:
    """Return the error for replicas that do not divide a rank count."""
    fewer = max(count for count in range(1, min(replicas, ranks) + 1) if ranks % count == 0)
    more = min((count for count in range(replicas, ranks + 1) if ranks % count == 0), default=fewer)
    valid = " or ".join(str(count) for count in sorted({fewer, more}))
    return RequestError(
        f"parallel.replicate = {replicas} does not divide scaling.gpus = {ranks}: replicas have equally many ranks",
        valid=[f"replicate = {valid}"],
        next_step=f"Set it, or gpus to {_nearest_multiples(ranks, replicas)}",
    )


def _nearest_multiples(number: int, factor: int, *, least: int = 1) -> str:
    """Return the multiples of `factor` just below and above a number, in words: "4 or 8" for 6 and a factor of 4.

    The one below is at least `least` times the factor.
    """
    below = max(least, number // factor) * factor
    above = -(-number // factor) * factor  # rounded up
    return " or ".join(str(multiple) for multiple in sorted({below, above}))


def _split_of_one_rank(parallel: ParallelSpec, engine: str) -> RequestError:
    """Return the error for a split under an engine that trains on one rank.

    It says how to sweep this engine without the split beside another engine with it.
    """

    def count_of_accepted_axes(name: str) -> int:
        takes_replicas = parallel.replicate > 1 and ENGINES[name].replicates
        return len({*parallel.split_axes} & {*ENGINES[name].splits}) + takes_replicas

    splitting_engine = max(ENGINES, key=count_of_accepted_axes)
    assignments = []
    for field, value in parallel.model_dump(mode="json", exclude_defaults=True).items():
        toml_value = f'"{value}"' if isinstance(value, str) else str(value).lower()
        assignments.append(f'"parallel.{field}" = {toml_value}')
    split_table = f'{{ engine = "{splitting_engine}", {", ".join(assignments)} }}'
    obstacle = f"takes no split, and {parallel.in_words} ranks share one model"
    if parallel.ranks_per_model == 1:
        obstacle = f"has no replicas, and parallel.replicate = {parallel.replicate}"
    return RequestError(
        f"train.engine = {shown(engine)} trains on one rank and {obstacle}",
        next_step="To sweep both, put 1 into scaling.gpus and the split into tables of [sweep], not [parallel]: "
        f'train = [{{ engine = "{engine}" }}, {split_table}]. Or use that engine alone',
    )


class DividedBatch(NamedTuple):
    """A global batch that is the same on a whole curve (strong-global), so that micro-batches follow from it."""

    global_batch: int
    """Images."""
    most_data_ranks: int
    """Most data-parallel ranks of the curve."""


def check_split(
    parallel: ParallelSpec, train: TrainSpec, model: ModelSpec, divided: DividedBatch | None = None
) -> None:
    """Check that the engine and the model's shape allow a split of the model.

    Args:
        parallel: the split at one point of a study.
        train: the training of one of its trials.
        model: the model, resolved.
        divided: the global batch where micro-batches follow from it; None where the study sets them.

    Raises:
        RequestError: the engine or the model does not allow it; the error names what is possible.
    """
    if parallel.shard_norms and parallel.tensor == 1:
        what = "parallel.shard_norms has no meaning with parallel.tensor = 1: it is tensor ranks that share the norms"
        raise RequestError(what, next_step="Remove it, or set tensor = 2 or more")
    _check_schedule(parallel)
    _check_replicas(parallel, train)
    if parallel.ranks_per_model == 1:
        return
    for axis in parallel.split_axes:
        _check_engine_splits(parallel, axis, train)
    if train.micro_batches is not None:
        raise RequestError(
            f"train.rank_speeds gives ranks unequal shares, and {parallel.in_words} ranks share one model and its "
            "images",
            next_step="Remove rank_speeds, or the split",
        )
    _check_train_options(parallel, train)
    for refusal in of_engine(train.engine).split_refusals(parallel, model):
        raise RequestError(refusal.what, valid=refusal.valid, next_step=refusal.next_step)
    _check_shape(parallel, model)
    if parallel.pipeline > 1:
        _check_stages(parallel, train, model, divided)


def _check_replicas(parallel: ParallelSpec, train: TrainSpec) -> None:
    """Refuse replicas under an engine that does not shard within them, and beside a split of the model."""
    if parallel.replicate == 1:
        return
    if not wrapper_facts(train).replicates:
        replicating = [
            name for name, facts in ENGINES.items() if facts.replicates and not facts.unavailable(train.device)
        ]
        raise RequestError(
            f"parallel.replicate = {parallel.replicate} is not taken by {engine_in_words(train)}",
            valid=[f"train.engine = {shown(name)}" for name in replicating],
            next_step="Use one of these, or set replicate = 1",
        )
    if parallel.ranks_per_model > 1:
        raise RequestError(
            f"parallel.replicate = {parallel.replicate} does not go with {parallel.in_words}: it has not been tried "
            "together",
            next_step="Set replicate = 1, or do not split",
        )


def _check_schedule(parallel: ParallelSpec) -> None:
    """Refuse a schedule without a pipeline, and a number of stages per rank that does not fit the schedule."""
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


def _check_stages(parallel: ParallelSpec, train: TrainSpec, model: ModelSpec, divided: DividedBatch | None) -> None:
    """Check the stages of a pipeline: each needs a block of the model, and the schedule enough micro-batches.

    Args:
        parallel: the split, with a pipeline of several ranks.
        train: the training of one trial.
        model: the model, resolved.
        divided: the global batch where micro-batches follow from it; None where the study sets them.
    """
    if parallel.shard_norms:
        what = "parallel.shard_norms does not go with parallel.pipeline: stages hand on whole tokens"
        raise RequestError(what, next_step="Remove shard_norms, or set pipeline = 1")
    _check_stage_count(parallel, model)
    if parallel.schedule == "1f1b":
        _check_1f1b(parallel.pipeline, train, divided)
    if parallel.schedule == "interleaved":
        _check_interleaved(parallel.pipeline, train, divided)


def _check_stage_count(parallel: ParallelSpec, model: ModelSpec) -> None:
    """Refuse more stages than the model has blocks.

    A factory's model is not checked: only its ranks know how many blocks it has.
    """
    most = most_stages(model)
    if model.factory is not None or parallel.stages <= most:
        return
    stages_per_rank = parallel.stages // parallel.pipeline
    split = parallel.in_words
    if stages_per_rank > 1:
        split += f" with {stages_per_rank} stages each"
    blocks = f"{model.blocks} blocks"
    if model.task == "segmentation":
        blocks += " and heads that may be a stage"
    most_ranks = most // stages_per_rank
    raise RequestError(
        f"{split} is {parallel.stages} stages, and {model.name} has {blocks}",
        valid=[f"pipeline of 1 to {most_ranks}"] if most_ranks >= 2 else [],
        next_step="Set a smaller pipeline, or a model with more blocks (model.layers, of Swin model.depths)",
    )


def _check_1f1b(ranks: int, train: TrainSpec, divided: DividedBatch | None) -> None:
    """Refuse a 1f1b pipeline of `ranks` ranks that gets fewer micro-batches in a step than it has ranks.

    1f1b first fills the pipeline with a micro-batch for each rank; only then do forward and backward take turns.
    """
    if train.grad_accum >= ranks:
        return
    what = f"{_micro_batch_count(train, divided)} are too few for parallel.schedule = '1f1b' on {ranks} stages"
    if divided is None:
        valid = f"grad_accum of {ranks} or more"
        remedy = "Set it, and micro_batch smaller by as much"
    else:
        valid = _sizes_for_pipeline(divided, ranks)
        remedy = "Set it"
    raise RequestError(
        f"{what}, which take one by one",
        valid=[valid],
        next_step=f"{remedy}; or schedule = 'gpipe', which takes any number",
    )


def _check_interleaved(ranks: int, train: TrainSpec, divided: DividedBatch | None) -> None:
    """Refuse an interleaved pipeline of `ranks` ranks whose micro-batches do not divide into equal rounds.

    A rank takes as many micro-batches through one of its stages as the pipeline has ranks, then as many through the
    next stage: that is a round. torch counts the rounds rounded down, and wants them equal. Example: 8 micro-batches on
    4 ranks are 2 rounds; 9 would be 2 rounds too, and are refused.
    """
    rounds = max(1, train.grad_accum // ranks)
    if train.grad_accum % rounds == 0:
        return
    what = f"{_micro_batch_count(train, divided)} do not divide into {rounds} equal rounds"
    if divided is None:
        valid = f"multiples of {ranks}, such as {_nearest_multiples(train.grad_accum, ranks, least=0)}"
        remedy = "Change grad_accum"
    else:
        valid = _sizes_for_pipeline(divided, ranks, largest_micro_batch=train.micro_batch)
        remedy = "Set it"
    raise RequestError(
        f"{what}, as parallel.schedule = 'interleaved' takes them on {ranks} ranks",
        valid=[valid],
        next_step=f"{remedy}, or set schedule = '1f1b'",
    )


def _micro_batch_count(train: TrainSpec, divided: DividedBatch | None) -> str:
    """Return "train.grad_accum = 3 micro-batches"; where a global batch leaves so many, add that."""
    count = f"train.grad_accum = {train.grad_accum} micro-batches"
    if divided is None:
        return count
    return f"{count} (what a global batch of {divided.global_batch} leaves)"


def _sizes_for_pipeline(divided: DividedBatch, ranks: int, largest_micro_batch: int | None = None) -> str:
    """Return the batch sizes with which each pipeline of a curve gets enough micro-batches, in words.

    Example: "train.micro_batch = 4 with train.global_batch = 64". The global batch is raised only where its share is
    too small or, under "interleaved", does not divide.

    Args:
        divided: the global batch.
        ranks: ranks of a pipeline, which needs at least as many micro-batches.
        largest_micro_batch: images of the largest micro-batch that the study allows, under "interleaved", where the
            number of micro-batches is to be a multiple of `ranks`; None under "1f1b".
    """
    global_batch = divided.global_batch
    models = divided.most_data_ranks
    images_per_model = global_batch // models
    is_multiple_needed = largest_micro_batch is not None
    is_share_unfit = images_per_model < ranks or (is_multiple_needed and images_per_model % ranks != 0)
    if is_share_unfit:
        smallest_fit = ranks * models
        global_batch = -(-global_batch // smallest_fit) * smallest_fit  # rounded up to a multiple
    most_images = global_batch // models // ranks
    if largest_micro_batch is None:
        return f"train.micro_batch of at most {most_images} with train.global_batch = {global_batch}"
    micro_batch = largest_divisor(most_images, at_most=largest_micro_batch)
    return f"train.micro_batch = {micro_batch} with train.global_batch = {global_batch}"


def _check_engine_splits(parallel: ParallelSpec, axis: ParallelAxis, train: TrainSpec) -> None:
    """Refuse a split along an axis that the engine does not take; the error names engines that take it here."""
    if axis in of_engine(train.engine).splits:
        return
    splitting_engines = []
    for name, facts in ENGINES.items():
        if axis in facts.splits and not facts.unavailable(train.device):
            splitting_engines.append(f"train.engine = {shown(name)}")
    split = f"parallel.{axis} = {getattr(parallel, axis)}"
    what = f"{split} is not taken by train.engine = {shown(train.engine)}"
    raise RequestError(what, valid=splitting_engines, next_step=f"Use one of these, or set {axis} = 1")


def _check_train_options(parallel: ParallelSpec, train: TrainSpec) -> None:
    """Refuse options of training that have not been shown to train the same where ranks share a model."""
    option = _unfit_option(parallel, train)
    if option is not None:
        raise RequestError(
            f"{option.setting} does not go with {parallel.in_words}: {option.reason}",
            next_step=f"Set {option.remedy}, or do not split",
        )


class _UnfitOption(NamedTuple):
    """An option of training that does not go with a split of the model."""

    setting: str
    reason: str
    remedy: str
    """What to set instead."""


def _unfit_option(parallel: ParallelSpec, train: TrainSpec) -> _UnfitOption | None:
    """Return the first option of training that does not go with a split; None where all do."""
    untried = "it has not been tried together"
    if train.precision == "fp16":
        reason = "its loss scale is kept by each rank for itself"
        return _UnfitOption("train.precision = 'fp16'", reason, remedy="precision = 'bf16'")
    if train.compile:
        reason = "blocks are compiled only where no exchange lies in them"
        return _UnfitOption("train.compile = true", reason, remedy="compile = false")
    if train.optimizer == "lamb" and (parallel.tensor > 1 or parallel.pipeline > 1):
        reason = "it divides by norms of whole tensors" if parallel.tensor > 1 else untried
        return _UnfitOption("train.optimizer = 'lamb'", reason, remedy="optimizer = 'adamw' or 'sgd'")
    if train.static_graph and parallel.pipeline > 1:
        reason = "a stage's graph is another in each micro-batch"
        return _UnfitOption("train.static_graph = true", reason, remedy="static_graph = false")
    if train.offload != "none":
        return _UnfitOption(f"train.offload = {shown(train.offload)}", untried, remedy="offload = 'none'")
    return None


def _check_shape(parallel: ParallelSpec, model: ModelSpec) -> None:
    """Check that the ranks of a split can share the model's heads, widths and tokens.

    A factory's model of classification is checked no further: only its ranks know what it has.
    """
    if model.factory is not None and model.task == "classification":
        if parallel.sequence > 1 and parallel.pipeline > 1:
            what = f"{parallel.in_words} do not go together for model.factory = {shown(model.factory)}"
            raise RequestError(f"{what}: what stages of a part of the tokens hand on is not known", next_step="Set one")
        return
    if model.name is None or model.heads is None:
        raise _unknown_split(parallel, model)
    swin = swin_shape(model)
    if swin is not None:
        _check_swin(parallel, model)
    _check_heads(parallel, model, model.heads)
    if model.mlp_size is not None and model.mlp_size % parallel.tensor:
        what = f"parallel.tensor = {parallel.tensor} does not divide model.mlp_size = {model.mlp_size}"
        raise RequestError(what, next_step="Set another mlp_size, or tensor to a divisor of it")
    if swin is not None:
        last_stage = stages(swin)[-1]
        _check_token_parts(parallel, model, last_stage.side, f"rows of tokens in {model.name}'s last stage")
    else:
        patches = (model.image_size // (model.patch_size or 1)) ** 2
        class_token = 1
        _check_token_parts(parallel, model, patches + class_token, "tokens")


def _unknown_split(parallel: ParallelSpec, model: ModelSpec) -> RequestError:
    """Return the error for a model that is not one of vitscale's own, so that nobody knows how to split it."""
    is_segmentation = model.task == "segmentation"
    subject = "a model of train.script's own"
    for key in ("name", "hf", "factory"):
        value = getattr(model, key)
        if value is not None:
            subject = f"model.{key} = {shown(value)}"
            break
    if is_segmentation:
        subject += f" with model.task = {shown('segmentation')}"
    valid = ["vit-ti16, vit-s16, vit-b16 and their like, of any shape", "swinv2-t and its like"]
    if not is_segmentation:
        valid.append("a factory that says how it is split")
    return RequestError(
        f"{subject} cannot be split: {parallel.in_words} is known to train the same for vitscale's own models",
        valid=valid,
        next_step="Use one of these, or leave [parallel] out",
    )


def _check_swin(parallel: ParallelSpec, model: ModelSpec) -> None:
    """Refuse splits that a Swin does not take."""
    if parallel.shard_norms:
        raise RequestError(
            f"{parallel.in_words} with shard_norms cannot be trained of {model.name}: windows join tokens of several "
            "ranks",
            valid=["shard_norms = false; parallel.sequence shares tokens, of norms too"],
            next_step="Use that, or a vision transformer",
        )
    if model.task == "segmentation" and parallel.sequence > 1 and parallel.pipeline > 1:
        what = f"{parallel.in_words} do not go together for {model.name} with model.task = 'segmentation'"
        raise RequestError(
            f"{what}: maps of all stages would be exchanged before its heads", next_step="Set one of them to 1"
        )


def _check_heads(parallel: ParallelSpec, model: ModelSpec, heads: int) -> None:
    """Refuse tensor and sequence ranks that do not divide the attention heads, in a Swin those of its first stage."""
    if heads % (parallel.tensor * parallel.sequence) == 0:
        return
    divisors = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
    of_stage = " of its first stage" if model.depths is not None else ""
    raise RequestError(
        f"{parallel.in_words} ranks share {model.name}'s {heads} heads{of_stage}, which they do not divide",
        valid=[f"tensor x sequence of {divisors}"],
        next_step="Or take a model with other heads (model.heads)",
    )


def _check_token_parts(parallel: ParallelSpec, model: ModelSpec, parts: int, noun: str) -> None:
    """Refuse a split of each image's tokens over more ranks than the image has parts.

    Args:
        parallel: the split.
        model: the model.
        parts: number of the parts, which cannot be cut further.
        noun: name of the parts in a message: "tokens".
    """
    ranks = parallel.sequence * parallel.tensor if parallel.shard_norms else parallel.sequence
    if parts < ranks:
        raise RequestError(
            f"images of {model.image_size} pixels are {parts} {noun}, too few to share by {parallel.in_words}",
            valid=[f"up to {counted(parts, 'rank')} for each image"],
            next_step="Use a larger model.image_size, or split the tokens less",
        )


def check_blocks(trial: Trial) -> None:
    """Refuse options that work block by block, where the model is known to have no repeated blocks.

    Raises:
        RequestError: no two blocks of the model are of one kind. Without this check only its ranks would notice.
    """
    shapes = recorded_shapes(trial.model)
    if shapes is None or any(block.wrapped for block in shapes.blocks):
        return
    model_name = shown(trial.model_name)
    for option in ("activation_checkpointing", "compile"):
        if getattr(trial.train, option):
            raise RequestError(
                f"train.{option} works block by block, and {model_name} has one block here",
                next_step="Set more blocks (model.layers, of Swin model.depths), or leave it out",
            )


_MODEL_TYPES_WITHOUT_POOLING = ("dpt", "sapiens2", "segformer", "tipsv2_dpt")
"""Types of Hugging Face models whose own decoders do not pool to 1 pixel a side. All others do: with DeepLab's head, or
with UperNet's pyramid, whose scales a configuration may set, and which backbones without a decoder get."""


def check_labels(trial: Trial, summary: Summary) -> None:
    """Check that model, data and batch sizes of a trial go together.

    Raises:
        RequestError: the model's labels are not the data's; the model takes images of one size, and they are evaluated
            in their own; or a batch norm would be over a single image.
    """
    model = trial.model
    if model.task != summary.task:
        raise RequestError(
            f"data.name = {shown(trial.data.name)} has labels for {summary.task}, and the model is for {model.task}",
            next_step=f"Set model.task = {shown(summary.task)}, or use other data",
        )
    is_evaluated_whole = trial.window.evaluate and trial.data.evaluation == "whole"
    # A Swin has depths, and takes images of any size.
    is_named_vit = model.own_name is not None and model.depths is None
    if summary.sizes_vary and is_evaluated_whole and is_named_vit:
        what = f"{model.name} takes images of one size, and whole ones are evaluated in their own proportions"
        raise RequestError(what, next_step='Set data.evaluation = "sliding"')
    if model.task == "segmentation" and _pools_to_one_pixel(model):
        _check_batch_norm(trial, samples_used(summary.train_samples, trial.data.fraction))


def _pools_to_one_pixel(model: ModelSpec) -> bool:
    """Whether the model's decoder has a norm that gets a single value from each image; False where it is not known."""
    config = read_config(model.hf) if model.hf is not None else None
    if config is None:
        return model.own_name is not None  # named models have UperNet
    scales = config.get("pool_scales", (1,))
    is_pooling = config.get("model_type") not in _MODEL_TYPES_WITHOUT_POOLING
    return is_pooling and isinstance(scales, (list, tuple)) and 1 in scales


def _check_batch_norm(trial: Trial, samples: int) -> None:
    """Refuse a trial of `samples` images an epoch in which some batch norm would be over a single image."""
    train = trial.train
    sizes = micro_batches(train, trial.layout.data)  # images per micro-step of each rank
    is_local = train.batch_norm == "local"
    if fewest_normalised(sizes, train.grad_accum, samples, local=is_local, drop_last=train.drop_last) > 1:
        return
    normalised_in_whole_step = _fewest_in_one_norm(sizes, local=is_local)
    if normalised_in_whole_step > 1:
        cause = f"the last step of an epoch, {samples % trial.global_batch} images,"
        remedy = "Set train.drop_last = true, or another micro_batch"
    else:
        cause = f"train.micro_batch = {min(sizes)}"
        remedy = "Set train.micro_batch = 2 or more"
    if is_local:
        two_data_ranks = 2 * trial.parallel.ranks_per_model
        remedy += f', or train.batch_norm = "synchronised" on {two_data_ranks} ranks or more'
    scope = "a rank's own images" if is_local else "the images of all ranks"
    raise RequestError(
        f"on {counted(trial.world.size, 'rank')} {cause} leaves a batch norm over {scope} only one of them, and "
        "the decoder pools each to a single pixel: one value has no variance",
        next_step=remedy,
    )


def fewest_normalised(sizes: Sequence[int], grad_accum: int, samples: int, *, local: bool, drop_last: bool) -> int:
    """Return the smallest number of images, above 0, that one batch norm is over in any micro-step of an epoch.

    Args:
        sizes: images per micro-step of each rank.
        grad_accum: micro-steps of an optimizer step.
        samples: images of an epoch.
        local: whether a norm is over a rank's own images, and not over those of all ranks.
        drop_last: whether the short last step is left out.
    """
    global_batch = sum(sizes) * grad_accum
    last_step_images = samples % global_batch
    in_whole_step = _fewest_in_one_norm(sizes, local=local)
    if not last_step_images or drop_last:
        return in_whole_step
    micro_steps = _micro_steps_of_last_step(sizes, global_batch, last_step_images)
    in_last_step = min(_fewest_in_one_norm(images_by_rank, local=local) for images_by_rank in micro_steps)
    has_whole_step = samples >= global_batch
    return min(in_whole_step, in_last_step) if has_whole_step else in_last_step


def _fewest_in_one_norm(images_by_rank: Sequence[int], *, local: bool) -> int:
    """Return the images that a norm of one micro-step is over: those of the rank with the fewest, or of all ranks."""
    return min(images_by_rank) if local else sum(images_by_rank)


def _micro_steps_of_last_step(
    images_by_rank: Sequence[int], global_batch: int, last_step_images: int
) -> list[list[int]]:
    """Return the different micro-steps of a short last step, as the images of each rank that has any in it.

    All micro-steps that are filled wholly are alike, and appear once; one that is filled in part comes after them.

    Example: whole steps of 16 images are 2 micro-steps of 4 images on each of 2 ranks. A last step of 7 images has
    micro-steps of up to 2 images a rank: [[2, 2], [2, 1]].

    Args:
        images_by_rank: images of each rank in a micro-step of a whole step.
        global_batch: images of a whole step.
        last_step_images: images of the last one, above 0.
    """
    # As `datasets.batches` lays the images out: each rank takes up to a share of its usual images, rounded up, and
    # the images fill the ranks of a micro-step one after the other, and the micro-steps one after the other.
    most_by_rank = [-(-images * last_step_images // global_batch) for images in images_by_rank]
    filled_micro_steps, remaining_images = divmod(last_step_images, sum(most_by_rank))
    micro_steps = []
    if filled_micro_steps > 0:
        micro_steps.append(most_by_rank)
    if remaining_images > 0:
        micro_steps.append(_filled_in_order(most_by_rank, remaining_images))
    return micro_steps


def _filled_in_order(most_by_rank: Sequence[int], images: int) -> list[int]:
    """Return the images of each rank that gets any, where they fill one rank after the other.

    Example: 3 images on ranks that take up to 2, 2 and 2 are [2, 1].
    """
    filled = []
    for most in most_by_rank:
        if images <= 0:
            break
        filled.append(min(most, images))
        images -= most
    return filled
