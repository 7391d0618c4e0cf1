"""Processes of a run: how ranks are told what to do, say that they live, and are ended."""
