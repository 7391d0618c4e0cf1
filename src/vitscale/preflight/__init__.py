"""Preflight: measures the hosts for a training before GPU-hours are spent, and says what to mend."""

from vitscale.preflight.judging import judged, pace_warnings
from vitscale.preflight.running import CheckTarget, check_target, request, run_check

__all__ = ["CheckTarget", "check_target", "judged", "pace_warnings", "request", "run_check"]
