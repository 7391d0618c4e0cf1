"""Whatever JSON object comes in: findings or none, never an exception, and nothing that a terminal would obey."""

from __future__ import annotations

import json
import string
from typing import Any, get_args

from hypothesis import given
from hypothesis import strategies as st

from vitscale.deepspeed_lint import LintTarget, lint, lint_document
from vitscale.deepspeed_lint.view import Release, known_releases
from vitscale.present.data import envelope, finding_fields
from vitscale.present.document import About, Document, Finding, Paragraph, Severity
from vitscale.present.terminal import lines

NAMES = sorted({name for key in Release(None)._fact_by_key for name in key.split(".")})
KEYS = st.sampled_from(NAMES) | st.text(max_size=8) | st.text("[]\\/\x1b\u202e\n.", max_size=6)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 10**4000, 2**63, 1e308, 5e8])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(["auto", "cpu", "nvme", "fp32", "fp16", "AdamW", "Adam", "OneBitAdam", "WarmupLR", "true"])
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=20
)
ZERO = st.dictionaries(st.sampled_from(Release(None).children("zero_optimization")), JSON, max_size=6)
CONFIGS = st.dictionaries(KEYS, JSON, max_size=8) | st.fixed_dictionaries(
    {}, optional=dict.fromkeys(Release(None).children(""), JSON) | {"zero_optimization": ZERO}
)
SETTINGS = st.builds(
    LintTarget,
    parameters=st.none() | st.integers(1, 10**13),
    gpus=st.none() | st.integers(1, 10**6),
    deepspeed=st.none() | st.sampled_from(known_releases()),
    stage=st.none() | st.integers(0, 3),
    settled=st.frozensets(st.sampled_from(NAMES), max_size=3),
)


@given(CONFIGS, SETTINGS)
def test_any_object_gives_findings_or_none(config: dict[str, Any], setting: LintTarget) -> None:
    findings = lint(config, setting)
    for finding in findings:
        assert finding.severity in get_args(Severity)
        assert finding.message
        assert finding.advice
        assert finding.about.source
        assert set(finding.kind) <= set(string.ascii_lowercase + string.digits + "-")
    fields = [finding_fields(finding) for finding in findings]
    assert json.loads(envelope("lint", {"findings": fields}))["findings"] == fields
    document = lint_document("ds.json", findings, setting)
    printed = "\n".join(line.plain for line in lines(document, verbose=True))
    assert all(character.isprintable() or character == "\n" for character in printed)


def test_hostile_keys_are_printed_as_text() -> None:
    keys = ["\x1b[2Jx", "[red]bold[/red]", "\u202eabc", "a" * 5000, "line\nbreak"]
    findings = lint(dict.fromkeys(keys, 1) | {"train_batch_size": "\x1b]0;x\x07" * 500}, LintTarget())
    printed = "\n".join(line.plain for line in lines(lint_document("x", findings, LintTarget()), verbose=True))
    assert "\x1b" not in printed
    assert "\\x1b[2Jx" in printed
    assert "[red]bold[/red]" in printed
    assert "line\\nbreak" in printed
    assert max(len(line) for line in printed.splitlines()) < 900
    assert {finding.about.key for finding in findings} >= set(keys)


def test_very_many_unknown_keys_are_not_all_told() -> None:
    findings = lint({f"key_{n}": 1 for n in range(90_000)}, LintTarget())
    assert len([finding for finding in findings if finding.kind == "unknown-key"]) == 51


def test_lines_keep_to_the_width_but_addresses_stay_whole() -> None:
    address = "https://www.deepspeed.ai/" + "x" * 90
    finding = Finding("a-rule", "note", "word " * 40, "fix " * 40, About(key="key", source=f"see {address}"))
    document = Document("", (Paragraph("word " * 40), finding))
    printed = [line.plain for line in lines(document, 60, verbose=True)]
    assert address in [line.strip() for line in printed]
    assert all(len(line) <= 60 for line in printed if address not in line)
    assert len(printed) > 8
