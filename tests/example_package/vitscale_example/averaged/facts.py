"""What the engine answers about itself; torch is not imported here."""

from __future__ import annotations

from vitscale.engines.facts import BLOCK_OPTIONS, EngineFacts

EVERY = 4
"""Optimizer steps from one average to the next."""

FACTS = EngineFacts(
    engine="vitscale_example.averaged.wrap:AveragedEngine",
    title="averaged parameters",
    packages=("vitscale-example",),
    options=BLOCK_OPTIONS,
    # Not like one process: the ranks' weights differ between two averages.
    trains_like=f"parameters averaged every {EVERY} steps",
    steps_between_exchanges=lambda _: EVERY,
    messages="vitscale_example.averaged.messages:messages",
)
