"""How advice is worded, in a terminal and in a study's comments."""

from __future__ import annotations

from collections.abc import Iterator

from vitscale.advice.answers import Answer
from vitscale.advice.pipeline import Advice
from vitscale.advice.request import Option
from vitscale.analysis.scaling import split_name
from vitscale.present import units
from vitscale.present.estimate import Estimate
from vitscale.present.units import number
from vitscale.trial.parallel import NO_SPLIT

QUESTIONS = {"fastest": "fastest", "cheapest": "cheapest", "most": "most ranks", "knee": "knee of the curve"}
LARGE = "\u2020"


def engine(option: Option) -> str:
    """ "ddp", "deepspeed ZeRO-2", with what else decides memory."""
    candidate = option.candidate
    checkpointed = ", activation checkpointing" if candidate.activation_checkpointing else ""
    split = f", {split_name(candidate.parallel)}" if candidate.parallel != NO_SPLIT else ""
    return f"{candidate.variant.name}{split}{checkpointed}"


def batch(option: Option) -> str:
    """ "512 = 8 x 32 x 2": the global batch as ranks x micro-batch x accumulation.

    Where ranks share models, the models count and not the ranks.
    """
    candidate = option.candidate
    accumulated = f" x {candidate.grad_accum}" if candidate.grad_accum > 1 else ""
    copies = option.gpus // candidate.parallel.ranks_per_model
    return f"{option.global_batch:,} = {copies:,} x {candidate.micro_batch}{accumulated}"


def mark(option: Option) -> str:
    """What stands beside a large batch."""
    return LARGE if option.large_batch else ""


def time(between: Estimate) -> str:
    """ "1.50 h (1.40 h to 1.70 h)"."""
    low, high = between.ends
    return f"{units.seconds(between.value)} ({units.seconds(low)} to {units.seconds(high)})"


def amount(between: Estimate) -> str:
    """ "12.0 (11.2 to 13.6)"."""
    low, high = between.ends
    return f"{number(between.value)} ({number(low)} to {number(high)})"


def amounts(advice: Advice, option: Option) -> str:
    """ "1.50 h, 12.0 GPU-hours"."""
    return f"{units.seconds(option.seconds.value)}, {units.rank_time(option.gpu_hours.value, advice.device)}"


def ranks_on_hosts(option: Option) -> str:
    """ "16 ranks on 2 hosts"."""
    ranks = units.ranks(option.gpus)
    if (instance := option.candidate.instance) is not None:
        return f"{ranks} on {option.nodes} {instance.name} ({instance.gpu.name})"
    return ranks if option.nodes == 1 else f"{ranks} on {option.nodes} hosts"


def in_short(option: Option) -> str:
    """ "ddp, 16 ranks on 2 hosts, micro-batch 32 x 2 (global batch 1,024)": in the report's order of words."""
    candidate = option.candidate
    accumulated = f" x {candidate.grad_accum}" if candidate.grad_accum > 1 else ""
    batch = f"micro-batch {candidate.micro_batch}{accumulated} (global batch {option.global_batch:,})"
    return f"{engine(option)}, {ranks_on_hosts(option)}, {batch}"


def question(advice: Advice, answer: Answer) -> str:
    """What an answer answers."""
    name = QUESTIONS[answer.kind]
    if answer.kind == "knee" or not advice.asked.limited:
        return name
    return f"{name} within the limits"


def origins(advice: Advice) -> str:
    """The series that the answers are from."""
    *first, last = advice.origins or (advice.reference,)
    return f"{'; '.join(first)} and {last}" if first else last


def limit_lines(advice: Advice) -> list[str]:
    """The limits as they were understood."""
    asked = advice.asked
    lines = []
    if asked.deadline_seconds is not None:
        lines.append(f"done within {units.seconds(asked.deadline_seconds)}")
    if asked.budget is not None:
        if asked.priced:
            lines.append(f"a cost of at most {number(asked.budget)}")
        else:
            lines.append(f"at most {units.rank_time(asked.budget, advice.device)}")
    if asked.min_efficiency is not None:
        lines.append(f"efficiency of at least {100 * asked.min_efficiency:.3g} %")
    return lines


def notes(advice: Advice) -> Iterator[str]:
    """What a reader must know to use the answers; one sentence or two each."""
    answers = [answer.option for answer in advice.answers] or ([] if advice.closest is None else [advice.closest])
    if any(option.startup is None for option in answers):
        yield "Start-up is unavailable where none is shown (no run under that launcher told it), and left out there."
    told = set()
    for answer in advice.answers:
        if answer.at_the_end:
            yield (
                f"The knee is the largest count looked at ({answer.option.gpus}): the real one may lie beyond. Look "
                "further with --max-gpus."
            )
        if answer.option.candidate not in told:
            yield from _about(answer)
        told.add(answer.option.candidate)
    if advice.other_batch is not None:
        other = advice.other_batch
        same = (
            f"{other.label}; {units.seconds(other.same_loss_seconds)} to the same loss"
            if other.same_loss_seconds is not None
            else f"{other.label}; what that does to accuracy is unknown"
        )
        yield (
            f"With another global batch than the study's, {in_short(other)} would take "
            f"{units.seconds(other.seconds.value)} ({same}). --any-batch lets the answers do that."
        )
    yield from _large_batches(advice)
    yield from _same_loss(advice)
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
    if advice.indivisible:
        counts = ", ".join(map(str, advice.indivisible[:8])) + (", ..." if len(advice.indivisible) > 8 else "")
        yield f"The study's global batch of {advice.study_batches[-1]:,} does not divide over {counts} ranks."


def _large_batches(advice: Advice) -> Iterator[str]:
    shown = [*(answer.option for answer in advice.answers), *advice.front]
    if any(option.large_batch for option in shown) or advice.large_batch is not None:
        far = "" if advice.noise.images is None else ", or a batch of more than 10 times the gradient noise scale"
        yield (
            f"{LARGE} Large-batch training: fewer than 100 steps an epoch{far}, and larger than the study's smallest. "
            "Time for an epoch says little of it: such steps teach less for each image."
        )
    if advice.large_batch is not None and advice.closest is None:
        other = advice.large_batch
        yield (
            f"Only large-batch training is faster than these answers: {in_short(other)} would take "
            f"{units.seconds(other.seconds.value)} ({other.label}). --large-batch lets the answers do that."
        )


def _same_loss(advice: Advice) -> Iterator[str]:
    """What throughput alone hides, where the gradient noise scale is known."""
    if advice.noise.images is None:
        return
    low, high = advice.noise.low, advice.noise.high
    over = "" if low is None or high is None else f" (over the trials {number(low)} to {number(high)})"
    yield (
        f"Same loss: until the loss that a global batch of {advice.study_batches[0]:,} would have after this work, at "
        f"a gradient noise scale of {number(advice.noise.images)} images{over}, each batch at its best learning rate."
    )
    known = [(option.same_loss_seconds, option) for option in advice.front if option.same_loss_seconds is not None]
    if known and known[0][0] > (quickest := min(known, key=lambda pair: pair[0]))[0] and not advice.asked.any_batch:
        yield (
            f"To the same loss {in_short(quickest[1])} is the fastest of these: {units.seconds(quickest[0])}, where "
            f"{in_short(known[0][1])} takes {units.seconds(known[0][0])}."
        )


def _about(answer: Answer) -> Iterator[str]:
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


def dares(advice: Advice) -> Iterator[str]:
    """What is better than the answers and less sure, each once."""
    told = set()
    for answer in advice.answers:
        if answer.riskier is None or answer.option.candidate in told:
            continue
        told.add(answer.option.candidate)
        name, other = QUESTIONS[answer.kind].capitalize(), answer.riskier
        why = "" if other.measured_engine else ", an engine that was not measured"
        sure = "" if other.verdict == "meets" else ", which only probably meets the limits"
        yield (
            f"{name}, if you dare: {in_short(other)}{why}{sure}: {time(other.seconds)}, "
            f"{units.rank_time(other.gpu_hours.value, advice.device)} ({other.label})."
        )


def dropped_lines(advice: Advice) -> list[str]:
    """How many configurations were left out, and why; engines that are refused for one reason together."""
    lines = [f"{count:,} left out: {why}." for why, count in advice.dropped.items()]
    by_reason: dict[str, list[str]] = {}
    for name, why in advice.refused.items():
        by_reason.setdefault(why.rstrip("."), []).append(name)
    return [*lines, *(f"{', '.join(names)} left out: {why}." for why, names in by_reason.items())]
