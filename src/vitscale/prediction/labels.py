"""What a prediction rests on: its label, and what had to be assumed for want of a measurement."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from vitscale.engines import ENGINES
from vitscale.prediction.fitting import FittedSeries
from vitscale.prediction.layouts import Placement
from vitscale.prediction.network.links import Link
from vitscale.prediction.parameters import job_scale
from vitscale.prediction.results import REACH, Assumption, Label
from vitscale.prediction.variants import Variant
from vitscale.trial.model_cost import parameters
from vitscale.trial.trial import Trial


def label(asked: Variant, placement: Placement, assumptions: Sequence[Assumption]) -> Label:
    """The label of an answer: see `results.Label`."""
    points = asked.fitted.points
    if asked.fitted.misfits:
        return "does not fit"
    decisive = {INSIDE, ACROSS} | ({HOST_SIZE} if placement.trial.world.nodes > 1 else set())
    if asked.guessed or any(assumption.part in decisive for assumption in assumptions):
        return "prior-driven"
    measured = [point.gpus for point in points]
    like = placement.trial.world.nodes <= max(point.nodes for point in points)
    if min(measured) <= placement.gpus <= max(measured) and like and not asked.assumptions:
        return "interpolated"
    return "extrapolated"


MODEL, FIT = "the model", "the fit"
INSIDE, ACROSS = "network inside a host", "network between hosts"
WHAT_IS_SENT = "what is sent"
HOST_SIZE = "ranks on a host"
"""If this is assumed, so is which transfers cross hosts."""
FURTHER_HOSTS = "further hosts"
PROFILER = "the profiler's cost"
SHARES = "shares of ranks"


def assumptions(asked: Variant, placement: Placement) -> tuple[Assumption, ...]:
    """Assumptions about all that nothing measured says anything about."""
    assumed = [*_of_the_fit(asked.fitted), *_network(asked, placement), *asked.assumptions]
    points = asked.fitted.points
    if asked.model.messages is None and placement.gpus > 1:
        assumed.append(_what_is_sent(asked))
    elif asked.trial.model.unknown and placement.gpus > 1:
        count = f"{parameters(asked.trial.model) or 0:,}"
        taken = f"that of {asked.trial.train.engine} with {count} parameters, which come evenly through backward"
        assumed.append(Assumption(WHAT_IS_SENT, taken, "a study run by vitscale itself"))
    measured = max(point.nodes for point in points)
    if placement.trial.world.nodes > measured:
        names = sorted({name for point in points for name in point.devices})
        alike = f"as those measured are ({', '.join(names) or 'GPU types not recorded'})"
        taken = alike if types_are_known(asked.fitted) else f"{alike}, or slower"
        assumed.append(Assumption(FURTHER_HOSTS, taken, f"a run on more than {measured} host{'s' * (measured > 1)}"))
    if any(point.trace_steps for point in points):
        taken = "is in the measured steps, and taken for the training's own"
        assumed.append(Assumption(PROFILER, taken, "a run without the profiler, `vitscale run` or its log"))
    if max(len(point.step_seconds) for point in points) < 2 and len(points) < 3:
        assumed.append(
            Assumption(
                "job-to-job variation",
                f"about {100 * job_scale(points[-1].trial):.2g} % from one run to the next",
                "the same study with measure.repeats = 3",
            )
        )
    if any(point.trial.train.micro_batches is not None for point in points):
        taken = f"equal, micro-batch {placement.trial.train.micro_batch} on each rank; the measured are unequal"
        assumed.append(Assumption(SHARES, taken, "a run with these shares"))
    if asked.fitted.left_out:
        taken = f"as measured; {asked.fitted.left_out}"
        assumed.append(Assumption("the mixture of devices", taken, "`vitscale check`"))
    if placement.host_size_assumed:
        world = placement.trial.world
        why = "for none were measured on several" if world.nodes > 1 else "more than were measured on one"
        assumed.append(Assumption(HOST_SIZE, f"{world.ranks_per_node}, {why}", "say --nodes-of"))
    return tuple(assumed)


def _of_the_fit(fitted: FittedSeries) -> Iterator[Assumption]:
    if fitted.misfits:
        points = ", ".join(
            f"{misfit.gpus} rank{'s' if misfit.gpus > 1 else ''} took {misfit.measured_seconds:.3g} s where it has "
            f"{misfit.fitted_seconds:.3g}"
            for misfit in fitted.misfits
        )
        yield Assumption(
            MODEL,
            f"it does not fit what was measured ({points}); intervals are wide enough to hold that",
            "look at these runs with `vitscale report`; measure them again, or split what differs into two studies",
        )
    if fitted.widening > 1:
        yield Assumption(
            FIT,
            f"intervals are {fitted.widening:.2g} times as wide, for they rest on {fitted.effective_draws:.0f} draws",
            "one rank count more, or measure.repeats = 3",
        )


def _what_is_sent(asked: Variant) -> Assumption:
    taken = "transfers as a share of compute that grows with the ranks as a ring's does"
    link, trial = asked.model.network.across, asked.trial
    if link.source != "assumed":
        taken += f"; the network ({link.described}) changes nothing while what is sent is unknown"
    if (odds := asked.fitted.told_odds) is not None:
        why = f"steps like the measured ones are {min(odds, 1e6):.2g} times less probable with {trial.train.engine}"
        taken += f"; what was told of it is set aside: {why} and {parameters(trial.model) or 0:,} parameters"
    return Assumption(WHAT_IS_SENT, taken, _how_to_tell_what_is_sent(asked.fitted, trial))


def _how_to_tell_what_is_sent(fitted: FittedSeries, trial: Trial) -> str:
    """All that is missing, in the order in which it is to be said.

    Engine and parameters are set aside where steps look too short for them. Without a batch a rate is taken as of steps
    of one image, which nearly always are, so that the batch comes first.
    """
    missing = [] if trial.train.engine in ENGINES else ["--engine ddp"]
    missing += [] if parameters(trial.model) else ["--parameters 110M, or --model"]
    options = f"say {' and '.join(missing)}" if missing else ""
    if any(point.rate_known and not point.batch_known for point in fitted.points):
        again = "`vitscale import FILE --micro-batch N` with the measured batch of a rank"
    elif fitted.told_odds is not None:
        again = "import again with rates and --micro-batch in one unit (samples or tokens), or a column step_seconds"
    else:
        return options or "a study run by vitscale itself"
    return f"{again}, then {options or 'ask the same'}"


def types_are_known(fitted: FittedSeries) -> bool:
    """Whether all that was measured ran on one type of GPU, by name: only then can further hosts have the same."""
    points = fitted.points
    return all(point.devices for point in points) and len({name for point in points for name in point.devices}) == 1


def _network(asked: Variant, placement: Placement) -> list[Assumption]:
    world, points, network = placement.trial.world, asked.fitted.points, asked.model.network
    assumed = []
    unused = asked.model.messages is None  # transfers are then no messages over a link
    spanned = any(point.nodes > 1 for point in points)
    shared = any(point.trial.world.ranks_per_node > 1 for point in points)
    if world.nodes > 1 and (unused or network.across.source == "assumed") and not spanned:
        measurement = "`vitscale check` on two hosts (--hostfile), or --network NAME"
        measurement = f"{_what_is_sent(asked).measurement}, and --network NAME" if unused else measurement
        assumed.append(Assumption(ACROSS, _taken(network.across, asked), measurement))
    if world.ranks_per_node > 1 and (unused or network.inside.source == "assumed") and not shared:
        assumed.append(
            Assumption(
                INSIDE, _taken(network.inside, asked), "`vitscale check` on one host, or a run on two ranks of it"
            )
        )
    return assumed


def _taken(link: Link, asked: Variant) -> str:
    if asked.model.messages is None:
        return "transfers up to several times those inside a host"
    rate, factor = link.bandwidth_bytes_per_second / 1e9, math.exp(REACH * link.bandwidth_spread)
    return f"about {rate:.2g} GB/s, within a factor of {factor:.2g} either way"
