"""What a profiler recorded, as plain values: its events, and the timeline of each step made from them. No torch."""
