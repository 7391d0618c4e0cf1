"""A few optimizer steps more, after all that is measured, of which nothing but their collectives is recorded.

So no step of the run carries the counting, be it ever so short and without any warm-up, and what is counted is the
engine in the state it trains in, past all that it does once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from vitscale.datasets import Batches
from vitscale.probes.traffic import NO_GROUP, TrafficCounter
from vitscale.store.records import TrafficLine
from vitscale.worker.passes import Passes

FIRST_USUAL_STEP = 3
"""Of the process. DDP lays out its buckets anew in the second step, with a static graph in the third; ZeRO-3 learns in
the first in which order weights are needed."""
COUNTED_STEPS = 2
"""Each must send the same."""


def counted_traffic(
    passes: Passes, take_step: Callable[[int, Batches], None], done: int, epoch: int, alive: Callable[[], None]
) -> list[TrafficLine]:
    """What each of the counted steps sends. All ranks take them together.

    Args:
        passes: this rank's way through the images.
        take_step: trains one optimizer step on the next batches of an epoch.
        done: steps taken before.
        epoch: the first whose order of images has not been used.
        alive: called after each step.
    """
    counter = TrafficCounter()
    if counter.backend == NO_GROUP:
        return [TrafficLine(step=done, backend=NO_GROUP, collectives=())]
    first = max(done, FIRST_USUAL_STEP)
    step = done
    while step < first + COUNTED_STEPS:
        order = passes.order(epoch)
        with passes.batches(order) as batches:
            for _ in range(min(order.steps, first + COUNTED_STEPS - step)):
                with counter.step(step) if step >= first else nullcontext():
                    take_step(epoch, batches)
                alive()
                step += 1
        epoch += 1
    return counter.lines()
