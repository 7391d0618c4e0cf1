"""DeepSpeed, with ZeRO."""
