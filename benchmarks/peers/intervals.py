"""One way to give any of the models an interval: their residuals, a parametric bootstrap, and Student's t.

None of the peers comes with an interval. Each gets the same: the model is fitted, the spread s of a run about it is
taken from the residuals of the logarithm with the degrees of freedom left, the model is fitted again to runs drawn from
that (s drawn too, which makes the intervals Student's), and a future run is drawn about each of the fits.

Three or four runs say little of s. Two ways to take it, and tables show both:

- `RESIDUALS`: s² = RSS / max(n - p, 1), with as many degrees of freedom: the text-book.
- `KNOWN`: as if four earlier runs elsewhere had told that a run repeats to 2.5 %. It is what a careful user of the peer
  could know of clusters, and a help: without it one degree of freedom makes an interval of nearly any width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from peers.models import Peer
from peers.runs import Array, Places

DRAWS = 200
CONFIDENCE = 0.90


@dataclass(frozen=True)
class Spread:
    """What is known of the spread of runs beforehand."""

    name: str
    runs: float
    """How many it is worth; 0 nothing is known."""
    share: float
    """Standard deviation over mean."""


RESIDUALS = Spread("residuals", 0.0, 0.0)
KNOWN = Spread("with 2.5 % known", 4.0, 0.025)


@dataclass(frozen=True)
class Told:
    """Epoch seconds of some places; the intervals are 90 %."""

    value: Array
    low: Array
    """Of the mean."""
    high: Array
    future_low: Array
    future_high: Array


def told(peer: Peer, runs: Places, seconds: Array, where: Places, spread: Spread, seed: int = 0) -> Told:
    """What `peer` says of `where` from `runs` that took `seconds` an epoch."""
    random = np.random.default_rng(seed)
    found = peer.fit(runs, seconds[None, :])
    fitted = _positive(peer.ask(found, runs)[0])
    value = peer.ask(found, where)[0]
    residuals = np.log(seconds / fitted)
    used = min(peer.parameters, max(1, int(np.count_nonzero(found))))
    left = max(len(seconds) - used, 0 if spread.runs else 1)
    degrees = spread.runs + left
    scale = np.sqrt((spread.runs * spread.share**2 + np.sum(residuals**2)) / degrees)
    scales = scale * np.sqrt(degrees / random.chisquare(degrees, size=(DRAWS, 1)))
    drawn = fitted * np.exp(scales * random.standard_normal((DRAWS, len(seconds))))
    means = peer.ask(peer.fit(runs, drawn), where)
    futures = means * np.exp(scales * random.standard_normal(means.shape))
    tail = (1 - CONFIDENCE) / 2
    return Told(
        value, *np.quantile(means, [tail, 1 - tail], axis=0), *np.quantile(futures, [tail, 1 - tail], axis=0)
    )  # fmt: skip


def interval_score(low: Array, high: Array, truth: Array) -> Array:
    """Gneiting & Raftery (2007), equation 43, over the truth: width plus 2/alpha of what sticks out. Less is better."""
    alpha = 1 - CONFIDENCE
    below, above = np.maximum(low - truth, 0.0), np.maximum(truth - high, 0.0)
    return np.asarray((high - low + 2 / alpha * (below + above)) / truth)


def _positive(seconds: Array) -> Array:
    return np.maximum(seconds, 1e-9)
