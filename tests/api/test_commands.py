"""Commands alone need no model counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from driving import TINY_MODEL
from vitscale.api import planning
from vitscale.runner import planning as runner_planning


def test_commands_start_no_tracer_unless_memory_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def find_cards(*given: object) -> tuple[()]:
        calls.append(given)
        return ()

    monkeypatch.setattr(runner_planning, "find_cards", find_cards)
    study = tmp_path / "study.toml"
    study.write_text(
        f'name = "commands"\n{TINY_MODEL}\n[data]\nname = "digits"\n[train]\nmicro_batch = 8\nepochs = 1\n'
        'device = "cpu"\n[scaling]\ngpus = [1]\n'
    )
    assert "vitscale.worker" in planning.commands(study)
    assert calls == []
    planning.commands(study, skip_unfit=True)
    assert len(calls) == 1
