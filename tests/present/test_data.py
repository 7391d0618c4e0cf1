from __future__ import annotations

import json
import math

import pytest

from vitscale.present.data import envelope, estimate_fields, finding_fields
from vitscale.present.document import About, Finding, most_severe_first
from vitscale.present.estimate import Estimate


def test_the_envelope_names_the_verb_and_its_version() -> None:
    told = json.loads(envelope("lint", {"findings": [], "worst": math.inf, "nested": {"x": (math.nan, 1.0)}}))
    assert list(told)[:2] == ["vitscale", "version"]
    assert told["vitscale"] == "lint"
    assert isinstance(told["version"], int)
    assert told["worst"] is None
    assert told["nested"] == {"x": [None, 1.0]}


def test_content_cannot_take_the_envelopes_fields() -> None:
    with pytest.raises(ValueError, match="version"):
        envelope("plan", {"version": 3})


def test_a_finding_and_an_estimate_have_one_form() -> None:
    finding = Finding("slow-rank", "warning", "m", "a", About(ranks=(3,), key="k"))
    assert finding_fields(finding) == {
        "kind": "slow-rank", "severity": "warning", "message": "m", "advice": "a", "trials": [], "ranks": [3],
        "hosts": [], "key": "k", "line": None, "source": None,
    }  # fmt: skip
    assert estimate_fields("cost", Estimate(1.0, 0.5, math.inf)) == {"cost": 1.0, "cost_low": 0.5, "cost_high": None}
    assert estimate_fields("cost", None) == {"cost": None, "cost_low": None, "cost_high": None}


def test_the_most_severe_come_first_and_keep_their_order() -> None:
    kinds = [("a", "note"), ("b", "error"), ("c", "warning"), ("d", "error")]
    found = most_severe_first([Finding(kind, severity, "", "") for kind, severity in kinds])  # type: ignore[arg-type]  # any text for a severity
    assert [finding.kind for finding in found] == ["b", "d", "c", "a"]
