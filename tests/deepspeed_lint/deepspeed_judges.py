"""Judges configurations by the installed DeepSpeed itself: a JSON list on standard input, one verdict for each on
standard output, with every key that was looked at. Run in a process of its own, for it imports torch."""

from __future__ import annotations

import json
import sys
from typing import Any

from typing_extensions import override


class Watched(dict[str, Any]):
    """A configuration that notes by dotted key what is asked of it."""

    def __init__(self, content: dict[str, Any], seen: set[str], place: str = "") -> None:
        inner = {k: Watched(v, seen, f"{place}{k}.") if isinstance(v, dict) else v for k, v in content.items()}
        super().__init__(inner)
        self.seen, self.place = seen, place

    @override
    def __getitem__(self, key: str) -> Any:
        self.seen.add(self.place + key)
        return super().__getitem__(key)

    @override
    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(self.place + key)
        return super().get(key, default)

    @override
    def __contains__(self, key: object) -> bool:
        self.seen.add(f"{self.place}{key}")
        return super().__contains__(key)

    @override
    def keys(self) -> Any:
        return _Keys(self)

    def __copy__(self) -> Watched:
        return self

    def __deepcopy__(self, memo: object) -> Watched:
        return self


class _Keys:
    """What `keys()` gives: asked with `in`, or gone through when a part is unpacked into a model."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched

    def __contains__(self, key: object) -> bool:
        return key in self.watched

    def __iter__(self) -> Any:
        return iter(self.watched)


def main() -> None:
    """Reads configurations, writes {"refused": error or null, "seen": keys} for each."""
    from deepspeed.runtime.config import DeepSpeedConfig

    verdicts = []
    for config in json.load(sys.stdin):
        seen: set[str] = set()
        refused = None
        try:
            DeepSpeedConfig(Watched(config, seen))
        except Exception as error:
            refused = f"{type(error).__name__}: {error}"
        verdicts.append({"refused": refused, "seen": sorted(seen)})
    sys.stdout.write("\n" + json.dumps(verdicts) + "\n")


if __name__ == "__main__":
    main()
