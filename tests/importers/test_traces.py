"""Traces as results: files of a job are its ranks, waits that are known come out, and what cannot be told is said."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kineto_traces import A100, ALEXNET, MI300X, V100, trace_path
from vitscale.analysis import analyse
from vitscale.analysis.time.breakdown import breakdown
from vitscale.cli import app
from vitscale.errors import RequestError
from vitscale.importers.contents import ImportOptions
from vitscale.importers.importing import import_logs
from vitscale.pages.contract import trial_rows
from vitscale.pages.imported import straggler_sentences
from vitscale.store import load

LATE_US = 500
"""By so much a rank that was made late comes to each collective that takes longer than twice that."""


def job_of(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(gzip.decompress(trace_path(name).read_bytes()))
    return content


def late_rank(job: dict[str, Any], rank: int) -> tuple[dict[str, Any], dict[int, float]]:
    """Another rank of the same job, whose clock is 77 s off, and which comes late; seconds by step in collectives."""
    steps = sorted((e["ts"], e["name"]) for e in job["traceEvents"] if e["name"].startswith("ProfilerStep"))
    late: dict[int, float] = {}
    events = []
    for event in job["traceEvents"]:
        moved = {**event, "ts": event["ts"] + 77e6}
        if event.get("cat") == "kernel" and event["name"].startswith("nccl") and event["dur"] > 2 * LATE_US:
            moved |= {"ts": moved["ts"] + LATE_US, "dur": event["dur"] - LATE_US}
            number = int([name for start, name in steps if start < event["ts"]][-1].partition("#")[2])
            late[number] = late.get(number, 0.0) + LATE_US / 1e6
        events.append(moved)
    return {**job, "traceEvents": events, "distributedInfo": {**job["distributedInfo"], "rank": rank}}, late


def write(folder: Path, name: str, content: dict[str, Any]) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(json.dumps(content).encode(), 1))
    return path


CASES = Path(os.environ.get("VITSCALE_CASES", Path(__file__).resolve().parents[3] / "shared" / "cases"))


def test_a_trace_of_one_step_and_an_empty_mark_has_one_step(tmp_path: Path) -> None:
    """Of Holistic Trace Analysis: a step of 9.3 ms, 49 us after which the profiler ended."""
    path = CASES / "hta-amd_trace.json.gz"
    if not path.exists():
        pytest.skip(f"needs the trace {path} (VITSCALE_CASES names another folder)")
    import_logs([path], "trace", ImportOptions(), tmp_path / "results")
    (run,) = load(tmp_path / "results").runs
    assert [step.seconds for step in run.ranks[0].steps] == pytest.approx([9.3e-3], rel=0.01)


def test_a_known_wait_between_two_ranks_comes_out_though_their_clocks_differ(tmp_path: Path) -> None:
    job = job_of(A100)
    second, late = late_rank(job, 1)
    paths = [write(tmp_path, "a.json.gz", job), write(tmp_path, "b.json.gz", second)]
    import_logs(paths, "trace", ImportOptions(), tmp_path / "results")
    (run,) = load(tmp_path / "results").runs
    found = breakdown(run)
    assert found is not None
    early, behind = found.ranks
    assert (early.rank, behind.rank, found.steps, found.wait_known) == (0, 1, 2, True)
    assert sum(late.values()) > 0.005
    expected = sum(late[step] for step in (5, 6)) / 2
    assert early.parts["wait"] == pytest.approx(expected, rel=0.1)
    assert behind.parts["wait"] == pytest.approx(0, abs=1e-6)
    assert early.parts["wire"] == pytest.approx(behind.parts["wire"], rel=0.05)
    arguments = ["import", *map(str, paths), "-o", str(tmp_path / "results"), "--json"]
    told = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert [rank["wait_seconds_per_step"] for rank in told["ranks"]] == [early.parts["wait"], behind.parts["wait"]]


def test_one_rank_alone_cannot_tell_wait_from_transfer(tmp_path: Path) -> None:
    done = import_logs([trace_path(MI300X)], "trace", ImportOptions(), tmp_path / "results")
    (run,) = load(tmp_path / "results").runs
    found = breakdown(run)
    assert found is not None
    assert (found.wait_known, found.typical.parts["wait"], found.typical.parts["wire"]) == (False, None, None)
    assert "cannot be told apart" in found.reasons["wait"]
    assert found.typical.exposed_seconds == pytest.approx(0.0117, rel=0.01)
    (trial,) = done.study.trials.values()
    assert (trial.world.size, trial.train.engine, trial.train.micro_batch) == (8, "ddp", 10)


def test_files_of_different_jobs_are_different_runs(tmp_path: Path) -> None:
    paths = [trace_path(name) for name in (A100, ALEXNET, MI300X, V100)]
    done = import_logs(paths, "trace", ImportOptions(), tmp_path / "results")
    assert sorted((one.run.setting.gpus, len(one.run.ranks)) for one in done.runs) == [(1, 1), (2, 1), (2, 1), (8, 1)]
    assert len(done.study.trials) == 4
    again = import_logs(paths, "trace", ImportOptions(), tmp_path / "results")
    assert not again.written


def test_the_same_rank_twice_is_refused_unless_the_traces_are_of_two_jobs(tmp_path: Path) -> None:
    job = {**job_of(ALEXNET), "trace_id": "first"}
    other = {**job, "trace_id": "second"}
    paths = [write(tmp_path, f"{name}.json.gz", content) for name, content in (("a", job), ("b", job), ("c", other))]
    with pytest.raises(RequestError, match=r"'a\.json\.gz' and 'b\.json\.gz' are both of rank 0 of one job"):
        import_logs(paths, "trace", ImportOptions(), tmp_path / "results")
    assert len(import_logs(paths[1:], "trace", ImportOptions(), tmp_path / "results").runs) == 2


def test_a_rank_that_no_job_has_is_a_message(tmp_path: Path) -> None:
    job = {name: value for name, value in job_of(ALEXNET).items() if name != "distributedInfo"}
    path = write(tmp_path, "trace-rank-100000000.json.gz", job)
    with pytest.raises(RequestError, match=r"is of rank 100000000\. Valid: 0 to 99,999"):
        import_logs([path], "trace", ImportOptions(), tmp_path / "results")
    four = write(tmp_path, "trace-rank3.json.gz", job)
    (run,) = import_logs([four], "trace", ImportOptions(gpus=4), tmp_path / "results").runs
    assert [rank.rank for rank in run.run.ranks] == [3]


def test_a_report_on_traces_begins_with_steps_and_what_they_go_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No trace tells an epoch: a table of epochs would be empty."""
    results = tmp_path / "results"
    import_logs([trace_path(name) for name in (A100, ALEXNET, MI300X, V100)], "trace", ImportOptions(), results)
    monkeypatch.setenv("COLUMNS", "80")
    lines = CliRunner().invoke(app, ["report", str(results)]).stdout.splitlines()
    assert len(lines) <= 25
    said = " ".join(" ".join(lines).split())
    assert "AMD Instinct MI300X, micro-batch 10 8 18.8 62 % exposed communication, 26 %" in said
    assert "epoch" not in said.partition("More with")[0]
    page = CliRunner().invoke(app, ["report", str(results), "--format", "md"]).stdout
    assert (
        "2 ranks, micro-batch not told: 42 % of a step is launch gaps (an idle device), 21 % of a step is exp" in page
    )
    assert "| 18.8 | 62 % exposed communication, 26 % backward, 12 % forward |" in page
    assert "- Import the logs of all ranks together" in page.partition("## What next?")[2].partition("##")[0]


def small(rank: int | None, groups: list[list[int]], world: int | None = 4) -> dict[str, Any]:
    """A job of one kernel."""
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 10, "dur": 5, "args": {"device": 0}}
    config = [{"pg_name": str(number), "ranks": ranks} for number, ranks in enumerate(groups)]
    about = {"rank": rank, "world_size": world, "pg_config": config}
    told = {} if rank is None else {"distributedInfo": about}
    return {"deviceProperties": [{"id": 0, "name": "GPU"}], "traceEvents": [kernel], **told}


def test_ranks_of_one_job_may_be_in_different_groups(tmp_path: Path) -> None:
    """Two groups of two, as tensor or pipeline parallelism makes them: each rank's file tells its own."""
    own = {0: [[0, 1], [0, 2]], 1: [[0, 1], [1, 3]], 2: [[2, 3], [0, 2]], 3: [[2, 3], [1, 3]]}
    paths = [write(tmp_path, f"{rank}.json.gz", small(rank, [[0, 1, 2, 3], *own[rank]])) for rank in own]
    (run,) = import_logs(paths, "trace", ImportOptions(), tmp_path / "one").runs
    assert [rank.rank for rank in run.run.ranks] == [0, 1, 2, 3]
    other = write(tmp_path, "other.json.gz", small(3, [[0, 1, 2, 3], [0, 3], [1, 3]]))
    assert len(import_logs([*paths[:3], other], "trace", ImportOptions(), tmp_path / "two").runs) == 2


@pytest.mark.parametrize("world", [0, -1, 10**12])
def test_a_world_that_cannot_be_is_not_told(world: int, tmp_path: Path) -> None:
    path = write(tmp_path, "a.json.gz", small(0, [], world))
    (run,) = import_logs([path], "trace", ImportOptions(), tmp_path / "results").runs
    assert run.run.setting.gpus == 1


def test_files_that_tell_no_rank_are_jobs_of_their_own(tmp_path: Path) -> None:
    paths = [write(tmp_path, f"{name}.json.gz", small(None, [])) for name in ("train", "infer")]
    done = import_logs(paths, "trace", ImportOptions(), tmp_path / "results")
    assert [(one.run.setting.gpus, len(one.run.ranks)) for one in done.runs] == [(1, 1), (1, 1)]
    named = [write(tmp_path, f"job-rank{rank}.json.gz", small(None, [])) for rank in (0, 1)]
    (run,) = import_logs(named, "trace", ImportOptions(), tmp_path / "named").runs
    assert [rank.rank for rank in run.run.ranks] == [0, 1]
    assert run.run.setting.gpus == 2


def test_json_has_every_rank_and_step(tmp_path: Path) -> None:
    answer = CliRunner().invoke(
        app, ["import", str(trace_path(V100)), str(trace_path(ALEXNET)), "-o", str(tmp_path / "results"), "--json"]
    )
    assert answer.exit_code == 0
    told = json.loads(answer.stdout)
    by_device = {rank["device"]: rank for rank in told["ranks"]}
    v100 = by_device["Tesla V100-SXM2-32GB"]
    assert (v100["rank"], v100["world_size"]) == (1, 2)
    assert v100["total_seconds"] == pytest.approx(1.733, abs=0.001)
    assert v100["compute_seconds"] == pytest.approx(0.621, abs=0.001)
    assert v100["idle_seconds"] / v100["total_seconds"] == pytest.approx(0.42, abs=0.005)
    assert v100["communication_overlap_share"] == 0
    parts = ("compute_seconds", "exposed_communication_seconds", "copy_seconds", "idle_seconds")
    for stretch in (*told["ranks"], *told["steps"]):
        assert sum(stretch[part] for part in parts) == pytest.approx(stretch["total_seconds"], abs=1e-9)
    assert [step["step"] for step in told["steps"] if step["rank"] == 1] == [2, 3, 4, 5, 6]
    assert any("steps are told by the profiler's own marks" in note for note in told["notes"])


def test_a_micro_batch_that_nobody_tells_is_no_1(tmp_path: Path) -> None:
    """The A100's trace has no shapes; the MI300X's has, and tells 10 images."""
    untold, told = tmp_path / "untold", tmp_path / "told"
    import_logs([trace_path(A100), trace_path(MI300X)], "trace", ImportOptions(), untold)
    import_logs([trace_path(A100)], "trace", ImportOptions(micro_batch=32), told)
    rows = {row["gpus"]: row for row in trial_rows(analyse(load(untold)))}
    fields = ("micro_batch", "global_batch", "images_per_second")
    assert [rows[2][field] for field in fields] == [None, None, None]
    assert [rows[8][field] for field in fields] == [10, 80, pytest.approx(8 * 10 / rows[8]["step_seconds"], rel=0.01)]
    assert "micro-batch" not in rows[2]["curve"]
    (row,) = trial_rows(analyse(load(told)))
    assert [row[field] for field in fields] == [32, 64, pytest.approx(2 * 32 / row["step_seconds"], rel=0.01)]
    page = CliRunner().invoke(app, ["report", str(untold), "--format", "md"]).stdout
    assert "micro-batch 1 " not in page
    answer = CliRunner().invoke(
        app, ["advise", str(untold), "--images", "50000", "--epochs", "3", "--series", rows[2]["curve"]]
    )
    assert "Import the files again with --micro-batch" in str(answer.exception)


def test_predictions_from_traces_say_so_and_what_they_lack(tmp_path: Path) -> None:
    results = tmp_path / "results"
    import_logs([trace_path(A100)], "trace", ImportOptions(), results)
    said = " ".join(CliRunner().invoke(app, ["predict", str(results), "--gpus", "4", "--verbose"]).stdout.split())
    assert "Rests on profiler traces alone" in said
    assert "Each series has one rank count" in said
    assert "measured on 2 ranks, 1 host, in 2 steps of a trace, profiler attached" in said
    assert "Images/s: unavailable: the micro-batch is not told: import again with --micro-batch" in said
    answer = json.loads(CliRunner().invoke(app, ["predict", str(results), "--gpus", "4", "--json"]).stdout)
    (told,) = answer["predictions"]
    assert (told["images_per_second"], told["epoch_seconds"]) == (None, None)
    assert any(assumed["part"] == "the profiler's cost" for assumed in told["assumptions"])


def test_a_trace_without_steps_predicts_nothing(tmp_path: Path) -> None:
    """Nor does one without operators tell which part of it was forward: not that none was."""
    results, job = tmp_path / "results", job_of(ALEXNET)
    job["traceEvents"] = [event for event in job["traceEvents"] if event.get("cat") != "cpu_op"]
    import_logs([write(tmp_path, "bare.json.gz", job)], "trace", ImportOptions(), results)
    analysis = analyse(load(results))
    advice = {finding.kind: finding.advice for finding in analysis.findings}
    assert advice["baseline-missing"].startswith("Import them with --micro-batch;")
    (trial,) = analysis.trials.values()
    assert trial.breakdown is not None
    assert [trial.breakdown.typical.parts[part] for part in ("forward", "backward", "optimizer")] == [None] * 3
    for verb in (["predict", "--gpus", "4"], ["advise"]):
        answer = CliRunner().invoke(app, [verb[0], str(results), *verb[1:]])
        assert isinstance(answer.exception, RequestError)
        assert "tell of no step how long it took" in str(answer.exception)
        assert "torch.profiler.schedule" in str(answer.exception)


def test_lost_kernels_are_said_where_idle_time_is(tmp_path: Path) -> None:
    """Two of the last of three steps' four kernels; of its first step a trace tells no parts."""
    job = passing(*["FBU"] * 4)
    ran_last = [event for event in job["traceEvents"] if event["cat"] == "kernel"][-2:]
    job["traceEvents"] = [event for event in job["traceEvents"] if event not in ran_last]
    told = import_told([write(tmp_path, "a.json.gz", job)], tmp_path / "results")
    assert told["problems"] == [
        "a.json.gz: in 1 of 3 steps the device may have idled less than is told: the profiler lost 2 of 4 launched "
        "kernels and copies (50 %)"
    ]


def test_work_of_no_phase_is_other_and_marks_are_advised(tmp_path: Path) -> None:
    import_logs([write(tmp_path, "a.json.gz", passing(*["FBU"] * 4))], "trace", ImportOptions(), tmp_path / "results")
    advice = {finding.kind: finding.advice for finding in analyse(load(tmp_path / "results")).findings}
    assert "traces whose steps are marked tell more" in advice["unaccounted-time"]


LATE_BY_US = 2000
"""Of the late one of several MI300X ranks, whose two large all-reduces of a step take 6.6 to 9.2 ms each."""


def is_large(event: dict[str, Any]) -> bool:
    return event.get("cat") == "kernel" and event["name"].startswith("nccl") and event["dur"] > 2 * LATE_BY_US


def moved(job: dict[str, Any], rank: int, late: bool) -> dict[str, Any]:
    """A rank of this job whose clock is `rank` times 77 s off; a late one comes to each large collective later."""
    events = []
    for event in job["traceEvents"]:
        own = {**event, "ts": event["ts"] + 77e6 * rank} if "ts" in event else event
        if late and is_large(event):
            own |= {"ts": own["ts"] + LATE_BY_US, "dur": event["dur"] - LATE_BY_US}
        events.append(own)
    return {**job, "traceEvents": events, "distributedInfo": {**job["distributedInfo"], "rank": rank}}


def exposed_wait_us(job: dict[str, Any]) -> list[float]:
    """Of each large collective, how much of its first 2 ms nothing is computed or copied in, by tenths of a us."""
    kernels = [event for event in job["traceEvents"] if event.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy")]
    computing = [(e["ts"], e["ts"] + e["dur"]) for e in kernels if not e["name"].startswith("nccl")]
    waits = []
    for event in sorted((event for event in kernels if is_large(event)), key=lambda event: event["ts"]):
        busy = np.zeros(10 * LATE_BY_US, bool)
        for start, end in computing:
            first, last = round(10 * (start - event["ts"])), round(10 * (end - event["ts"]))
            busy[max(0, first) : max(0, last)] = True
        waits.append(float((~busy).sum()) / 10)
    return waits


def test_of_four_ranks_the_late_one_is_named_with_what_it_makes_the_others_wait(tmp_path: Path) -> None:
    job = job_of(MI300X)
    kept = ("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "user_annotation")
    job["traceEvents"] = [e for e in job["traceEvents"] if e.get("cat") in kept or e["name"] == "record_param_comms"]
    job["distributedInfo"]["world_size"] = 4
    paths = [write(tmp_path, f"rank{rank}.json.gz", moved(job, rank, late=rank == 2)) for rank in range(4)]
    arguments = ["import", *map(str, paths), "-o", str(tmp_path / "results"), "--json"]
    told = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert [rank["straggler"] for rank in told["ranks"]] == [2] * 4
    (run,) = load(tmp_path / "results").runs
    parts = breakdown(run)
    assert parts is not None
    assert parts.straggler is not None
    assert (parts.straggler.rank, parts.straggler.share_of_steps, parts.steps) == (2, 1.0, 3)
    truth = sum(exposed_wait_us(job)[-2 * parts.steps :]) / parts.steps / 1e6
    assert truth > 0.001
    for rank in told["ranks"]:
        expected = 0.0 if rank["rank"] == 2 else truth
        assert rank["wait_seconds_per_step"] == pytest.approx(expected, rel=0.02, abs=2e-6)
    (said,) = straggler_sentences(told["ranks"])
    assert said.startswith(f"The ranks wait for rank 2 (AMD Instinct MI300X): {1000 * truth:.2f} ms a step")
    report = CliRunner().invoke(app, ["report", str(tmp_path / "results")]).stdout
    assert "exposed wait (for rank 2)" in " ".join(report.split())


def test_traces_of_one_training_on_several_rank_counts_are_one_curve(tmp_path: Path) -> None:
    """The MI300X's job of eight ranks, and one as if of four in which all takes half as long."""
    eight, four = job_of(MI300X), job_of(MI300X)
    four["distributedInfo"]["world_size"] = 4
    for event in four["traceEvents"]:
        event.update({name: float(event[name]) / 2 for name in ("ts", "dur") if name in event})
    paths = [write(tmp_path, "eight.json.gz", eight), write(tmp_path, "four.json.gz", four)]
    import_logs(paths, "trace", ImportOptions(train_samples=50_000), tmp_path / "results")
    found = analyse(load(tmp_path / "results"))
    (curve,) = found.curves
    assert [point.gpus for point in curve.points] == [4, 8]
    rows = {row["gpus"]: row for row in trial_rows(found)}
    assert rows[8]["step_seconds"] == pytest.approx(2 * rows[4]["step_seconds"], rel=1e-3)
    assert rows[8]["efficiency"] == pytest.approx(0.5, rel=0.01)


def ran(cat: str, name: str, start: float, end: float, **arguments: Any) -> dict[str, Any]:
    """An event of a trace, in us; on the device where a stream is given."""
    lane = arguments.get("stream", 9)
    return {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": lane, "ts": start, "dur": end - start,
            "args": arguments}  # fmt: skip


def kernel(name: str, launched: float, start: float, end: float, stream: int = 7) -> list[dict[str, Any]]:
    """A kernel and its launch."""
    linked = {"correlation": round(launched), "External id": round(launched)}
    return [
        ran("cuda_runtime", "cudaLaunchKernel", launched, launched + 1, **linked),
        ran("kernel", name, start, end, stream=stream, device=0, **linked),
    ]


STEPS, STEP_US = 4, 10_000
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def training(
    late_us: float = 0,
    group: int | None = None,
    first: int = 5,
    since_us: float = 1e6,
    exchange: str = ALL_REDUCE,
    **about: Any,
) -> dict[str, Any]:
    """Four steps of 10 ms that compute 2 ms, exchange until 8 ms and update until 8.5.

    Args:
        late_us: how much later this rank is in computing, and how much shorter its exchange.
        group: number of ranks that each all-reduce tells; None: it tells nothing.
        first: number of the first step.
        since_us: time of the first step.
        exchange: name of the collective's kernel.
        about: distributedInfo, trace_id.
    """
    events = []
    sizes = {"Collective name": "allreduce", "In msg nelems": 100, "Out msg nelems": 100, "dtype": "Float"}
    for step in range(STEPS):
        at = since_us + step * STEP_US
        events += [
            ran("user_annotation", f"ProfilerStep#{first + step}", at, at + STEP_US),
            *kernel("gemm", at + 100, at + 500, at + 2500 + late_us),
            *kernel(exchange, at + 200, at + 5500 + late_us, at + 8000, 20),
            *kernel("multi_tensor_apply_kernel", at + 300, at + 8000, at + 8500),
        ]
        if group is not None:
            told = sizes | {"Group size": group, "External id": round(at + 200)}
            events.append(ran("cpu_op", "record_param_comms", at + 190, at + 210, **told))
    return {"deviceProperties": [{"id": 0, "name": "GPU"}], "traceEvents": events, **about}


def import_told(paths: list[Path], folder: Path, *options: str) -> dict[str, Any]:
    answer = CliRunner().invoke(app, ["import", *map(str, paths), "-o", str(folder), "--json", *options])
    assert answer.exit_code == 0, answer.output
    told: dict[str, Any] = json.loads(answer.stdout)
    return told


def waits(told: dict[str, Any]) -> list[float | None]:
    return [rank[f"{part}_seconds_per_step"] for rank in told["ranks"] for part in ("wait", "wire")]


@pytest.mark.parametrize(
    ("name", "job", "gpus", "lacks"),
    [
        ("a", training(group=8), 8, "of 8 ranks there are 1"),
        ("a", training(), 1, "collectives ran, and how many ranks there were is not told (--gpus)"),
        ("a", training(distributedInfo={"rank": 1}), 2, "of 2 ranks there are 1"),
        ("a", training(distributedInfo={"rank": 0, "pg_config": [{"ranks": [0, 1, 2]}]}), 3, "of 3 ranks there are 1"),
        ("rank3", training(), 4, "of 4 ranks there are 1"),
        ("a", training(group=10**12), 1, "collectives ran, and how many ranks there were is not told (--gpus)"),
    ],
)
def test_one_file_of_a_world_that_nobody_tells_knows_no_wait(
    name: str, job: dict[str, Any], gpus: int, lacks: str, tmp_path: Path
) -> None:
    told = import_told([write(tmp_path, f"{name}.json.gz", job)], tmp_path / "results")
    assert waits(told) == [None, None]
    (run,) = load(tmp_path / "results").runs
    assert run.header.trial.world.size == gpus
    assert any(lacks in note for note in told["notes"])
    assert any("how many ranks there were is not told (--gpus)" in note for note in told["notes"])


def test_one_file_of_one_rank_waits_for_nobody(tmp_path: Path) -> None:
    """The file or the user says that there is no other."""
    alone = write(tmp_path, "alone.json.gz", training(distributedInfo={"rank": 0, "world_size": 1}))
    said = write(tmp_path, "said.json.gz", training())
    for path, options in ((alone, ()), (said, ("--gpus", "1"))):
        told = import_told([path], tmp_path / path.name[:4], *options)
        assert waits(told) == [0, pytest.approx(0.0055 - 0.003)]
        assert not any("how many ranks" in note for note in told["notes"])


@pytest.mark.parametrize(("names", "group", "gpus"), [((0, 3), None, 4), ((0, 1), 4, 4), ((0, 1), None, 2)])
def test_some_ranks_of_a_world_that_nobody_tells_name_no_straggler(
    names: tuple[int, int], group: int | None, gpus: int, tmp_path: Path
) -> None:
    paths = [write(tmp_path, f"rank{rank}.json.gz", training(1500 * place, group)) for place, rank in enumerate(names)]
    told = import_told(paths, tmp_path / "results")
    (run,) = load(tmp_path / "results").runs
    assert run.header.trial.world.size == gpus
    known = [pytest.approx(0.0015), pytest.approx(0.001), pytest.approx(0, abs=1e-7), pytest.approx(0.001)]
    assert waits(told) == (known if gpus == 2 else [None] * 4)
    assert [rank["straggler"] for rank in told["ranks"]] == ([names[1]] * 2 if gpus == 2 else [None] * 2)
    assert any(f"(--gpus): {gpus} are taken" in note for note in told["notes"])


def test_collectives_that_were_called_and_not_recognised_are_no_wait_of_0(tmp_path: Path) -> None:
    paths = [write(tmp_path, f"rank{rank}.json.gz", training(group=2, exchange="of_nobody")) for rank in (0, 1)]
    assert waits(import_told(paths, tmp_path / "results")) == [None] * 4


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("job_crank3_rank0", 0), ("trace_rank=2", 2), ("llama.rank.2", 2), ("rank-1-of-4", 1), ("TrainRank3", 3),
        ("job[3]", 3), ("RANK_2", 2), ("r3", None), ("frank3", None), ("host_4242.1711964646123.pt.trace", None),
        ("rank.1711964646123456789.pt.trace", None),
    ],
)  # fmt: skip
def test_a_rank_in_a_files_name(name: str, rank: int | None, tmp_path: Path) -> None:
    told = import_told([write(tmp_path, f"{name}.json.gz", training(group=4))], tmp_path / "results")
    assert [each["rank"] for each in told["ranks"]] == [rank or 0]
    assert any("does not tell its rank" in note for note in told["notes"]) is (rank is None)


def test_a_file_without_collectives_need_tell_no_rank(tmp_path: Path) -> None:
    told = import_told([write(tmp_path, "a.json.gz", small(None, []))], tmp_path / "results")
    assert not any("rank" in note for note in told["notes"])


def convolution(at: float, images: int, channels: int, width: int) -> dict[str, Any]:
    shapes = [[images, channels, 32, 32], [64, channels, width, width], [64], [], [], [], [], [], []]
    concrete = ["", "", "", "[1, 1]", "[0, 0]", "[1, 1]", "False", "[0, 0]", "1"]
    arguments = {"Input Dims": shapes, "Input type": ["float"] * 3, "Concrete Inputs": concrete}
    return ran("cpu_op", "aten::convolution", at, at + 50, **arguments)


def passing(*steps: str) -> dict[str, Any]:
    """Steps of 10 ms, in letters.

    F is a first layer of 32 images in colour (f: of 16), S what a loss makes of each of their colours, A a blur of 4
    of the images, B a backward pass, R one in which the first layer runs again, U an update.
    """
    events = []
    for number, letters in enumerate(steps):
        start = number * STEP_US + 1e6
        events.append(ran("user_annotation", f"ProfilerStep#{number}", start, start + STEP_US))
        for place, letter in enumerate(letters):
            at = start + 500 * place
            if letter in "FfS":
                events.append(convolution(at, *{"F": (32, 3, 7), "f": (16, 3, 7), "S": (96, 1, 11)}[letter]))
            elif letter == "A":
                blur = convolution(at, 4, 3, 23)
                blur["args"]["Input Dims"][1] = [3, 1, 23, 23]
                events.append(blur)
            elif letter in "BR":
                function = "autograd::engine::evaluate_function: ConvolutionBackward0"
                events += [ran("cpu_op", function, at, at + 150), ran("cpu_op", function, at + 160, at + 300)]
                events += [convolution(at + 200, 32, 3, 7)] if letter == "R" else []
            else:
                events.append(ran("user_annotation", "Optimizer.step#SGD.step", at, at + 300))
            events += kernel("gemm", at + 60, at + 100, at + 400)
        events += kernel("gemm", start + 9000, start + 9000, start + 9500)
    return {"deviceProperties": [{"id": 0, "name": "GPU"}], "traceEvents": events}


@pytest.mark.parametrize(
    ("step", "passes"),
    [
        ("FBU", 1), ("FBFBFBFBU", 4), ("FRU", 1), ("FRFRU", 2), ("FSBU", 1), ("FSBFSBU", 2), ("F", 1), ("FBUU", 1),
        ("AFBU", 1), ("AFBAFBU", 2),
    ],
)  # fmt: skip
def test_images_of_a_step_are_those_of_all_passes_whose_gradients_add_up(
    step: str, passes: int, tmp_path: Path
) -> None:
    """Not what checkpointing computes again, what a loss makes of the images, or what augments some of them."""
    told = import_told([write(tmp_path, "a.json.gz", passing(*[step] * 4))], tmp_path / "results")
    (row,) = trial_rows(analyse(load(tmp_path / "results")))
    fields = ("micro_batch", "grad_accum", "global_batch", "images_per_second")
    assert [row[field] for field in fields] == [32, passes, 32 * passes, pytest.approx(3200 * passes)]
    assert any("whose gradients add up" in note for note in told["notes"]) is (passes > 1)


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(["FFBU"] * 4, id="a teacher, or another view"),
        pytest.param(["FFBUFBU"] * 4, id="a discriminator"),
        pytest.param(["FBUFBU"] * 4, id="two updates"),
        pytest.param(["FBU", "FBFBU", "FBU", "FBFBU"], id="a number that changes"),
        pytest.param(["FBfBU"] * 4, id="different batches"),
        pytest.param(["FBU", "FBU", "BU", "BU"], id="a graph of which the host sees nothing"),
    ],
)
def test_images_of_a_step_that_does_not_tell_are_unknown(steps: list[str], tmp_path: Path) -> None:
    path = write(tmp_path, "a.json.gz", passing(*steps))
    told = import_told([path], tmp_path / "untold")
    assert any("what a step trains on is not clear" in note for note in told["notes"])
    import_told([path], tmp_path / "said", "--micro-batch", "64")
    for folder, images in (("untold", None), ("said", 64)):
        (row,) = trial_rows(analyse(load(tmp_path / folder)))
        assert row["micro_batch"] == images
        assert row["images_per_second"] == (images and pytest.approx(100 * images))


def window(rank: int, first: int, since_us: float, trace_id: str) -> dict[str, Any]:
    """A window of a rank of two; rank 1 is 0.5 ms late, and its clock 77 s off."""
    about = {"rank": rank, "world_size": 2}
    return training(500 * rank, 2, first, since_us + 77e6 * rank, distributedInfo=about, trace_id=trace_id)


def test_two_windows_of_a_job_are_two_runs_of_all_its_ranks(tmp_path: Path) -> None:
    """As schedule(repeat=2) writes them: a file for each rank and window, each with an id of its own."""
    paths = [
        write(tmp_path, f"{number}.json.gz", window(rank, 5 + 100 * later, 1e6 + 300e6 * later, f"{number}"))
        for number, (rank, later) in enumerate([(0, 1), (0, 0), (1, 0), (1, 1)])
    ]
    told = import_told(paths, tmp_path / "results")
    jobs: dict[int, list[str]] = {}
    for rank in told["ranks"]:
        jobs.setdefault(rank["job"], []).append(rank["file"])
    assert sorted(jobs.values()) == [["0.json.gz", "3.json.gz"], ["1.json.gz", "2.json.gz"]]
    late = [pytest.approx(0.0005), pytest.approx(0.002), pytest.approx(0, abs=1e-7), pytest.approx(0.002)]
    assert waits(told) == late * 2
    assert [rank["straggler"] for rank in told["ranks"]] == [1] * 4


def test_windows_that_lack_a_file_or_are_of_other_steps_are_not_paired(tmp_path: Path) -> None:
    files = [window(0, 5, 1e6, "a"), window(0, 105, 301e6, "b"), window(1, 5, 1e6, "c"), window(1, 205, 301e6, "d")]
    paths = [write(tmp_path, f"{job['trace_id']}.json.gz", job) for job in files]
    for some in (paths, paths[:3]):
        told = import_told(some, tmp_path / str(len(some)))
        assert len({rank["job"] for rank in told["ranks"]}) == len(some)
        assert waits(told) == [None] * 2 * len(some)
