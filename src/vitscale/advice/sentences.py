"""How advice is worded, in a terminal and in a study's comments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vitscale.advice.answers import Answer, QuestionKind
from vitscale.advice.pipeline import Advice
from vitscale.advice.request import Option
from vitscale.analysis.scaling import split_name
from vitscale.present import units
from vitscale.present.estimate import Estimate
from vitscale.present.units import number
from vitscale.trial.parallel import NO_SPLIT

QUESTIONS = {"fastest": "fastest", "cheapest": "cheapest", "most": "most ranks", "knee": "knee of the curve"}
"""Question -> its name."""
_MOST_COUNTS_NAMED = 8
"""Most rank counts that a sentence names."""
LARGE_BATCH_MARK = "\u2020"
"""Stands behind a large batch in tables (a dagger); `_sentences_on_large_batches` explains it."""


def engine(option: Option) -> str:
    """Return the engine, the split, the replicas or the second shards, and recomputing.

    Example: "deepspeed ZeRO-2, sequence 2, activation checkpointing", "fsdp2, 4 replicas of 8", "deepspeed ZeRO-3,
    hpZ 8".
    """
    candidate = option.candidate
    parts = [candidate.variant.name]
    model_split = candidate.parallel.model_split
    if model_split != NO_SPLIT:
        parts.append(split_name(model_split))
    replicas = candidate.parallel.replicate
    if replicas > 1:
        parts.append(f"{replicas} replicas of {candidate.gpus // replicas}")
    if candidate.second_shard_ranks > 1:
        parts.append(f"hpZ {candidate.second_shard_ranks}")
    if candidate.activation_checkpointing:
        parts.append("activation checkpointing")
    return ", ".join(parts)


def batch(option: Option) -> str:
    """Return the global batch as ranks x micro-batch x accumulation: "512 = 8 x 32 x 2".

    Where ranks share models, the models count and not the ranks.
    """
    models = option.gpus // option.candidate.parallel.ranks_per_model
    return f"{option.global_batch:,} = {models:,} x {_micro_batches(option)}"


def _micro_batches(option: Option) -> str:
    """Return micro-batch x accumulation: "32 x 2"; "32" without accumulation."""
    candidate = option.candidate
    if candidate.grad_accum == 1:
        return f"{candidate.micro_batch}"
    return f"{candidate.micro_batch} x {candidate.grad_accum}"


def large_batch_mark(option: Option) -> str:
    """Return the mark that tables put behind a large batch; an empty text for other batches."""
    return LARGE_BATCH_MARK if option.large_batch else ""


def time(seconds: Estimate) -> str:
    """Return an expected time with its interval: "1.50 h (1.40 h to 1.70 h)"."""
    low, high = seconds.ends
    return f"{units.seconds(seconds.value)} ({units.seconds(low)} to {units.seconds(high)})"


def amount(estimate: Estimate) -> str:
    """Return an expected number with its interval: "12.0 (11.2 to 13.6)"."""
    low, high = estimate.ends
    return f"{number(estimate.value)} ({number(low)} to {number(high)})"


def time_and_gpu_hours(advice: Advice, option: Option) -> str:
    """Return an option's expected time and cost: "1.50 h, 12.0 GPU-hours"."""
    return f"{units.seconds(option.seconds.value)}, {units.rank_time(option.gpu_hours.value, advice.device)}"


def ranks_on_hosts(option: Option) -> str:
    """Return "16 ranks on 2 hosts"; on rented instances "16 ranks on 2 p4d.24xlarge (A100)"."""
    ranks = units.ranks(option.gpus)
    instance = option.candidate.instance
    if instance is not None:
        return f"{ranks} on {option.nodes} {instance.name} ({instance.gpu.name})"
    return ranks if option.nodes == 1 else f"{ranks} on {option.nodes} hosts"


def in_short(option: Option) -> str:
    """Return an option in one phrase: "ddp, 16 ranks on 2 hosts, micro-batch 32 x 2 (global batch 1,024)"."""
    batch = f"micro-batch {_micro_batches(option)} (global batch {option.global_batch:,})"
    return f"{engine(option)}, {ranks_on_hosts(option)}, {batch}"


def question(advice: Advice, answer: Answer) -> str:
    """Return the question of an answer, in words: "fastest within the limits"."""
    name = QUESTIONS[answer.kind]
    if answer.kind == "knee" or not advice.asked.limited:
        return name
    return f"{name} within the limits"


def origin_series(advice: Advice) -> str:
    """Return the names of the measured series that the answers were worked out from: "ddp; fsdp and none"."""
    *first, last = advice.origins or (advice.reference,)
    return f"{'; '.join(first)} and {last}" if first else last


def limit_lines(advice: Advice) -> list[str]:
    """Return a line for each limit as it was understood: "done within 2 h"."""
    request = advice.asked
    lines = []
    if request.deadline_seconds is not None:
        lines.append(f"done within {units.seconds(request.deadline_seconds)}")
    if request.budget is not None:
        if request.priced:
            lines.append(f"a cost of at most {number(request.budget)}")
        else:
            lines.append(f"at most {units.rank_time(request.budget, advice.device)}")
    if request.min_efficiency is not None:
        lines.append(f"efficiency of at least {100 * request.min_efficiency:.3g} %")
    return lines


def notes(advice: Advice) -> Iterator[str]:
    """Yields the notes below the answers, each of one or two sentences: what to be careful with, what is missing."""
    options = [answer.option for answer in advice.answers]
    if not options and advice.closest is not None:
        options = [advice.closest]
    if any(option.startup is None for option in options):
        yield "Start-up is unavailable where none is shown (no run under that launcher told it), and left out there."
    yield from _cautions_about_answers(advice)
    if advice.other_batch is not None:
        yield _gain_by_other_batch(advice.other_batch)
    yield from _sentences_on_large_batches(advice)
    yield from _sentences_on_same_loss(advice)
    if not advice.interruptions_known:
        yield (
            "Failures and checkpoints are left out: what a checkpoint of this model takes is not known. Say "
            "--checkpoint-seconds."
        )
    if advice.noise.images is None:
        yield f"Time to the same loss: unavailable. The gradient noise scale is unknown: {advice.noise.reason}."
    if not advice.memory_known:
        yield (
            "Memory: unavailable, so nothing was left out for it. Give the memory of one device with --gpu-memory, if "
            "the model is one that vitscale can count."
        )
    if not advice.host_memory_known:
        yield (
            "The host's memory: unavailable, so nothing was left out for what is offloaded to it. It is recorded by "
            "runs on the hosts that are asked about: measure once more."
        )
    if advice.indivisible:
        counts = ", ".join(map(str, advice.indivisible[:_MOST_COUNTS_NAMED]))
        ellipsis = ", ..." if len(advice.indivisible) > _MOST_COUNTS_NAMED else ""
        yield f"The study's global batch of {advice.study_batches[-1]:,} does not divide over {counts}{ellipsis} ranks."


def _cautions_about_answers(advice: Advice) -> Iterator[str]:
    """Yields the cautions about all answers; an option that answers several questions is treated once."""
    treated_candidates = set()
    for answer in advice.answers:
        if answer.at_the_end:
            yield (
                f"The knee is the largest count looked at ({answer.option.gpus}): the real one may lie beyond. Look "
                "further with --max-gpus."
            )
        if answer.option.candidate not in treated_candidates:
            yield from _cautions_about_answer(answer)
        treated_candidates.add(answer.option.candidate)


def _gain_by_other_batch(option: Option) -> str:
    """Return the sentence on an option that is faster by another global batch than the study's."""
    if option.same_loss_seconds is not None:
        accuracy = f"{units.seconds(option.same_loss_seconds)} to the same loss"
    else:
        accuracy = "what that does to accuracy is unknown"
    return (
        f"With another global batch than the study's, {in_short(option)} would take "
        f"{units.seconds(option.seconds.value)} ({option.label}; {accuracy}). --any-batch lets the answers do that."
    )


def _sentences_on_large_batches(advice: Advice) -> Iterator[str]:
    """Yields the meaning of the mark of large batches, where an option has it, and what they alone would gain."""
    options_in_tables = [*(answer.option for answer in advice.answers), *advice.front]
    if any(option.large_batch for option in options_in_tables) or advice.large_batch is not None:
        beyond_noise = (
            "" if advice.noise.images is None else ", or a batch of more than 10 times the gradient noise scale"
        )
        yield (
            f"{LARGE_BATCH_MARK} Large-batch training: fewer than 100 steps an epoch{beyond_noise}, and larger than "
            "the study's smallest. Time for an epoch says little of it: such steps teach less for each image."
        )
    if advice.large_batch is not None and advice.closest is None:
        option = advice.large_batch
        yield (
            f"Only large-batch training is faster than these answers: {in_short(option)} would take "
            f"{units.seconds(option.seconds.value)} ({option.label}). --large-batch lets the answers do that."
        )


def _sentences_on_same_loss(advice: Advice) -> Iterator[str]:
    """Yields the meaning of the time to the same loss, and an option that is faster by it than by its throughput.

    Yields nothing where the gradient noise scale is unknown.
    """
    noise = advice.noise
    if noise.images is None:
        return
    has_range = noise.low is not None and noise.high is not None
    range_over_trials = f" (over the trials {number(noise.low)} to {number(noise.high)})" if has_range else ""
    yield (
        f"Same loss: until the loss that a global batch of {advice.study_batches[0]:,} would have after this work, at "
        f"a gradient noise scale of {number(noise.images)} images{range_over_trials}, each batch at its best learning "
        "rate."
    )
    if not advice.asked.any_batch:
        yield from _fastest_to_same_loss(advice.front)


def _fastest_to_same_loss(options: Sequence[Option]) -> Iterator[str]:
    """Yields a sentence on the fastest option to the same loss, where that is not the first of `options`.

    Args:
        options: by rising time of the whole work.
    """
    timed = [
        _TimeToSameLoss(option.same_loss_seconds, option) for option in options if option.same_loss_seconds is not None
    ]
    if not timed:
        return
    first = timed[0]
    soonest = min(timed, key=lambda time: time.seconds)
    if first.seconds > soonest.seconds:
        yield (
            f"To the same loss {in_short(soonest.option)} is the fastest of these: {units.seconds(soonest.seconds)}, "
            f"where {in_short(first.option)} takes {units.seconds(first.seconds)}."
        )


class _TimeToSameLoss(NamedTuple):
    """An option with the seconds until it has the loss that the study's batch would have."""

    seconds: float
    option: Option


def _cautions_about_answer(answer: Answer) -> Iterator[str]:
    """Yields a sentence for each reason to be careful with the option of an answer."""
    name = QUESTIONS[answer.kind].capitalize()
    option = answer.option
    if not option.measured_engine:
        yield f"{name}: no run of these results used {engine(option)}. Try it before you rent for it."
    if not option.keeps_batch:
        yield (
            f"{name}: trains with a global batch of {option.global_batch:,}; the study's own would be another at this "
            "count. Accuracy and the best learning rate may differ."
        )
    if option.label == "prior-driven":
        yield f"{name}: prior-driven. A part that decides it rests on no measurement."
    if option.label == "does not fit":
        yield f"{name}: the model does not fit what was measured. `vitscale predict` names the points."


def sentences_on_riskier_options(advice: Advice) -> Iterator[str]:
    """Yields a sentence on the option that is clearly better than an answer but less sure, where there is one.

    An option that answers several questions gets one sentence, for the first question with a riskier option.
    """
    answered_candidates = set()
    for answer in advice.answers:
        candidate = answer.option.candidate
        if answer.riskier is not None and candidate not in answered_candidates:
            answered_candidates.add(candidate)
            yield _sentence_on_riskier_option(advice, answer.kind, answer.riskier)


def _sentence_on_riskier_option(advice: Advice, question: QuestionKind, option: Option) -> str:
    """Return the sentence that proposes an option which is less sure than the answer to a question."""
    unmeasured = "" if option.measured_engine else ", an engine that was not measured"
    unsure = "" if option.verdict == "meets" else ", which only probably meets the limits"
    return (
        f"{QUESTIONS[question].capitalize()}, if you dare: {in_short(option)}{unmeasured}{unsure}: "
        f"{time(option.seconds)}, {units.rank_time(option.gpu_hours.value, advice.device)} ({option.label})."
    )


def dropped_lines(advice: Advice) -> list[str]:
    """Return a sentence for each reason for which candidates or engines were left out."""
    lines = [f"{count:,} left out: {reason}." for reason, count in advice.dropped.items()]
    engines_by_reason: dict[str, list[str]] = {}
    for name, reason in advice.refused.items():
        engines_by_reason.setdefault(reason.rstrip("."), []).append(name)
    lines += [f"{', '.join(names)} left out: {reason}." for reason, names in engines_by_reason.items()]
    return lines
