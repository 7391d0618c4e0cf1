"""Facts of training on one rank, without a wrapper."""

from __future__ import annotations

from vitscale.engines.facts import BLOCK_OPTIONS, ONE_PROCESS, EngineFacts

FACTS = EngineFacts(
    engine="vitscale.engines.plain.wrap:PlainEngine",
    title="plain (no wrapper)",
    label="plain (no wrapper)",
    alone=True,
    options=BLOCK_OPTIONS,
    trains_like=ONE_PROCESS,
    steps_between_exchanges=lambda _: 1,
    messages="vitscale.engines.plain.messages:messages",
    states="vitscale.engines.states:whole_states",
)
