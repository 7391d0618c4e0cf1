"""Hugging Face Accelerate, which stands for another engine."""
