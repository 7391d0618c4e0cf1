"""A study: its file, its sections, and the trials that they expand to."""
