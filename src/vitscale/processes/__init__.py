"""Processes of a run: how ranks get what they need to know, report that they live, and are ended."""
