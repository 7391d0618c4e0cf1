"""Preflight: measures the hosts that training is to run on before GPU-hours are spent, and says what to mend."""

from vitscale.preflight.asking import Where, request, where
from vitscale.preflight.judging import judged
from vitscale.preflight.running import run_check
from vitscale.preflight.verdict import Verdict

__all__ = ["Verdict", "Where", "judged", "request", "run_check", "where"]
