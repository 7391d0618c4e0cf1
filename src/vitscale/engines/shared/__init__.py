"""Pieces that engines share inside a rank: splits and stages of a model, whole tensors, checkpoints."""
