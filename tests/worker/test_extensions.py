"""DeepSpeed's own way to torch's compiler, up to the compiler: that would take tens of seconds."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from vitscale.processes.heartbeat import PROGRESS
from vitscale.store import RankLog
from vitscale.worker.extensions import BLOCKS, watched
from vitscale.worker.session import _Laps


class Compiler:
    """Stands in for `torch.utils.cpp_extension._jit_compile`."""

    def __init__(self, writes: bool) -> None:
        self.writes = writes
        self.phases: list[str] = []

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> types.ModuleType:
        self.phases.append(PROGRESS.phase)
        if self.writes:
            library = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / name / f"{name}.so"
            library.write_bytes(b"")
            os.utime(library, ns=(1, len(self.phases) + 1))
        return types.ModuleType(name)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Loads an operator that is nowhere installed; given what compiles it."""
    builder = pytest.importorskip("deepspeed.ops.op_builder.builder")
    from torch.utils import cpp_extension

    class Tiny(builder.OpBuilder):  # type: ignore[name-defined,misc]  # DeepSpeed is untyped
        def __init__(self) -> None:
            super().__init__(name="tiny_adam")

        def absolute_name(self) -> str:
            return "deepspeed.ops.tiny_adam_op"

        def sources(self) -> list[str]:
            return []

        def is_compatible(self, verbose: bool = False) -> bool:
            return True

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "verify_ninja_availability", lambda: None)
    monkeypatch.setattr(builder.OpBuilder, "_loaded_ops", {})
    monkeypatch.setattr(PROGRESS, "phase", "start-up: engine")
    original = builder.OpBuilder.jit_load

    def load_with(compiler: Compiler) -> list[str]:
        monkeypatch.setattr(cpp_extension, "_jit_compile", compiler)
        builder.OpBuilder._loaded_ops.clear()
        with watched() as compiled:
            Tiny().load()
        assert PROGRESS.phase == "start-up: engine"
        assert builder.OpBuilder.jit_load is original
        return compiled

    return load_with


def test_a_compilation_is_told_while_it_lasts_and_named_afterwards(load: Any) -> None:
    first = Compiler(writes=True)
    assert load(first) == ["tiny_adam"]
    assert first.phases == ["compiling tiny_adam, once for all runs"]


def test_what_an_earlier_run_compiled_is_only_loaded(load: Any) -> None:
    load(Compiler(writes=True))
    later = Compiler(writes=False)
    assert load(later) == []
    assert later.phases == ["loading tiny_adam"]


def test_what_is_compiled_anew_over_an_old_library_is_named(load: Any, tmp_path: Path) -> None:
    (tmp_path / "tiny_adam").mkdir()
    (tmp_path / "tiny_adam" / "tiny_adam.so").write_bytes(b"of another version of torch")
    assert load(Compiler(writes=True)) == ["tiny_adam"]


def test_without_deepspeed_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "deepspeed.ops.op_builder.builder", raising=False)
    with watched() as compiled:
        pass
    assert compiled == []


@pytest.mark.parametrize(("not_on_disk", "named"), [(2, [BLOCKS]), (0, [])])
def test_blocks_are_told_of_while_they_are_compiled_and_named_where_they_were_not_on_disk(
    monkeypatch: pytest.MonkeyPatch, not_on_disk: int, named: list[str]
) -> None:
    from torch._dynamo.callback import CallbackTrigger, callback_handler
    from torch._dynamo.utils import counters

    monkeypatch.setattr(PROGRESS, "phase", "forward")
    with watched() as compiled:
        with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):
            assert PROGRESS.phase == f"compiling {BLOCKS}"
            counters["inductor"]["fxgraph_cache_miss"] += not_on_disk
        assert PROGRESS.phase == "forward"
    assert compiled == named
    with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/1"):
        assert PROGRESS.phase == "forward"


def test_the_phase_in_which_it_happened_carries_the_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(PROGRESS, "phase", "start-up")
    log = RankLog(tmp_path, 0)
    laps = _Laps(log, began=0.0)
    told = [PROGRESS.phase]
    for name, compiled in [("imports", []), ("data", []), ("model", []), ("engine", ["fused_adam"])]:
        laps.end(name, compiled)
        told.append(PROGRESS.phase)
    log.close()

    assert told == [f"start-up: {name}" for name in ("imports", "data", "model", "engine", "first step")]
    lines = [json.loads(line) for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
    assert [(line["name"], line["compiled"]) for line in lines] == [
        ("imports", []), ("data", []), ("model", []), ("engine", ["fused_adam"]),
    ]  # fmt: skip
