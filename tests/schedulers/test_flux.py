"""Flux: scripts to the letter, and the answers of `flux jobs --json` in the form of its source. No Flux runs here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from batch_programs import BatchPrograms
from vitscale.errors import RequestError
from vitscale.machine.hosts import Host
from vitscale.schedulers.base import BatchJob, Cause, JobState, SchedulerError, SchedulerSilentError
from vitscale.schedulers.flux import Flux
from vitscale.study.sections import NodeSection, SlurmSection
from vitscale.trial.trial import World

NAME = "vitscale-2x4-0123abcd"
TWO_BY_FOUR = World(nodes=2, ranks_per_node=4, threads_per_rank=8)
GPU_JOB = BatchJob(NAME, TWO_BY_FOUR, on_gpus=True, results=Path("/shared/results"), cwd=Path("/home/user/work"))
CPU_JOB = BatchJob(NAME, TWO_BY_FOUR, on_gpus=False, results=Path("/shared/results"), cwd=Path("/home/user/work"))
JOB = "1234567890"


@pytest.fixture(autouse=True)
def _outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLUX_URI", "FLUX_ENCLOSING_ID"):
        monkeypatch.delenv(name, raising=False)


def flux(**slurm: Any) -> Flux:
    return Flux(SlurmSection(**slurm), NodeSection(cores=64, gpus=4))


# --- scripts -------------------------------------------------------------------------------------------------------


def test_the_least() -> None:
    assert (
        flux().script(CPU_JOB)
        == f"""\
#!/bin/bash
# flux: --job-name=vitscale-2x4-0123abcd
# flux: --output=/shared/results/jobs/vitscale-2x4-0123abcd.flux.out
# flux: --nodes=2
# flux: --nslots=8
# flux: --cores-per-slot=8

[ "$0" = /shared/results/jobs/vitscale-2x4-0123abcd.sh ] || exec /bin/bash /shared/results/jobs/vitscale-2x4-0123abcd.sh
exec >> /shared/results/jobs/vitscale-2x4-0123abcd-"$(flux job id --to=dec "$(flux getattr jobid)")".out 2>&1
cd /home/user/work || exit 1
exec {sys.executable} -P -m vitscale.runner.job /shared/results vitscale-2x4-0123abcd
"""
    )


def test_everything() -> None:
    system = flux(
        partition="pbatch",
        account="vit",
        time="2:00:00",
        constraint="mi300 and -host:node7",
        python="/opt/env/bin/python",
        options=["--exclusive", "--setattr=user.note='a b'"],
    )
    head, _, body = system.script(GPU_JOB).partition("\n\n")
    assert (
        head
        == """\
#!/bin/bash
# flux: --job-name=vitscale-2x4-0123abcd
# flux: --output=/shared/results/jobs/vitscale-2x4-0123abcd.flux.out
# flux: --nodes=2
# flux: --nslots=8
# flux: --cores-per-slot=8
# flux: --gpus-per-slot=1
# flux: --time-limit=7200s
# flux: --queue=pbatch
# flux: --bank=vit
# flux: --requires='mi300 and -host:node7'
# flux: --exclusive
# flux: --setattr=user.note='a b'"""
    )
    assert "exec timeout --foreground --signal=TERM 7140s /opt/env/bin/python -P -m" in body


@pytest.mark.parametrize(
    ("slurm", "said"),
    [
        ({"reservation": "r"}, "slurm.reservation = 'r' has no meaning under launch.scheduler = 'flux'"),
        ({"constraint": "a\nb"}, "slurm.constraint is 'a\\nb'"),
        ({"options": ["--nodes=4"]}, "it follows from each trial's world"),
        ({"options": ["-N4"]}, "it is no long option of flux batch"),
        ({"options": ["--time-limit=4h"]}, "say slurm.time"),
    ],
)
def test_what_is_refused(slurm: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        flux(**slurm).script(GPU_JOB)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("slurm", "required"),
    [
        ({"nodelist": "node[1-3]"}, "host:node1,node2"),
        ({"nodelist": "node[1-3]", "exclude": "node2", "constraint": "a|b"}, "'host:node1,node3 and (a|b)'"),
        ({"exclude": "node[1-2]"}, "-host:node1,node2"),
        ({"exclude": "node3", "constraint": "mi300"}, "'-host:node3 and (mi300)'"),
    ],
)
def test_nodes_by_name(slurm: dict[str, Any], required: str) -> None:
    lines = flux(**slurm).script(CPU_JOB).splitlines()
    assert [line for line in lines if "requires" in line] == [f"# flux: --requires={required}"]


# --- jobs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BatchPrograms:
    return BatchPrograms(tmp_path, monkeypatch, "flux")


# As `flux jobs --json` writes a job that runs (flux-core 0.8x), shortened: what is not known yet is missing.
RUNNING: dict[str, Any] = {
    "t_submit": 1795833000.0,
    "t_run": 1795833400.5,
    "duration": 7200.0,
    "expiration": 1795840600.0,
    "name": NAME,
    "queue": "pbatch",
    "ntasks": 2,
    "nnodes": 2,
    "ranks": "[3-4]",
    "nodelist": "node[1-2]",
    "id": int(JOB),
    "jobid": "fABCD12",
    "t_remaining": 6600.0,
    "state": "RUN",
    "status": "RUN",
    "runtime": 600.0,
    "exception": {"occurred": False},
}


def ended(result: str, returncode: int, exception: dict[str, Any] | None = None) -> dict[str, Any]:
    lasting = {key: value for key, value in RUNNING.items() if key != "t_remaining"}
    happened = {"occurred": True, "severity": 0, "note": ""} | exception if exception else {"occurred": False}
    return lasting | {"state": "INACTIVE", "result": result, "returncode": returncode, "exception": happened}


def test_a_script_is_submitted_and_its_id_is_decimal(programs: BatchPrograms, tmp_path: Path) -> None:
    programs.answers("flux-batch", out="ƒABCD12\n")
    programs.answers("flux-job-id", out=f"{JOB}\n")
    assert flux().submit(tmp_path / "job.sh") == JOB
    assert programs.calls() == [
        ["flux", "batch", str(tmp_path / "job.sh")],
        ["flux", "job", "id", "--to=dec", "--", "ƒABCD12"],
    ]
    programs.answers("flux-job-id", out="what\n")
    with pytest.raises(SchedulerError, match="flux does not say the job's id, but 'what'"):
        flux().submit(Path("job.sh"))
    programs.answers("flux-batch", err="flux-batch: ERROR: [Errno 22] unsatisfiable request\n", code=1)
    with pytest.raises(SchedulerError, match=r"^Flux refuses `flux`: flux-batch: ERROR"):
        flux().submit(Path("job.sh"))
    programs.answers("flux-batch", err="flux-batch: ERROR: Unable to connect to Flux: broker is down\n", code=1)
    with pytest.raises(SchedulerSilentError):
        flux().submit(Path("job.sh"))


@pytest.mark.parametrize(
    ("job", "state", "over"),
    [
        (RUNNING | {"state": "SCHED"}, "PENDING", False),
        (RUNNING, "RUNNING", False),
        (RUNNING | {"state": "CLEANUP"}, "COMPLETING", False),
        (ended("COMPLETED", 0), "COMPLETED", True),
        (ended("FAILED", 1), "FAILED", True),
    ],
)
def test_states(programs: BatchPrograms, job: dict[str, Any], state: str, over: bool) -> None:
    programs.answers("flux-jobs", out=json.dumps({"jobs": [job]}))
    assert flux().states([NAME]) == [JobState(JOB, NAME, None, state, "", over)]
    assert programs.calls() == [["flux", "jobs", "-a", "--json", f"--name={NAME}"]]


def test_jobs_that_nobody_knows_have_no_state(programs: BatchPrograms) -> None:
    programs.answers("flux-jobs", out='{"jobs": []}\n')
    assert flux().states([NAME]) == []


@pytest.mark.parametrize(
    ("job", "kind", "reason"),
    [
        (ended("FAILED", 3, {"type": "exec", "note": "task exited"}), "failed",
         f"the driver of job {JOB} ended with exit code 3 before this run was done"),
        (ended("FAILED", 137), "failed", f"the driver of job {JOB} was ended by signal 9 before this run was done"),
        (ended("FAILED", -9), "failed", f"the driver of job {JOB} was ended by signal 9 before this run was done"),
        (ended("TIMEOUT", 142, {"type": "timeout", "note": "resource allocation expired"}), "timeout",
         f"the job's time limit of 02:00:00 was reached (slurm.time, job {JOB})"),
        (ended("CANCELED", -128, {"type": "cancel", "note": ""}), "failed", f"cancelled by flux cancel (job {JOB})"),
        (ended("FAILED", 1, {"type": "alloc", "note": "no such nodes"}), "failed",
         f"Flux ended it: alloc: no such nodes (job {JOB})"),
        (RUNNING, "failed", f"cancelled by flux cancel, or ended by a signal from outside Flux (job {JOB})"),
        (RUNNING | {"t_remaining": 58.0}, "timeout",
         f"the job's time limit of 02:00:00 was reached (slurm.time, job {JOB})"),
    ],
)  # fmt: skip
def test_why_a_job_ended(programs: BatchPrograms, job: dict[str, Any], kind: str, reason: str) -> None:
    programs.answers("flux-jobs", out=json.dumps(job))
    assert flux().cause(JOB) == Cause(kind, reason)  # type: ignore[arg-type]  # a kind of outcome
    assert programs.calls() == [["flux", "jobs", "--json", JOB]]


def test_the_node_that_failed_is_in_the_note(programs: BatchPrograms) -> None:
    note = "node failure on node2 (shell rank 1)"
    programs.answers("flux-jobs", out=json.dumps(ended("FAILED", 1, {"type": "exec", "note": note})))
    assert flux().cause(JOB) == Cause("failed", f"node failed: node2 (exec: {note}) (job {JOB})", "node2")


@pytest.mark.parametrize(
    ("out", "err", "code"),
    [
        ("", f"flux-jobs: ERROR: JobID {JOB} unknown\n", 1),
        ("{", "", 0),
        ("[]", "", 0),
        ('{"state": 7}', "", 0),
    ],
)
def test_a_job_that_is_forgotten_or_an_answer_that_cannot_be_read(
    programs: BatchPrograms, out: str, err: str, code: int
) -> None:
    programs.answers("flux-jobs", out=out, err=err, code=code)
    reason = flux().cause(JOB).reason
    assert "Flux does not say why" in reason or "signal from outside Flux" in reason


# --- the job around this process -----------------------------------------------------------------------------------


@pytest.fixture
def inside(programs: BatchPrograms, monkeypatch: pytest.MonkeyPatch) -> BatchPrograms:
    monkeypatch.setenv("FLUX_URI", "local:///tmp/flux-abc/local-0")
    monkeypatch.setenv("FLUX_ENCLOSING_ID", "ƒABCD12")
    programs.answers("flux-job-id", out=f"{JOB}\n")
    programs.answers("flux-getattr-hostlist", out="node[1-2]\n")
    programs.answers("flux-hostlist", out="node1 node2\n")
    return programs


def test_the_hosts_of_the_job(inside: BatchPrograms) -> None:
    own = flux().own_job()
    assert own is not None
    assert (own.job_id, own.nodes) == (JOB, "node1 node2")
    assert own.placement.hosts(TWO_BY_FOUR) == (Host("node1"), Host("node2"))
    assert ["flux", "hostlist", "--expand", "node[1-2]"] in inside.calls()


def test_a_job_asks_the_instance_that_it_was_submitted_to(inside: BatchPrograms) -> None:
    inside.answers("flux-jobs", out=json.dumps({"jobs": [RUNNING]}))
    assert [state.state for state in flux().states([NAME])] == ["RUNNING"]
    assert inside.calls() == [["flux", "--parent", "jobs", "-a", "--json", f"--name={NAME}"]]


def test_an_older_flux_is_asked_for_the_id(inside: BatchPrograms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLUX_ENCLOSING_ID")
    inside.answers("flux-getattr-jobid", out="ƒABCD12\n")
    own = flux().own_job()
    assert own is not None
    assert own.job_id == JOB


def test_an_instance_that_is_no_job_has_none(programs: BatchPrograms, monkeypatch: pytest.MonkeyPatch) -> None:
    assert flux().own_job() is None
    monkeypatch.setenv("FLUX_URI", "local:///run/flux/local")
    programs.answers("flux-getattr", err="flux-getattr: jobid: No such file or directory\n", code=1)
    assert flux().own_job() is None
