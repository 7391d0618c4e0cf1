"""The JSON of every verb: one envelope, which names the verb and the version of its form, around the content.

`docs/json.md` has every field, and `docs/report.md` those of a trial. A version grows when a field is renamed, removed
or means something else, not when one is added.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from vitscale.base import program
from vitscale.present.document import Finding
from vitscale.present.estimate import Estimate

VERSIONS: Mapping[str, int] = MappingProxyType(
    {
        "run": 8,
        "train": 8,
        "report": 8,
        "plan": 3,
        "check": 1,
        "predict": 1,
        "advise": 3,
        "explain": 1,
        "lint": 2,
        "import": 1,
        "compare": 1,
        "export": 1,
        "watch": 1,
        "lab": 1,
        "like": 3,
    }
)
"""Version of each verb's content. (The results folder has a format of its own: `store.records.FORMAT`.)"""


def envelope(verb: str, content: Mapping[str, Any]) -> str:
    """Return the JSON text `{"vitscale": verb, "version": n, "program": "0.1.0+3fa9c1d2e4b5", ...content}`.

    `program` is the version of vitscale that wrote it (`base.program`). Numbers that JSON cannot express, NaN and
    infinity, become null.

    Raises:
        ValueError: the content has a field of the envelope's own.
    """
    head = {"vitscale": verb, "version": VERSIONS[verb], "program": program.identity()}
    conflicts = head.keys() & content.keys()
    if conflicts:
        raise ValueError(f"fields of the envelope in the content of {verb}: {', '.join(sorted(conflicts))}")
    fields = {**head, **content}
    try:
        text = json.dumps(fields, allow_nan=False)
    except ValueError:  # NaN or infinity is somewhere in it: they are replaced only then, for that takes time
        text = json.dumps(nonfinite_as_null(fields), allow_nan=False)
    # json.dumps would indent in Python, ten times as slowly.
    return msgspec.json.format(text, indent=1) + "\n"


def dotted(content: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """Return nested objects as one flat object with dotted keys.

    Example: {"train": {"engine": "ddp"}} gives {"train.engine": "ddp"}.

    Args:
        content: the nested objects.
        within: a prefix of all keys: "train." for the object under the key "train".
    """
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping):
            flat |= dotted(value, f"{within}{key}.")
        else:
            flat[f"{within}{key}"] = value
    return flat


def nonfinite_as_null(value: Any) -> Any:
    """Return a copy of `value` with None in place of NaN and infinity, at any depth.

    Keys become text and tuples become lists, as in JSON.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): nonfinite_as_null(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [nonfinite_as_null(item) for item in value]
    return value


def finding_fields(finding: Finding) -> dict[str, Any]:
    """Return the fields of a finding in the JSON of every verb."""
    about = finding.about
    return {
        "kind": finding.kind,
        "severity": finding.severity,
        "message": finding.message,
        "advice": finding.advice,
        "trials": list(about.trials),
        "ranks": list(about.ranks),
        "hosts": list(about.hosts),
        "key": about.key or None,
        "line": about.line,
        "source": about.source or None,
    }


def attributes(of: object | None, *names: str, prefix: str = "") -> dict[str, Any]:
    """Return the attributes of an object as fields of JSON, each under `prefix` and its name.

    An empty text becomes None. Without an object (`of` is None) all are None.
    """
    fields: dict[str, Any] = {}
    for name in names:
        value = None if of is None else getattr(of, name)
        fields[f"{prefix}{name}"] = None if value == "" else value
    return fields


def estimates(of: object | None, *names: str) -> dict[str, float | None]:
    """Return the fields of several estimates of an object (`estimate_fields`); all None without an object."""
    fields: dict[str, float | None] = {}
    for name in names:
        fields |= estimate_fields(name, None if of is None else getattr(of, name))
    return fields


def estimate_fields(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    """Return the fields `name`, `name_low` and `name_high` of an estimate; None where a number is unavailable."""
    if estimate is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {
        name: nonfinite_as_null(estimate.value),
        f"{name}_low": nonfinite_as_null(estimate.low),
        f"{name}_high": nonfinite_as_null(estimate.high),
    }
