from __future__ import annotations

import io

import pytest
from rich.console import Console

from results_factory import make_trial
from vitscale.runner.progress import StudyProgress, decoding_progress, describe


def begun(terminal: bool) -> tuple[StudyProgress, io.StringIO]:
    out = io.StringIO()
    progress = StudyProgress(Console(file=out, force_terminal=terminal, width=200, _environ={"TERM": "xterm"}))
    progress.expect(2, 0)
    return progress, out


def live_line(progress: StudyProgress) -> str:
    assert progress._live is not None
    return progress._live.tasks[0].description


def test_a_terminal_shows_the_phase_of_start_up_until_the_first_step() -> None:
    progress, _ = begun(terminal=True)
    tell = progress.begin(make_trial("ddp", 2), 0)
    what = live_line(progress).partition(": starting")[0]
    shown = []
    for steps, phase in [(0, ""), (0, "engine"), (0, "compiling fused_adam"), (3, "")]:
        tell(steps, phase)
        shown.append(live_line(progress).removeprefix(what).partition(";")[0])
    assert shown == [": starting", ": starting: engine", ": starting: compiling fused_adam", ": step 3"]


def test_a_trial_is_named_after_its_model_or_its_script() -> None:
    assert describe(make_trial("ddp", 2)) == "vit-ti16 ddp, 2 ranks, batch 8"
    trial = make_trial("script", 2, script="studies/own.py", grad_accum=2)
    unnamed = trial.model_copy(update={"model": trial.model.model_copy(update={"name": None})})
    assert describe(unnamed) == "script own.py, 2 ranks, batch 8 x2"


def test_elsewhere_a_compilation_is_said_at_once_and_once() -> None:
    progress, out = begun(terminal=False)
    tell = progress.begin(make_trial("ddp", 2), 0)
    adam, blocks = "compiling fused_adam, once for all runs", "compiling blocks (torch.compile)"
    for phase in ["imports", "engine", adam, adam, "engine", blocks]:
        tell(0, phase)
    assert out.getvalue().splitlines()[1:] == [
        "  starting: compiling fused_adam, once for all runs",
        "  starting: compiling blocks (torch.compile)",
    ]


def test_decoding_is_shown_on_a_terminal_and_told_every_half_minute_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {}
    for terminal in ("xterm", "dumb", None):
        monkeypatch.setenv("TERM", terminal or "")
        now = iter(range(0, 1000, 20))
        monkeypatch.setattr("vitscale.runner.progress.time.monotonic", lambda now=now: float(next(now)))
        out = io.StringIO()
        with decoding_progress(Console(file=out, force_terminal=terminal is not None, width=200)) as tell:
            for done in (256, 512, 768, 1024, 1280):
                tell(done, 1280)
        said[terminal] = out.getvalue()
    assert "decoding images" in said["xterm"]
    assert "1280/1280" in said["xterm"]
    # Half a minute after the one before: at 40 s; each of the two looks at a clock that then moves on by 20 s.
    plain = ["  decoded 512 of 1,280 images", "  decoded 1,024 of 1,280 images"]
    assert said[None].splitlines() == said["dumb"].splitlines() == plain
