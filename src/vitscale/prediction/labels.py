"""What a prediction rests on: its label, and what had to be assumed for want of a measurement."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vitscale.prediction.evidence import Point
from vitscale.prediction.layouts import Place
from vitscale.prediction.network.links import Link
from vitscale.prediction.parameters import JOB_TO_JOB, OF_UNKNOWN_JOBS
from vitscale.prediction.results import Assumption, Label
from vitscale.prediction.variants import Variant


def label(asked: Variant, place: Place, assumptions: Sequence[Assumption]) -> Label:
    """See `results.Label`."""
    points = asked.fitted.points
    decisive = {_INSIDE, _ACROSS} | ({_HOSTS} if place.trial.world.nodes > 1 else set())
    if asked.guessed or any(one.part in decisive for one in assumptions):
        return "prior-driven"
    measured = [point.gpus for point in points]
    like = place.trial.world.nodes <= max(point.nodes for point in points)
    if min(measured) <= place.gpus <= max(measured) and like and not asked.assumptions:
        return "interpolated"
    return "extrapolated"


_INSIDE, _ACROSS = "network inside a host", "network between hosts"
_HOSTS = "ranks on a host"
"""Where it is assumed, so is which transfers cross hosts."""


def assumptions(asked: Variant, place: Place) -> tuple[Assumption, ...]:
    """What nothing measured says anything about, what matters most first."""
    found = [*_network(asked, place), *asked.assumptions]
    points = asked.fitted.points
    if asked.model.messages is None and place.gpus > 1:
        found.append(
            Assumption(
                "what is sent",
                "transfers as a share of compute that grows with the ranks as a ring's does",
                "a study run by vitscale itself; of an import, name --model and --engine",
            )
        )
    if max(len(point.step_seconds) for point in points) < 2 and len(points) < 3:
        spread = OF_UNKNOWN_JOBS if asked.model.messages is None else JOB_TO_JOB
        found.append(
            Assumption(
                "job-to-job variation",
                f"about {100 * spread:.2g} % from one run to the next",
                "the same study with measure.repeats = 3",
            )
        )
    if asked.fitted.left_out:
        found.append(Assumption("the mixture of devices", f"as measured; {asked.fitted.left_out}", "`vitscale check`"))
    if place.host_size_assumed:
        size = place.trial.world.ranks_per_node
        why = "for none were measured on several" if place.trial.world.nodes > 1 else "more than were measured on one"
        found.append(Assumption(_HOSTS, f"{size}, {why}", "say --nodes-of"))
    return tuple(found)


def _network(asked: Variant, place: Place) -> list[Assumption]:
    world, points, network = place.trial.world, asked.fitted.points, asked.model.network
    found = []
    if world.nodes > 1 and network.across.source == "assumed" and not _spanning(points):
        found.append(
            Assumption(
                _ACROSS, _taken(network.across, asked), "`vitscale check` on two hosts (--hostfile), or --network NAME"
            )
        )
    if world.ranks_per_node > 1 and network.inside.source == "assumed" and not _sharing(points):
        found.append(
            Assumption(
                _INSIDE, _taken(network.inside, asked), "`vitscale check` on one host, or a run on two ranks of it"
            )
        )
    return found


def _spanning(points: Sequence[Point]) -> bool:
    return any(point.nodes > 1 for point in points)


def _sharing(points: Sequence[Point]) -> bool:
    return any(point.trial.world.ranks_per_node > 1 for point in points)


def _taken(link: Link, asked: Variant) -> str:
    if asked.model.messages is None:
        return "transfers up to several times those inside a host"
    rate, factor = link.bandwidth_bytes_per_second / 1e9, math.exp(1.645 * link.bandwidth_spread)
    return f"about {rate:.2g} GB/s, within a factor of {factor:.2g} either way"
