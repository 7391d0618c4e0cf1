"""Explained steps as a trace for Perfetto and chrome://tracing, by the fields of its format; and read back the same."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explained_factory import batch_study, run_of
from results_factory import make_curve, make_results, make_trial
from vitscale.analysis import analyse
from vitscale.analysis.time.breakdown import Straggler, breakdown
from vitscale.analysis.time.exposure import clocks_ahead
from vitscale.errors import RequestError, StoreError
from vitscale.importers.contents import ImportOptions
from vitscale.importers.importing import import_logs
from vitscale.pages.outputs import Reported, write
from vitscale.profiles.step_trace import RankStep, is_step_trace, read_step_trace, step_trace
from vitscale.store import load
from vitscale.store.records import ExplainedLine
from vitscale.store.results import Run

US = 1e6
"""Microseconds of a second: n / US is the float nearest to n of them."""
ABOUT = {"gpus": 2, "nodes": 1, "device": "cuda", "steps_known": True}


def line(step: int = 4, **changes: Any) -> ExplainedLine:
    """30 us of forward, then an all-reduce from 40 to 90 in which the device idles, and another beside it."""
    fields: dict[str, Any] = {
        "step": step, "block": 1, "device": "cuda", "seconds": 100 / US,
        "phases": (("forward", 0.0, 30 / US), ("optimizer", 90 / US, 100 / US)),
        "idle": ((40 / US, 90 / US),),
        "collectives": (("nccl-0", "all_reduce", 40 / US, 90 / US), ("nccl-1", "all_gather", 60 / US, 95 / US)),
        "norms": (1,), "copies": ((1 / US, 2 / US),), "host_data": ((95 / US, 97 / US),), "unknown": {"norm": "no"},
    }  # fmt: skip
    return ExplainedLine(**fields | changes)


def events_of(text: bytes) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def test_what_is_written_is_of_the_format_and_its_times_are_on_one_clock() -> None:
    early = line(
        seconds=130 / US, idle=((40 / US, 120 / US),), collectives=(("nccl-0", "all_reduce", 40 / US, 120 / US),)
    )
    late = line(collectives=(("nccl-0", "all_reduce", 40 / US, 90 / US),))
    ahead = clocks_ahead([early, late])
    assert ahead == pytest.approx([0.0, -30 / US])
    waits = ({"wait": [(40 / US, 70 / US)], "wire": [(70 / US, 120 / US)]}, {"wire": [(40 / US, 90 / US)]})
    ranks = [RankStep(rank, own, waits[rank], ahead[rank]) for rank, own in enumerate((early, late))]
    events = events_of(step_trace(ABOUT, [ranks, ranks]))
    drawn = [event for event in events if event["ph"] == "X"]
    for event in drawn:
        assert {"name", "cat", "ph", "pid", "tid", "ts", "dur"} <= event.keys()
        assert event["ts"] >= 0 <= event["dur"]
    by_track: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in drawn:
        by_track[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_track.values():
        assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(sorted(spans)))
    of_rank = {tid: {pid for pid, own in by_track if own == tid} for _, tid in by_track}
    assert all(len(ranks) == 1 for ranks in of_rank.values())
    assert not {0, *(pid for pid, _ in by_track)} & of_rank.keys()
    ends = {e["pid"]: e["ts"] + e["dur"] for e in drawn[: len(drawn) // 2] if e["cat"] == "collective"}
    assert ends[0] == pytest.approx(ends[1], abs=1e-3)
    wait, *_ = (event for event in drawn if event["name"] == "wait")
    assert (wait["pid"], wait["dur"], wait["cname"]) == (0, 30, "terrible")
    assert all(event["cname"] == "bad" for event in drawn if event["name"] == "wire")
    named = {(e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert named == {(0, "rank 0"), (1, "rank 1")}
    assert {e["name"] for e in events if e["ph"] == "M"} == {
        "process_name", "process_sort_index", "thread_name", "thread_sort_index",
    }  # fmt: skip


MOMENTS = st.integers(0, 10_000).map(lambda tenths: tenths / 1e7)
SPANS = st.lists(st.tuples(MOMENTS, MOMENTS).map(lambda pair: (min(pair), max(pair))), max_size=6).map(tuple)
LINES = st.builds(
    lambda spans, idle, device, seconds: line(
        device=device,
        seconds=seconds,
        idle=idle,
        collectives=tuple(("gloo", "all_reduce", *span) for span in sorted(spans)),
        norms=tuple(range(len(spans)))[::2],
    ),
    SPANS, SPANS, st.sampled_from(["cpu", "cuda"]), st.integers(10_000, 20_000).map(lambda tenths: tenths / 1e7),
)  # fmt: skip


@given(st.lists(st.tuples(LINES, LINES), min_size=1, max_size=3))
@settings(deadline=None, max_examples=25)
def test_reading_back_gives_the_records(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[ExplainedLine, ...]]
) -> None:
    numbered = [[own.model_copy(update={"step": number}) for own in ranks] for number, ranks in enumerate(steps)]
    path = tmp_path_factory.mktemp("trace") / "t.json.gz"
    written = ([RankStep(rank, own, {}, 3e-5 * rank) for rank, own in enumerate(ranks)] for ranks in numbered)
    path.write_bytes(gzip.compress(step_trace(ABOUT, written)))
    assert is_step_trace(path)
    about, ranks = read_step_trace(path)
    assert about == {"form": 1, **ABOUT}
    assert ranks == {rank: [of_step[rank] for of_step in numbered] for rank in (0, 1)}


def test_a_stretch_of_unknown_phases_is_not_drawn_as_forward(tmp_path: Path) -> None:
    """One phase stands for all three; a kernel that was lost in forward leaves the phase known."""
    untold = dict.fromkeys(("forward", "backward", "optimizer"), "a graph")
    for unknown, drawn in ((untold, ["unknown", "unknown"]), ({"forward": "lost"}, ["forward", "optimizer"])):
        own = line(unknown=unknown)
        path = tmp_path / "t.json"
        path.write_bytes(step_trace(ABOUT, [[RankStep(0, own, {}, 0.0)]]))
        assert [event["name"] for event in events_of(path.read_bytes()) if event.get("cat") == "phase"] == drawn
        assert read_step_trace(path)[1] == {0: [own]}


def test_ranks_without_an_explained_step_are_not_in_a_trace(tmp_path: Path) -> None:
    """A script's own traces may be of some ranks."""
    trial = make_trial("script", 3, script="train.py", micro_batch=16)
    run = run_of(trial)
    ranks = [rank.model_copy(update={"steps": (), "explained": rank.explained[:1]}) for rank in run.ranks]
    ranks[1] = ranks[1].model_copy(update={"explained": ()})
    results = make_results([(make_curve([trial]), [trial])], [run.model_copy(update={"ranks": tuple(ranks)})])
    (path,) = exported(results, tmp_path / "out")
    assert list(read_step_trace(path)[1]) == [0, 2]


def exported(results: Any, folder: Path) -> list[Path]:
    return write(Reported(analyse(results)), folder, ["trace"], folder)


def parts_of(run: Run) -> list[tuple[int, dict[str, Any]]]:
    found = breakdown(run)
    assert found is not None
    return [
        (rank.rank, {name: pytest.approx(value, abs=1e-8) for name, value in rank.parts.items()})
        for rank in found.ranks
    ]


@pytest.mark.parametrize("told_apart", [True, False])
def test_a_study_written_as_traces_and_imported_has_the_same_breakdown(tmp_path: Path, told_apart: bool) -> None:
    results = batch_study(batches=(16,), gpus=(1, 4), told_apart=told_apart)
    paths = exported(results, tmp_path / "out")
    assert len(paths) == 2
    import_logs(paths, "trace", ImportOptions(), tmp_path / "results")
    back = {run.header.trial.world.size: run for run in load(tmp_path / "results").runs}
    for run in results.runs:
        again = back[run.header.trial.world.size]
        assert parts_of(again) == parts_of(run)
        assert again.header.trial.train.micro_batch == 16
        assert again.header.trial.train.device == run.header.trial.train.device
    stragglers = [straggler_of(some, 4) for some in (results.runs, back.values())]
    assert stragglers[0] == stragglers[1]
    assert [named and named.rank for named in stragglers] == [3 if told_apart else None] * 2


def straggler_of(runs: Iterable[Run], ranks: int) -> Straggler | None:
    found = breakdown(next(run for run in runs if len(run.ranks) == ranks))
    assert found is not None
    return found.straggler


def test_results_that_explained_nothing_are_a_message(tmp_path: Path) -> None:
    results = batch_study(batches=(16,), gpus=(1,))
    bare = [
        run.model_copy(update={"ranks": tuple(r.model_copy(update={"explained": ()}) for r in run.ranks)})
        for run in results.runs
    ]
    with pytest.raises(RequestError, match=r"explained a step.*measure\.explain = true"):
        exported(results.model_copy(update={"runs": tuple(bare)}), tmp_path / "out")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda whole: whole["vitscale"].update(form=7), "another form"),
        (lambda whole: whole["vitscale"].update(gpus="many"), "does not say of what ranks"),
        (lambda whole: whole["vitscale"].update(gpus=1), "does not say of what ranks"),
        (lambda whole: whole.update(traceEvents=[]), "does not say of what ranks"),
        (lambda whole: [event.pop("args", None) for event in whole["traceEvents"]], "holds a step that cannot be"),
        (lambda whole: [event.update(name="step x") for event in whole["traceEvents"]], "holds a step that cannot be"),
        (lambda whole: [e.update(name="lunch") for e in whole["traceEvents"] if e.get("cat") == "phase"], "cannot be"),
    ],
)  # fmt: skip
def test_a_spoilt_file_is_one_message(tmp_path: Path, spoil: Any, said: str) -> None:
    whole = json.loads(step_trace(ABOUT, [[RankStep(rank, line(), {}, 0.0) for rank in (0, 1)]]))
    spoil(whole)
    path = tmp_path / "spoilt.json"
    path.write_text(json.dumps(whole, separators=(",", ":")))
    with pytest.raises(StoreError, match=said):
        import_logs([path], "trace", ImportOptions(), tmp_path / "results")


def test_perfetto_finds_every_event(tmp_path: Path) -> None:
    """Where its trace processor is at hand (get.perfetto.dev/trace_processor)."""
    program = shutil.which("trace_processor_shell") or shutil.which("trace_processor")
    if program is None:
        pytest.skip("not installed: trace_processor_shell (perfetto.dev)")
    text = step_trace(ABOUT, [[RankStep(rank, line(), {"wait": [(0.0, 1 / US)]}, 0.0) for rank in (0, 1)]])
    (tmp_path / "trace.json").write_bytes(text)
    (tmp_path / "query.sql").write_text("select name, dur from slice;")
    done = subprocess.run(
        [program, "-q", str(tmp_path / "query.sql"), str(tmp_path / "trace.json")],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = list(csv.reader(done.stdout.splitlines()))[1:]
    expected = [(e["name"], str(round(e["dur"] * 1000))) for e in events_of(text) if e["ph"] == "X"]
    assert sorted((name, lasts) for name, lasts in rows) == sorted(expected)
