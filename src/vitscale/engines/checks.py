"""Checks of a [train] against its engine: options that it does not read, what it refuses, and what it cannot answer."""

from __future__ import annotations

from collections.abc import Iterator

from vitscale.engines import ENGINES, OPTIONS, known, of_engine, readers_of, wrapper_facts
from vitscale.engines.facts import ONE_PROCESS, Refusal
from vitscale.engines.torch_needs import COMMON, TorchNeed, TorchRelease
from vitscale.errors import RequestError, shown
from vitscale.trial import script
from vitscale.trial.trial import TrainSpec, Trial

_NAMING_ENGINES = {facts.stands_for for facts in ENGINES.values() if facts.stands_for}
"""Fields of [train] that name an engine, besides `engine`."""


def check(train: TrainSpec) -> None:
    """Check that the engine of a [train] can do all that it asks for, on its device.

    Raises:
        RequestError: it cannot, or an option is set that it does not have; with the reason and the next step.
    """
    known(train.engine)  # raises for an unknown engine
    for refusal in _refusals(train):
        raise RequestError(refusal.what, valid=refusal.valid, next_step=refusal.next_step)


def check_ranks(train: TrainSpec, ranks: int) -> None:
    """Check that the engine of a [train] takes a number of ranks.

    Raises:
        RequestError: it does not; with the reason, values close to what is set, and the next step.
    """
    for refusal in _rank_refusals(train, ranks):
        raise RequestError(refusal.what, valid=refusal.valid, next_step=refusal.next_step)


def takes_ranks(train: TrainSpec, ranks: int) -> bool:
    """Whether the engine of a [train] takes a number of ranks."""
    return next(_rank_refusals(train, ranks), None) is None


def _rank_refusals(train: TrainSpec, ranks: int) -> Iterator[Refusal]:
    """Yield the reasons to refuse a number of ranks; how a script trains is its own affair."""
    if train.script is None:
        yield from wrapper_facts(train).rank_refusals(train, ranks)


def unmet_torch_needs(train: TrainSpec, torch_version: str) -> Iterator[TorchNeed]:
    """Yield what a [train] uses of torch and this version lacks; nothing where its release is not known.

    How a script uses torch is its own affair.
    """
    installed = TorchRelease.of_version(torch_version)
    if installed is None or train.script is not None:
        return
    for need in (*COMMON, *wrapper_facts(train).torch_needs):
        if need.is_unmet(train, installed):
            yield need


def check_torch(train: TrainSpec, torch_version: str) -> None:
    """Check that a version of torch trains as a [train] asks for.

    Raises:
        RequestError: it trains wrongly or not at all; with the release that does.
    """
    for need in unmet_torch_needs(train, torch_version):
        if need.is_refused:
            raise RequestError(
                f"{need.what} {need.under_older} under torch {torch_version}",
                next_step=f"Install torch {need.release} or later, or {need.remedy}",
            )


def check_checkpoint(train: TrainSpec) -> None:
    """Check that a checkpoint of this training can be saved and restored (`measure.checkpoint`).

    Raises:
        RequestError: it cannot, with the reason.
    """
    reason = wrapper_facts(train).checkpoint_unknown
    if train.optimizer == "deepspeed_config":
        reason = "the optimizer is that of the DeepSpeed file, whose states may be of any form"
    if reason is not None:
        raise RequestError(
            f"measure.checkpoint cannot be done under {engine_in_words(train)}: {reason}", next_step="Leave it out"
        )


def why_no_gradient_norms(trial: Trial) -> str | None:
    """Return why a trial cannot measure norms of the gradients of a micro-batch and of a step; None where it can."""
    train = trial.train
    if trial.parallel.ranks_per_model > 1:
        return "ranks that share a model hold parts of the gradient"
    if trial.model.task == "segmentation":
        return "gradients are means over pixels, of which not every image has as many"
    if train.precision == "fp16":
        return "fp16 scales the gradients by a factor that changes as training goes on"
    engine_reason = wrapper_facts(train).norms_unknown(train)
    if engine_reason:
        return engine_reason
    if computation(trial) != ONE_PROCESS:
        return f"ranks of {train.wrapper} are not known to step by one gradient"
    return None


def exchanges_unknown(trial: Trial) -> str:
    """Return why the traffic of one counted step cannot stand for all steps; empty where it can.

    It can where the ranks exchange in each step. Of scripts and of imported trials nothing is known but what was
    counted, so they are taken to exchange in each step.
    """
    if trial.train.script is not None or trial.origin is not None:
        return ""
    steps = wrapper_facts(trial.train).steps_between_exchanges(trial.train)
    if steps is None:
        return f"how often {trial.train.wrapper} exchanges is not known"
    if steps == 1:
        return ""
    return f"{trial.train.wrapper} exchanges once in {steps} steps, and single steps were counted"


def exchanges_in_groups(trial: Trial) -> bool:
    """Whether some exchanges involve only a part of the ranks, so that not all ranks leave one together."""
    second_shard_ranks = wrapper_facts(trial.train).second_shard_ranks(trial.train)
    return trial.layout.exchanges_in_groups or 1 < second_shard_ranks < trial.world.size


def computation(trial: Trial) -> str:
    """Return the name of what a trial computes: only trials with the same name train the same.

    It is `EngineFacts.trains_like`. An engine without one is taken to be like itself alone. Scripts and imported trials
    are taken to train like one process.
    """
    if trial.train.script is not None or trial.origin is not None:
        return ONE_PROCESS
    return wrapper_facts(trial.train).trains_like or f"that of {trial.train.wrapper}"


def _refusals(train: TrainSpec) -> Iterator[Refusal]:
    """Yield all reasons to refuse a [train], in the order in which they should be mended."""
    concerns_script = train.script is not None or train.arguments or train.engine == script.NAME
    if concerns_script:
        yield from _script_refusals(train)
        return  # how a script trains is its own affair
    yield from _unavailable_engine_refusals(train)
    yield from _idle_option_refusals(train)
    yield from _precision_refusals(train)
    yield from _engine_value_refusals(train)
    yield from _lamb_refusals(train)
    yield from _graph_refusals(train)
    yield from wrapper_facts(train).refusals(train)


def _script_refusals(train: TrainSpec) -> Iterator[Refusal]:
    """Refuse a script beside settings that it does not go with, and settings of scripts without one."""
    for obstacle in script.unfit(train):
        yield Refusal(*obstacle)


def _unavailable_engine_refusals(train: TrainSpec) -> Iterator[Refusal]:
    """Refuse an engine that cannot run on the device."""
    facts = of_engine(train.engine)
    reason = facts.unavailable(train.device)
    if reason:
        yield Refusal(f"train.engine = {shown(train.engine)} cannot run here: {reason}", next_step=facts.instead)


def _idle_option_refusals(train: TrainSpec) -> Iterator[Refusal]:
    """Refuse options that are set and that the engine does not read: varying them would vary nothing."""
    read_options = {of_engine(train.engine).stands_for, *wrapper_facts(train).options}
    for option in OPTIONS:
        value = getattr(train, option)
        is_set = value != TrainSpec.model_fields[option].default
        if is_set and option not in read_options:
            has_short_value = not isinstance(value, dict) and option not in _NAMING_ENGINES
            shown_value = f" = {shown(value)}" if has_short_value else ""
            what = f"train.{option}{shown_value} has no meaning under {engine_in_words(train)}"
            yield Refusal(what, next_step=_advice_about_idle(option))


def _advice_about_idle(option: str) -> str:
    """Return what to do about an option that the engine does not read."""
    readers = [shown(name) for name in readers_of(option)]
    if not readers:
        return "Remove it: no engine reads it"
    return f"Remove it, or set engine = {' or '.join(readers)}"


def _precision_refusals(train: TrainSpec) -> Iterator[Refusal]:
    """Refuse fp16 on a CPU."""
    if train.precision == "fp16" and train.device == "cpu":
        yield Refusal(
            "fp16 training needs a GPU, and this trial computes on the CPU",
            next_step="Use train.precision = 'bf16' or 'fp32' (take fp16 out of a DeepSpeed file), or a machine with "
            "a GPU",
        )


def _engine_value_refusals(train: TrainSpec) -> Iterator[Refusal]:
    """Refuse the values of fields that the engine does not take (`EngineFacts.cannot`)."""
    for (field, refused_value), refusal in wrapper_facts(train).cannot.items():
        if getattr(train, field) == refused_value:
            yield refusal


def _lamb_refusals(train: TrainSpec) -> Iterator[Refusal]:
    """Refuse LAMB where the optimizer sees no whole tensors."""
    if train.optimizer == "lamb" and wrapper_facts(train).shards(train):
        yield Refusal(
            "train.optimizer = 'lamb' divides by the norm of each whole weight tensor, and "
            f"{engine_in_words(train)} hands the optimizer flat pieces of them: it would train something else",
            next_step="Use zero_stage = 0, ddp or none for LAMB, or adamw or sgd here",
        )


def _graph_refusals(train: TrainSpec) -> Iterator[Refusal]:
    """Refuse to replay compiled blocks as CUDA graphs where that cannot be done."""
    replays_graphs = train.compile and train.compile_mode == "reduce-overhead"
    if not replays_graphs:
        return
    if train.device == "cpu":
        what = "train.compile_mode = 'reduce-overhead' records CUDA graphs, and this trial computes on the CPU"
        yield Refusal(what, next_step="Remove it, or use a machine with a GPU")
    if train.grad_accum > 1:
        yield Refusal(
            f"train.compile_mode = 'reduce-overhead' does not go with train.grad_accum = {train.grad_accum}: gradients "
            "of one micro-step lie where the graphs of the next write theirs (pytorch/pytorch issue 96693)",
            next_step="Set grad_accum = 1, or compile_mode = 'default'",
        )


def engine_in_words(train: TrainSpec) -> str:
    """Return the engine in the study's words: "train.engine = 'deepspeed' with zero_stage = 2"."""
    facts = of_engine(train.engine)
    naming_options = [facts.stands_for] if facts.stands_for else facts.name_options
    settings = [f"{option} = {shown(getattr(train, option))}" for option in naming_options]
    engine_setting = f"train.engine = {shown(train.engine)}"
    if not settings:
        return engine_setting
    return f"{engine_setting} with {', '.join(settings)}"
