"""The published study's own configuration: arXiv 2602.21081, Appendix B."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitscale.deepspeed_lint import Setting, lint
from vitscale.engines.deepspeed.config import load

FILE = Path(__file__).parent / "appendix_b.json"


@pytest.mark.parametrize("setting", [Setting(), Setting("vit-b16", 86_567_656, 2), Setting(deepspeed="0.16.9")])
def test_what_is_wrong_with_it_is_found(setting: Setting) -> None:
    found = {(f.kind, f.severity, f.about.key): f for f in lint(load(FILE, next_step="").values, setting)}
    assert set(found) == {
        ("unknown-key", "error", "micro_batch_per_gpu"),
        ("unknown-key", "error", "pin_memory"),
        ("synchronising-breakdown", "warning", "wall_clock_breakdown"),
        ("no-reduced-precision", "warning", "fp16.enabled"),
        ("no-overlap", "warning", "zero_optimization.stage"),
        ("clipping-omitted", "warning", "gradient_clipping"),
        ("synchronising-throughput-timer", "note", "timers.throughput"),
        ("needs-the-program", "note", "pipeline"),
    }
    assert "train_micro_batch_size_per_gpu" in found["unknown-key", "error", "micro_batch_per_gpu"].advice
    clips = found["clipping-omitted", "warning", "gradient_clipping"].message
    assert ("does not clip" in clips) == (setting.deepspeed == "0.16.9")
    assert ("at 1.0" in clips) == (setting.deepspeed is None)
    for finding in found.values():
        assert finding.message
        assert finding.advice
        assert "DeepSpeed" in finding.about.source or "https://" in finding.about.source
