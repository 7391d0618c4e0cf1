"""How FSDP2 shards: all that decides how many bytes it holds of a parameter, and for how long."""

from __future__ import annotations

from typing import NamedTuple

from vitscale.engines.dtypes import communicated_bytes, weight_bytes
from vitscale.trial.trial import Trial


class Sharding(NamedTuple):
    """The way in which a trial's ranks shard and gather; bytes are those of one element."""

    ranks: int
    """Ranks over which the weights are sharded."""
    weight_bytes: int
    """Bytes of a gathered weight, and of a gradient that backward has made."""
    shard_bytes: int
    """Bytes of a weight in a shard, and of a gradient that has been scattered."""
    sent_bytes: int
    """Bytes of a gradient in the buffer out of which it is scattered."""
    has_buffers: bool
    """Whether weights arrive in a flat buffer, out of which they are copied; one rank copies without a buffer."""
    has_gloo: bool
    """Whether gloo exchanges, which works on a copy of its own."""
    stays_gathered: bool
    """Whether blocks stay gathered from forward to their backward."""

    @staticmethod
    def of(trial: Trial) -> Sharding:
        """Return how the ranks of a trial shard and gather."""
        train = trial.train
        ranks = trial.layout.replicas
        return Sharding(
            ranks=ranks,
            weight_bytes=weight_bytes(train),
            shard_bytes=4 if train.master_weights else weight_bytes(train),
            sent_bytes=communicated_bytes(train),
            has_buffers=ranks > 1,
            has_gloo=ranks > 1 and train.device == "cpu",
            stays_gathered=train.reshard_after_forward is False,
        )
