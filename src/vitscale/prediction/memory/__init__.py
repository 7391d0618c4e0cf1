"""How much memory a rank will take, by arithmetic, before anything has run."""

from __future__ import annotations

from vitscale.prediction.memory.forecast import MemoryForecast, forecast, forecast_bytes, unavailable

__all__ = ["MemoryForecast", "forecast", "forecast_bytes", "unavailable"]
