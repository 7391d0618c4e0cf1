"""vitscale: how the training of vision transformers scales, where the time goes, and what to rent."""

__version__ = "0.1.0"
