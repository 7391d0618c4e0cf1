"""The verb that says what nobody has measured: predict."""

from __future__ import annotations
