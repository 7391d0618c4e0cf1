"""A trial: model, data and training of one measurement, and what follows from them by arithmetic."""
