"""What PBS, LSF and Flux share: their scripts as bash runs them, and answers of commands that hang, lack or refuse."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from batch_programs import BatchPrograms
from processes import wait_until
from study_factory import write_study
from vitscale.errors import RequestError
from vitscale.launchers.base import Spawn
from vitscale.launchers.torchrun import Torchrun
from vitscale.machine.batch_systems import BATCH_SYSTEMS, BatchSystemFacts
from vitscale.machine.hosts import Host
from vitscale.preflight.running import check_target
from vitscale.runner.alternating import sides_of
from vitscale.runner.planning import plan
from vitscale.schedulers import SCHEDULERS, Scheduler, batch_system, make_scheduler
from vitscale.schedulers.base import BatchJob, JobState, SchedulerError, SchedulerMissingError, SchedulerSilentError
from vitscale.schedulers.batch_system import BatchSystem, clock_seconds, clock_text, json_object, number_of, text_of
from vitscale.schedulers.pbs import Pbs
from vitscale.study.sections import LaunchSection, NodeSection, SlurmSection
from vitscale.trial.trial import World

ONE = World(nodes=1, ranks_per_node=1, threads_per_rank=1)
TWO = World(nodes=2, ranks_per_node=1, threads_per_rank=1)
NAME = "vitscale-1x1-0123abcd"


@pytest.mark.parametrize("name", ["pbs", "lsf", "flux"])
def test_they_are_in_the_table_under_their_own_names(name: str) -> None:
    system = make_scheduler(name, LaunchSection(scheduler=name), SlurmSection(), NodeSection(cores=8), Path("s.toml"))
    assert name in SCHEDULERS
    assert isinstance(system, BatchSystem)
    assert (system.facts.name, system.arrays, system.default_launcher) == (name, False, "torchrun")
    assert system.slots() is None


def run_as_batch_systems_do(folder: Path, *, by_stdin: bool, **slurm: object) -> tuple[int, str]:
    """Return the exit code of a script of PBS and what it printed to its file; its driver prints its arguments.

    Args:
        folder: for the results, and the working directory.
        by_stdin: whether a shell reads it, so that it has no name, as under PBS; else it is a copy elsewhere.
        slurm: keys of [slurm].
    """
    python = folder / "python"
    python.write_text('#!/bin/sh\necho "in $PWD: $*"\nexit 3\n')
    python.chmod(0o755)
    (folder / "jobs").mkdir()
    job = BatchJob(NAME, ONE, on_gpus=False, results=folder, cwd=folder)
    text = Pbs(SlurmSection(python=str(python), **slurm), None).script(job)  # type: ignore[arg-type]  # keys of it
    (folder / "jobs" / f"{NAME}.sh").write_text(text)
    (folder / "copy").write_text(text)
    command = ["/bin/bash"] if by_stdin else ["/bin/bash", str(folder / "copy")]
    environment = {"PBS_JOBID": "12.pbs1", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        command, input=text if by_stdin else "", text=True, cwd="/", env=environment, capture_output=True, check=False
    )
    assert done.stdout + done.stderr == "", "all goes to the job's file"
    return done.returncode, (folder / "jobs" / f"{NAME}-12.pbs1.out").read_text()


@pytest.mark.parametrize("by_stdin", [False, True])
def test_bash_runs_the_script(tmp_path: Path, by_stdin: bool) -> None:
    code, printed = run_as_batch_systems_do(tmp_path, by_stdin=by_stdin, time="30", setup=["echo ready"])
    assert code == 3
    assert printed == f"ready\nin {tmp_path}: -P -m vitscale.runner.job {tmp_path} {NAME}\n"


@pytest.mark.parametrize("by_stdin", [False, True])
def test_a_line_that_fails_ends_the_job_and_is_named(tmp_path: Path, by_stdin: bool) -> None:
    code, printed = run_as_batch_systems_do(
        tmp_path, by_stdin=by_stdin, setup=["true", "ls /no/such/folder 2> /dev/null"]
    )
    assert code == 2
    assert printed.startswith("vitscale: the job ends: line ")
    assert printed.endswith(" of its script failed with exit code 2: ls /no/such/folder 2> /dev/null\n")


@pytest.mark.parametrize(
    ("limit", "warned_after"), [("90", "5340s"), ("1", "45s"), ("0:04", "3s"), ("1-02:00:00", "93540s")]
)
def test_the_driver_is_warned_before_the_limit(limit: str, warned_after: str) -> None:
    job = BatchJob(NAME, ONE, on_gpus=False, results=Path("/r"), cwd=Path("/w"))
    script = Pbs(SlurmSection(time=limit), None).script(job)
    assert f"exec timeout --foreground --signal=TERM {warned_after} {sys.executable}" in script


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_warning_reaches_the_driver_and_a_cancellation_is_handed_on(number: signal.Signals) -> None:
    """`timeout` hands on what it gets, and signals its command alone, from when it waits for it on.

    A signal between its fork and that ends it without a word to its command: coreutils 9.1 knows no child until then.
    """
    program = f"trap 'echo {number.name}; exit 0' TERM HUP; echo ready; while :; do sleep 0.05; done"
    command = ["timeout", "--foreground", "--signal=TERM", "60s", "bash", "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        timeout = psutil.Process(process.pid)
        wait_until(lambda: timeout.status() == psutil.STATUS_SLEEPING, "timeout waits for its command")
        process.send_signal(number)
        assert process.stdout.read() == f"{number.name}\n"


SIGNALLED = """
import os, signal
from vitscale.runner.driver import signals_interrupt
try:
    with signals_interrupt(signal.SIGTERM, signal.SIGHUP, signal.SIGINT, once=True):
        try:
            os.kill(os.getpid(), signal.SIGHUP)
        except KeyboardInterrupt:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                os.kill(os.getpid(), number)
            print("ended in order")
            raise
except KeyboardInterrupt:
    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def test_a_driver_that_is_being_ended_ignores_further_signals_of_any_kind() -> None:
    """LSF sends SIGINT, then SIGTERM ten seconds later; and `timeout` hands on what the driver gets as well."""
    done = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ended in order\nTrue\n"), done.stderr


def test_a_command_that_hangs_or_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_system, "_ANSWER_SECONDS", 0.01)
    with pytest.raises(SchedulerSilentError, match=r"sleep has not answered within 0\.01 s"):
        Pbs(SlurmSection(), None).ask("sleep", "60")
    monkeypatch.setattr(batch_system, "_ANSWER_SECONDS", 60.0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerMissingError, match=r"qselect cannot be run: .* where PBS is installed"):
        Pbs(SlurmSection(), None).states([NAME])
    programs = BatchPrograms(tmp_path, monkeypatch, "qsub")
    monkeypatch.setenv("PATH", f"{programs.folder}:/usr/bin:/bin")
    programs.answers("qsub", code=7)
    with pytest.raises(SchedulerError, match=r"PBS refuses `qsub`: exit code 7\."):
        Pbs(SlurmSection(), None).submit(tmp_path / "job.sh")


def test_ids_with_underscores_are_whole_unless_they_are_elements() -> None:
    assert JobState("12.pbs_server", NAME, None, "RUNNING", "", over=False).array_id == "12.pbs_server"
    assert JobState("12_3", NAME, 3, "RUNNING", "", over=False).array_id == "12"


def test_fields_of_other_types_are_missing() -> None:
    fields = {"text": " a ", "number": 7, "digits": "-7", "flag": True, "list": [1], "long": "9" * 20}
    assert [text_of(fields, key) for key in ("text", "number", "flag", "list", "none")] == ["a", "7", "", "", ""]
    assert [number_of(fields, key) for key in ("number", "digits", "text", "flag", "long")] == [7, -7, None, None, None]
    assert json_object('Please wait ...\n{"a": "b\tc"}', "x") == {"a": "b\tc"}
    for text in ("", "[]", "{", "{" * 100_000, "null"):
        with pytest.raises(SchedulerError, match="the answer of `x` is no JSON"):
            json_object(text, "x")


def test_spans() -> None:
    for seconds, text in ((0, "00:00:00"), (5_430, "01:30:30"), (360_000, "100:00:00")):
        assert clock_text(seconds) == text
        assert clock_seconds(text) == seconds
    assert [clock_seconds(text) for text in ("", "1:2:3", "soon")] == [None, None, None]


def test_a_node_is_described_for_planning() -> None:
    with pytest.raises(RequestError, match="add \\[node\\] with cores = 64"):
        Pbs(SlurmSection(), None).machine()


@pytest.mark.parametrize("name", ["pbs", "lsf", "flux"])
def test_nodes_that_are_named_are_those_of_the_plan(name: str) -> None:
    slurm = SlurmSection(nodelist="node[1-3]")
    system = make_scheduler(name, LaunchSection(scheduler=name), slurm, NodeSection(cores=8), Path("s.toml"))
    assert system.hosts(TWO) == (Host("node1"), Host("node2"))
    with pytest.raises(RequestError, match="names 3 nodes, and a trial needs 4"):
        system.hosts(World(nodes=4, ranks_per_node=1, threads_per_rank=1))


CONTAINER = SlurmSection(container="vit.sif", container_mounts=["/data:/data:ro"], gpus="none", python="python3")
RUN = Path("/shared/results/runs/0123456789ab-r0-a0")
APPTAINER = [
    *("apptainer", "exec", "--bind", "/shared/results:/shared/results", "--bind", "/work:/work"),
    *("--bind", "/data:/data:ro", "--pwd", "/work", "vit.sif"),
]


def started_by_torchrun(scheduler: Scheduler, *names: str) -> list[list[str]]:
    """Argvs for two hosts with these names."""
    rank = ("python3", "-P", "-m", "vitscale.worker", str(RUN))
    spawn = Spawn((rank,), RUN, tuple(map(Host, names)), 29511, cwd=Path("/work"))
    return [list(command) for command in scheduler.adapt(Torchrun().launch(TWO, spawn)).commands]


def test_the_agent_of_each_node_is_planned_in_the_container_and_the_driver_runs_outside() -> None:
    pbs = Pbs(CONTAINER, NodeSection(cores=8))
    for node, command in enumerate(started_by_torchrun(pbs, "node1.invalid", "node2.invalid")):
        assert command[: len(APPTAINER)] == APPTAINER
        assert command[len(APPTAINER) :][:6] == [
            *("python3", "-P", "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}")
        ]
    script = pbs.script(BatchJob(NAME, TWO, on_gpus=False, results=Path("/r"), cwd=Path("/w")))
    assert f"exec {sys.executable} -P -m vitscale.runner.job" in script


def test_in_a_job_the_container_of_another_node_is_started_under_its_host_agent() -> None:
    placement = Pbs(CONTAINER, None).job_around("12.pbs1", ["localhost", "node7"]).placement
    here, there = started_by_torchrun(placement, "localhost", "node7")
    assert here[: len(APPTAINER)] == APPTAINER
    assert there[:1] + there[-3:-1] == ["ssh", "--", "node7"]
    agent = shlex.join((sys.executable, "-P", "-m", "vitscale.processes.host_agent", str(RUN), "--", *APPTAINER))
    assert f"exec {agent} python3 -P -m torch.distributed.run" in there[-1]


@pytest.mark.parametrize("launcher", ["mpirun", "deepspeed", "srun"])
def test_in_a_container_ranks_are_started_by_torchrun(launcher: str) -> None:
    for scheduler in (Pbs(CONTAINER, None), Pbs(CONTAINER, None).job_around("12.pbs1", ["localhost"]).placement):
        assert "torchrun" in (scheduler.refuses(launcher, ONE) or "")
        assert scheduler.refuses("torchrun", ONE) is None


@pytest.fixture(params=BATCH_SYSTEMS.values(), ids=list(BATCH_SYSTEMS))
def facts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> BatchSystemFacts:
    """Those of each batch system, outside its jobs."""
    for system in BATCH_SYSTEMS.values():
        monkeypatch.delenv(system.job_id_variable, raising=False)
    found = request.param
    assert isinstance(found, BatchSystemFacts)
    return found


def submitted_study(folder: Path, facts: BatchSystemFacts, **measure: float) -> Path:
    launch = {"scheduler": facts.name, "launcher": "torchrun"}
    return write_study(folder, {"launch": launch, "node": {"cores": 8}, "measure": measure})


def test_a_limit_of_gpu_hours_is_refused_in_the_words_of_each(facts: BatchSystemFacts, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        plan(submitted_study(tmp_path, facts, max_gpu_hours=1.0))
    assert f"and jobs of {facts.title} run without one" in str(caught.value)
    assert f"inside an allocation ({facts.allocation_command})" in str(caught.value)


def test_runs_in_turn_are_refused_in_the_words_of_each(facts: BatchSystemFacts, tmp_path: Path) -> None:
    study = submitted_study(tmp_path, facts)
    with pytest.raises(RequestError) as caught:
        sides_of([study, study], tmp_path, repeats=2)
    assert f"inside an allocation ({facts.allocation_command})" in str(caught.value)


def test_a_check_from_a_login_node_is_refused_in_the_words_of_each(facts: BatchSystemFacts, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        check_target(submitted_study(tmp_path, facts), {}, [])
    assert f"this is a login node: {facts.title} names the hosts" in str(caught.value)
    assert facts.allocation_command in str(caught.value)
