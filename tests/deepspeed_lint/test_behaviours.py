"""Behaviour that depends on the release, as DeepSpeed's history has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lint_examples import B16, QUIET, zero
from vitscale.deepspeed_lint import LintTarget, lint
from vitscale.deepspeed_lint.behaviours import BEHAVIOURS

PAGE = Path(__file__).parents[2] / "docs/lint.md"
KEY = "zero_optimization.overlap_comm"
STAGE_2 = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e7},
}


def of_overlap(config: dict[str, Any], version: str, **setting: Any) -> set[str]:
    findings = lint(config, LintTarget(deepspeed=version, **setting))
    return {found.kind for found in findings if found.about.key == KEY}


@pytest.mark.parametrize(
    ("version", "kinds"),
    [
        ("0.12.6", {"overlap-spoils-gradients"}),
        ("0.14.2", {"overlap-spoils-gradients"}),
        ("0.14.3", set()),
        ("0.17.1", set()),
        ("0.17.2", {"overlap-spoils-gradients"}),
        ("0.17.4", {"overlap-spoils-gradients"}),
        ("0.17.5", {"no-overlap"}),
        ("0.18.2", {"no-overlap"}),
        ("0.18.4", {"no-overlap"}),
        ("0.18.5", {"overlap-spoils-gradients"}),
        ("0.18.9", {"overlap-spoils-gradients"}),
        ("0.19.0", set()),
        ("0.19.8", set()),
    ],
)
def test_overlap_comm_does_what_the_release_does(version: str, kinds: set[str]) -> None:
    """Stage 2: #5606 is in 0.14.3, #6993 in 0.17.2, #7371 in 0.17.5, #7805 in 0.18.5, #7965 in 0.19.0."""
    assert of_overlap(STAGE_2, version) == kinds


def test_it_is_said_only_where_gradients_are_sent_so() -> None:
    assert of_overlap(STAGE_2, "0.18.2", gpus=1) == set()
    assert of_overlap(QUIET | zero(stage=3), "0.18.2") == set()
    assert of_overlap(QUIET | zero(stage=2, contiguous_gradients=False), "0.18.2") == set()
    assert of_overlap(QUIET | zero(stage=1), "0.18.2") == {"no-overlap"}
    (found,) = [found for found in lint(STAGE_2, LintTarget(deepspeed="0.18.2")) if found.about.key == KEY]
    assert "DeepSpeed 0.18.2 lets backward wait" in found.message
    assert "(from 0.17.5 to 0.18.4)" in found.message
    assert "0.19.0 or later" in found.advice
    assert "/pull/7371" in found.about.source


def test_a_release_that_the_table_of_keys_lacks_is_named_with_the_one_that_lends_its_keys() -> None:
    assert LintTarget(deepspeed="0.18.2").described().startswith("DeepSpeed '0.18.2' by the keys of 0.18.9; ")
    assert LintTarget(deepspeed="0.19.8").described().startswith("DeepSpeed 0.19.8; ")


def test_stage_1_overlaps_since_0_13_0() -> None:
    """#4887 is in 0.13.0; the releases before reset overlap_comm at stage 1."""
    (found,) = [found for found in lint(QUIET, LintTarget(deepspeed="0.12.6")) if found.about.key == KEY]
    assert (found.kind, found.severity) == ("no-overlap", "warning")
    assert "ignores overlap_comm at stage 1, as all releases until 0.12.6" in found.message
    assert of_overlap(QUIET, "0.13.0") == {"overlap-spoils-gradients"}  # until 0.14.2
    assert of_overlap(QUIET, "0.15.0") == set()


@pytest.mark.parametrize(("version", "refused"), [("0.19.2", False), ("0.19.3", True), ("0.19.8", True)])
@pytest.mark.parametrize("steps", [0, -1, 1.5, 10, "auto"])
def test_steps_of_warm_up_are_checked_since_0_19_3(version: str, refused: bool, steps: Any) -> None:
    """54ebdec61 (#8126); transformers 5.23 fills in at least 1 for this reason."""
    params = {"warmup_num_steps": steps}
    found = lint(QUIET | {"scheduler": {"type": "WarmupLR", "params": params}}, LintTarget(deepspeed=version))
    keys = {finding.about.key for finding in found if finding.kind == "refused-value"}
    assert keys == ({"scheduler.params.warmup_num_steps"} if refused and steps in (0, -1, 1.5) else set())


def test_autocast_counts_only_in_releases_that_read_it() -> None:
    """Before 0.17 the key is ignored, so that all runs in fp32."""
    kinds = {found.kind for found in lint(QUIET, LintTarget(deepspeed="0.16.9", parameters=B16))}
    assert "no-reduced-precision" in kinds
    assert "no-reduced-precision" not in {found.kind for found in lint(QUIET, LintTarget(parameters=B16))}


def test_the_page_lists_every_behaviour() -> None:
    page = PAGE.read_text()
    rows = [f"| {behaviour.releases()} | {behaviour.effect} | {behaviour.source} |" for behaviour in BEHAVIOURS]
    assert [row for row in rows if row not in page] == []
