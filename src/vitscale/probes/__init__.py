"""Probes: each measures one quantity around steps."""
