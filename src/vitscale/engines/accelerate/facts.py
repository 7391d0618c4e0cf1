"""Facts of Accelerate; all others are those of the engine that it stands for."""

from __future__ import annotations

from vitscale.engines.facts import EngineFacts

FACTS = EngineFacts(
    engine="vitscale.engines.accelerate.wrap:AccelerateEngine",
    title="Accelerate",
    packages=("accelerate",),
    stands_for="accelerate_backend",
    defaults={"accelerate_backend": "ddp"},
    replicas_must_shard=True,
    checked=({"accelerate_backend": "ddp"},),
)
