"""How FSDP2 shards: all that decides how many bytes it holds of a parameter, and for how long."""

from __future__ import annotations

from typing import NamedTuple

from vitscale.engines.dtypes import communicated_bytes, weight_bytes
from vitscale.trial.trial import Trial


class Sharding(NamedTuple):
    """The way in which a trial's ranks shard and gather; bytes are those of one element."""

    ranks: int
    """Ranks over which the weights are sharded: those of one replica."""
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
    has_shards_on_host: bool
    """Whether shards of weights, gradients and optimizer states lie in the host's memory, away from a GPU."""
    keeps_scattered: bool
    """Whether gloo may still hold its copy of scattered gradients when the next block is gathered. While replicas
    all-reduce the shards, its thread comes to let go of it: so it was in all steps of 4 ranks in 2 replicas."""
    reduced_bytes: int = 0
    """Bytes of a scattered gradient in the buffer that replicas all-reduce, where that is not the gradient itself. The
    buffer stays until the end of backward."""

    @property
    def copied_shard_bytes(self) -> int:
        """Bytes of an element in the copies of a shard that are made before it goes into the buffer, if there is one.

        A shard on the host is copied to the device first; one that is wider than gathered weights is cast.
        """
        if not self.has_buffers:
            return 0
        from_host_bytes = self.shard_bytes if self.has_shards_on_host else 0
        cast_bytes = self.weight_bytes if self.shard_bytes > self.weight_bytes else 0
        return from_host_bytes + cast_bytes

    def scattered_bytes(self, *, accumulates: bool) -> float:
        """Return the bytes that stay on a rank of a gradient that has been scattered in this backward, per element.

        Args:
            accumulates: whether the shards are added to those of earlier micro-steps, which are there already.
        """
        stays_on_device = not (accumulates or self.has_shards_on_host)
        gradient_bytes = self.shard_bytes if stays_on_device else 0
        return (gradient_bytes + self.reduced_bytes) / self.ranks

    @staticmethod
    def of(trial: Trial) -> Sharding:
        """Return how the ranks of a trial shard and gather."""
        train = trial.train
        ranks = trial.layout.sharding_ranks
        shard_bytes = 4 if train.master_weights else weight_bytes(train)
        sent_bytes = communicated_bytes(train)
        has_shards_on_host = train.offload == "parameters" and train.device == "cuda"
        # A gradient that is cast, copied to the host, or added to that of earlier micro-steps, is another tensor than
        # the buffer.
        is_buffer_apart = sent_bytes != shard_bytes or train.grad_accum > 1 or has_shards_on_host
        has_replicas = trial.parallel.replicate > 1
        has_gloo = ranks > 1 and train.device == "cpu"
        return Sharding(
            ranks=ranks,
            weight_bytes=weight_bytes(train),
            shard_bytes=shard_bytes,
            sent_bytes=sent_bytes,
            has_buffers=ranks > 1,
            has_gloo=has_gloo,
            stays_gathered=train.reshard_after_forward is False,
            has_shards_on_host=has_shards_on_host,
            keeps_scattered=has_gloo and not has_replicas,
            reduced_bytes=sent_bytes if has_replicas and is_buffer_apart else 0,
        )
