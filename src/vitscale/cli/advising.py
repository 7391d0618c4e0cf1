"""The verb that says what to rent: advise."""

from __future__ import annotations
