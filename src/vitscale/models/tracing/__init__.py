"""Traces a model on meta tensors: what it computes and what it keeps, without running it.

`trace` makes a model's card (`vitscale.trial.model_card`); `python -m vitscale.models.tracing` does so in a process of
its own, with bounds on memory and time.
"""

from vitscale.models.tracing.errors import TraceError
from vitscale.models.tracing.tracer import trace

__all__ = ["TraceError", "trace"]
