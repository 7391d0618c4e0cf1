"""Megatron-Core's data and tensor parallelism."""
