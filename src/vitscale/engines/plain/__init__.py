"""No engine: one rank, no wrapper, no process group."""
