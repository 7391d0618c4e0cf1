"""Prediction: what nobody has measured, from what somebody has; and memory, by arithmetic alone.

Pure but for `sources`: an analysis and checks in, predictions out. No charts, no torch.

sources       what a prediction reads: a results folder, and a check of its network
evidence      what an analysis says for a prediction: series of measured points, and the network
network/      links, by name or as checked, and what collectives cost on them
step/         what an engine sends in a step, what of it computing hides, stragglers; a step as a sum of parts
parameters    what is estimated, and what is known of it beforehand
fitting       each part fitted from what measured it; what nothing measured stays at its prior
layouts       where ranks lie, and what their batches are
variants      a measured series with something changed
predicting    from the fitted parts to any rank count
candidates    thousands of configurations at once
labels        what an answer rests on, and what was assumed
scoring       how well predictions did where larger counts were measured too
answering     questions answered, and the outlook of a report
failures      hosts that fail, and checkpoints: from time of work to time to finish
results       what a prediction is: figures with two intervals each, a label, and what was assumed
memory/       how much memory a rank will take
"""

from __future__ import annotations

from vitscale.prediction.memory import MemoryForecast, forecast, forecast_bytes, unavailable

__all__ = ["MemoryForecast", "forecast", "forecast_bytes", "unavailable"]
