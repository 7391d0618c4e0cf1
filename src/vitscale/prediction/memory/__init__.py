"""How much memory a rank will take, by arithmetic, before anything has run."""
