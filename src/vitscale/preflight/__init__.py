"""Preflight: measures the hosts that training is to run on before GPU-hours are spent, and says what to mend."""

from vitscale.preflight.judging import judged, pace_warnings
from vitscale.preflight.running import Where, request, run_check, where

__all__ = ["Where", "judged", "pace_warnings", "request", "run_check", "where"]
