"""Schedulers: where a launcher's command runs."""
