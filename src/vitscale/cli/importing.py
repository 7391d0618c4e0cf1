"""The verb that brings in results of others: import."""

from __future__ import annotations
