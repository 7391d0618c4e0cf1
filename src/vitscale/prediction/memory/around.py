"""What a wrapper holds around the parts of a model: at each part, and between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from vitscale.base.plugins import referred
from vitscale.engines import wrapper_facts
from vitscale.engines.parts import Around, AtMoment, InTurn, Part, PartGathers
from vitscale.engines.states import Parts, RankStates, added
from vitscale.trial.trial import Trial


def around(trial: Trial, holding: RankStates, parts: Sequence[Part], turn: InTurn | None = None) -> Around:
    """What the trial's wrapper holds, in a pipeline's turn or outside one."""
    facts = wrapper_facts(trial.train)
    if facts.around_parts:
        of_engine: Around = referred(facts.around_parts)(trial, holding, parts, turn)
        return of_engine
    gathered: PartGathers | None = referred(facts.part_gathers)(trial, parts) if facts.part_gathers else None
    ends = list(accumulate(part.elements for part in parts))
    full = list(_full_buckets(parts, holding.bucket)) if holding.bucket else []
    first_full = full[0][0] if full else -1
    of_forward, of_backward = gathered or ([{}] * len(parts), [holding.backward] * len(parts))

    def in_backward(number: int, made: int, new: int, *, flushed: int = 0, after: bool) -> Parts:
        return added(of_backward[number], holding.in_backward(made, new, flushed=flushed, after=after))

    return Around(
        forward=[added(holding.held, holding.held_buckets, own) for own in of_forward],
        # The loss's own backward is over before anything of the wrapper begins.
        backward=[
            in_backward(n, ends[-1] - ends[n], max(part.tensors, default=0), after=n < first_full)
            if part.modules or n < len(parts) - 1
            else added(holding.held, holding.held_buckets, of_forward[n])
            for n, part in enumerate(parts)
        ],
        between=[
            AtMoment(n, gone, in_backward(n, 0, new, flushed=flushed, after=index > 0), is_bucket_full=True)
            for index, (n, gone, flushed, new) in enumerate(full)
        ],
        exchange=holding.exchange,
    )


def _full_buckets(parts: Sequence[Part], bucket: int) -> Iterator[tuple[int, float, int, int]]:
    """Every full bucket of a backward, in order.

    Yields:
        The number of the part whose gradient does not fit, the share of its elements whose gradients are made already,
        the elements in the bucket, and the elements of the gradient that does not fit.
    """
    filled = 0
    for number in reversed(range(len(parts))):
        done = 0
        for elements in reversed(parts[number].tensors):
            if filled and filled + elements > bucket:
                yield number, done / parts[number].elements, filled, elements
                filled = 0
            filled += elements
            done += elements
