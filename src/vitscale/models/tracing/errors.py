"""The error of a model that cannot be traced."""

from __future__ import annotations

from vitscale.errors import VitscaleError


class TraceError(VitscaleError):
    """A model cannot be counted without running it; the message names the operation that stopped the trace."""
