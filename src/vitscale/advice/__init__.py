"""Advice: what to rent, from what is predicted."""
