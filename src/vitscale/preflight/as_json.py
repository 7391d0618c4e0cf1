"""A check as JSON: what was measured, what was concluded, and the line for the study."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from vitscale.preflight.speeds import against_others, rank_speeds, rates
from vitscale.preflight.verdict import Verdict
from vitscale.store.check_records import CheckRecord

VERSION = 1
"""Of this form; the record in it has a format of its own."""


def check_json(record: CheckRecord, verdicts: Sequence[Verdict], path: Path) -> str:
    """Everything, the raw values included."""
    speeds = rank_speeds(record)
    content = {
        "version": VERSION,
        "stored": str(path),
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "rank_speeds": list(speeds) if speeds is not None else None,
        "pace_against_others": {str(rank): pace for rank, pace in against_others(rates(record.ranks)).items()},
        "check": record.model_dump(mode="json"),
    }
    return json.dumps(content, indent=1)
