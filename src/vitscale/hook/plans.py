"""Reads the driver's settings and its plan."""

from __future__ import annotations

import json
import os

from .lines import PLAN_FILE, SETTINGS_FILE, HookPlan, HookSettings


def read_settings(folder: str) -> HookSettings:
    """Settings beside the hook.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged.
    """
    with open(os.path.join(folder, SETTINGS_FILE), encoding="utf-8") as file:
        return HookSettings.from_dict(json.load(file))


class PlanReader:
    """The plan as it stands; its file is read again only when it was replaced."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, PLAN_FILE)
        self._modified_ns = 0
        self._plan = HookPlan()

    def read(self) -> HookPlan:
        """The current plan; without a file, or with a damaged one, the plan before it."""
        try:
            modified_ns = os.stat(self._path).st_mtime_ns
            if modified_ns != self._modified_ns:
                self._modified_ns = modified_ns
                with open(self._path, encoding="utf-8") as file:
                    self._plan = HookPlan.from_dict(json.load(file))
        except (OSError, ValueError):
            return self._plan
        return self._plan
