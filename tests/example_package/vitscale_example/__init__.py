"""One thing of every kind."""
