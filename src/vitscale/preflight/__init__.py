"""Preflight: measures the hosts that training is to run on before GPU-hours are spent, and says what to mend."""

from vitscale.preflight.asking import Where, request, where
from vitscale.preflight.judging import judged, pace_warnings
from vitscale.preflight.running import run_check

__all__ = ["Where", "judged", "pace_warnings", "request", "run_check", "where"]
