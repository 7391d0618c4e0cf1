"""Prediction: what a trial will take, by arithmetic; records of runs are not needed for it."""

from __future__ import annotations

from vitscale.prediction.memory import MemoryForecast, forecast, forecast_bytes

__all__ = ["MemoryForecast", "forecast", "forecast_bytes"]
