"""What a profiler recorded, as plain values: its events, and the timeline of each step made of them. No torch."""
