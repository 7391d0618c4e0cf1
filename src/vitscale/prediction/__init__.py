"""Prediction: what nobody has measured, from what somebody has; and memory, by arithmetic alone.

Pure: an analysis and checks in, predictions out. No I/O, no charts, no torch.

evidence      what a results folder says for a prediction: series of points, and the network
results       what a prediction is: figures with two intervals each, a label, and what was assumed
network/      links and what collectives cost on them
step/         what an engine sends in a step, what of it compute hides, stragglers
memory/       how much memory a rank will take
fitting       each part fitted from what measured it; what nothing measured stays at its prior
predicting    from the fitted parts to any rank count
"""

from __future__ import annotations

from vitscale.prediction.memory import MemoryForecast, forecast, forecast_bytes

__all__ = ["MemoryForecast", "forecast", "forecast_bytes"]
