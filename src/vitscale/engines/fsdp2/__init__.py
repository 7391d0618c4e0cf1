"""PyTorch's FSDP2."""
