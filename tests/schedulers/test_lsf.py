"""LSF: scripts to the letter, and bjobs' answers in the form of its command reference. No LSF runs here."""

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
from vitscale.schedulers.lsf import Lsf
from vitscale.study.sections import NodeSection, SlurmSection
from vitscale.trial.trial import World

NAME = "vitscale-2x4-0123abcd"
TWO_BY_FOUR = World(nodes=2, ranks_per_node=4, threads_per_rank=8)
GPU_JOB = BatchJob(NAME, TWO_BY_FOUR, on_gpus=True, results=Path("/shared/results"), cwd=Path("/home/user/work"))
CPU_JOB = BatchJob(NAME, TWO_BY_FOUR, on_gpus=False, results=Path("/shared/results"), cwd=Path("/home/user/work"))
FIELDS = "jobid job_name stat exit_code exit_reason pend_reason exec_host run_time runtimelimit"


def lsf(**slurm: Any) -> Lsf:
    return Lsf(SlurmSection(**slurm), NodeSection(cores=64, gpus=4))


# --- scripts -------------------------------------------------------------------------------------------------------


def test_the_least() -> None:
    assert (
        lsf().script(CPU_JOB)
        == f"""\
#!/bin/bash
#BSUB -J vitscale-2x4-0123abcd
#BSUB -o /shared/results/jobs/vitscale-2x4-0123abcd.lsf.out
#BSUB -rn
#BSUB -n 64
#BSUB -R "span[ptile=32]"

[ "$0" = /shared/results/jobs/vitscale-2x4-0123abcd.sh ] || exec /bin/bash /shared/results/jobs/vitscale-2x4-0123abcd.sh
exec >> /shared/results/jobs/vitscale-2x4-0123abcd-"$LSB_JOBID".out 2>&1
cd /home/user/work || exit 1
exec {sys.executable} -P -m vitscale.runner.job /shared/results vitscale-2x4-0123abcd
"""
    )


def test_everything() -> None:
    system = lsf(
        partition="gpuq",
        account="vit",
        time="90:30",
        reservation="user-0",
        constraint="model==XeonGold && mem>200000",
        gpu_type="NVIDIAA100",
        python="/opt/env/bin/python",
        options=["-x", '-R "rusage[mem=4GB]"'],
    )
    head, _, body = system.script(GPU_JOB).partition("\n\n")
    assert (
        head
        == """\
#!/bin/bash
#BSUB -J vitscale-2x4-0123abcd
#BSUB -o /shared/results/jobs/vitscale-2x4-0123abcd.lsf.out
#BSUB -rn
#BSUB -n 64
#BSUB -R "select[model==XeonGold && mem>200000] span[ptile=32]"
#BSUB -gpu "num=4:gmodel=NVIDIAA100:j_exclusive=yes"
#BSUB -W 1:31
#BSUB -q gpuq
#BSUB -P vit
#BSUB -U user-0
#BSUB -x
#BSUB -R "rusage[mem=4GB]\""""
    )
    assert "exec timeout --foreground --signal=TERM 5370s /opt/env/bin/python -P -m" in body


@pytest.mark.parametrize(
    ("slurm", "said"),
    [
        ({"qos": "high"}, "slurm.qos = 'high' has no meaning under launch.scheduler = 'lsf'"),
        ({"constraint": 'a"] b'}, "under LSF it selects hosts"),
        ({"nodelist": "node1"}, "slurm.nodelist names 1 nodes, and a trial needs 2"),
        ({"nodelist": "node[1-2]", "options": ["-m node3"]}, "say slurm.nodelist"),
        ({"options": ["-n 4"]}, "it follows from each trial's world"),
        ({"options": ['-R "span[hosts=1]"']}, "it follows from each trial's world"),
        ({"options": ["-W 60"]}, "say slurm.time"),
        ({"options": ["-oo here"]}, "vitscale sets it"),
        ({"options": ["echo"]}, "it is no option of bsub"),
    ],
)
def test_what_is_refused(slurm: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        lsf(**slurm).script(GPU_JOB)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("slurm", "options"),
    [
        ({"nodelist": "node[1-3]"}, ['-R "span[ptile=32]"', '-m "node1 node2"']),
        ({"nodelist": "node[1-3]", "exclude": "node2"}, ['-R "span[ptile=32]"', '-m "node1 node3"']),
        ({"exclude": "node[1-2]"}, ["-R \"select[type==local && hname!='node1' && hname!='node2'] span[ptile=32]\""]),
        (
            {"exclude": "node3", "constraint": "mem>9 || fast"},
            ["-R \"select[(mem>9 || fast) && hname!='node3'] span[ptile=32]\""],
        ),
        ({"options": ["-m node3"]}, ['-R "span[ptile=32]"', "-m node3"]),
    ],
)
def test_nodes_by_name(slurm: dict[str, Any], options: list[str]) -> None:
    lines = lsf(**slurm).script(CPU_JOB).splitlines()
    assert [line.removeprefix("#BSUB ") for line in lines if line.startswith(("#BSUB -R", "#BSUB -m"))] == options


# --- jobs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BatchPrograms:
    return BatchPrograms(tmp_path, monkeypatch, "bsub", "bjobs", "bhosts")


# As `bjobs -json -o` writes a job that runs (LSF 10.1): all values are texts, and times have units.
RUNNING = {
    "JOBID": "806290",
    "JOB_NAME": NAME,
    "STAT": "RUN",
    "EXIT_CODE": "",
    "EXIT_REASON": "",
    "PEND_REASON": "",
    "EXEC_HOST": "32*node1:32*node2",
    "RUN_TIME": "600 second(s)",
    "RUNTIMELIMIT": "120.0",
}


def records(program: str, *each: dict[str, str]) -> str:
    return json.dumps({"COMMAND": program, "JOBS": len(each), "RECORDS": list(each)}, indent=2)


def answer(**changes: str) -> str:
    return records("bjobs", RUNNING | changes)


def test_a_script_is_read_by_bsub(programs: BatchPrograms, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(lsf().script(GPU_JOB))
    programs.answers("bsub", out="Cannot connect to LSF. Please wait ...\nJob <806290> is submitted to queue <gpuq>.\n")
    assert lsf().submit(script) == "806290"
    assert programs.calls() == [["bsub"]]
    assert programs.read() == script.read_text()
    programs.answers("bsub", err="gpux: No such queue. Job not submitted.\n", code=255)
    with pytest.raises(SchedulerError, match=r"^LSF refuses `bsub`: gpux: No such queue\. Job not submitted\.$"):
        lsf().submit(script)
    programs.answers("bsub", err="LSF is down. Please wait ...\n", code=255)
    with pytest.raises(SchedulerSilentError):
        lsf().submit(script)
    programs.answers("bsub", out="fine\n")
    with pytest.raises(SchedulerError, match="bsub does not say the job's number, but 'fine'"):
        lsf().submit(script)


@pytest.mark.parametrize(
    ("changes", "state", "reason", "over"),
    [
        ({"STAT": "PEND", "PEND_REASON": "New job is waiting for scheduling;"},
         "PENDING", "New job is waiting for scheduling", False),
        ({}, "RUNNING", "", False),
        ({"STAT": "SSUSP"}, "SUSPENDED", "", False),
        ({"STAT": "UNKWN"}, "NODE_UNREACHABLE", "", False),
        ({"STAT": "DONE"}, "COMPLETED", "", True),
        ({"STAT": "EXIT", "EXIT_CODE": "1"}, "FAILED", "", True),
    ],
)  # fmt: skip
def test_states(programs: BatchPrograms, changes: dict[str, str], state: str, reason: str, over: bool) -> None:
    other = RUNNING | {"JOB_NAME": "vitscale-1x1-00000000"}
    programs.answers("bjobs", out=records("bjobs", RUNNING | changes, other))
    assert lsf().states([NAME]) == [JobState("806290", NAME, None, state, reason, over)]
    assert programs.calls() == [["bjobs", "-a", "-json", "-o", FIELDS, "-J", "vitscale-*"]]


@pytest.mark.parametrize(
    ("out", "err", "code"),
    [
        ('{"COMMAND":"bjobs","JOBS":0,"RECORDS":[]}', "", 0),
        ("", "Job <vitscale-*> is not found\n", 255),
        ("", "No job found\n", 0),
        (records("bjobs", {"JOBID": "7", "ERROR": "Job <7> is not found"}), "", 255),
    ],
)
def test_jobs_that_nobody_knows_have_no_state(programs: BatchPrograms, out: str, err: str, code: int) -> None:
    programs.answers("bjobs", out=out, err=err, code=code)
    assert lsf().states([NAME]) == []
    assert lsf().cause("7") == Cause("failed", "job 7 ended before this run was done; LSF does not say why (any more)")


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({"STAT": "EXIT", "EXIT_CODE": "3"}, "failed",
         "the driver of job 806290 ended with exit code 3 before this run was done"),
        ({"STAT": "EXIT", "EXIT_CODE": "137"}, "failed",
         "the driver of job 806290 was ended by signal 9 before this run was done"),
        ({"STAT": "DONE"}, "failed", "the driver of job 806290 ended with exit code 0 before this run was done"),
        ({"STAT": "EXIT", "EXIT_CODE": "140",
          "EXIT_REASON": "TERM_RUNLIMIT: job killed after reaching LSF run time limit"}, "timeout",
         "the job's time limit of 120 minutes was reached (slurm.time, job 806290)"),
        ({"STAT": "EXIT", "EXIT_CODE": "130", "EXIT_REASON": "TERM_OWNER: job killed by owner"}, "failed",
         "cancelled by bkill (job 806290)"),
        ({"STAT": "EXIT", "EXIT_REASON": "TERM_PREEMPT: job killed after preemption"}, "failed",
         "preempted by a job of higher priority (job 806290)"),
        ({"STAT": "EXIT", "EXIT_REASON": "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit"}, "failed",
         "LSF ended it: TERM_MEMLIMIT: job killed after reaching LSF memory usage limit (job 806290)"),
        ({}, "failed", "cancelled by bkill, or ended by a signal from outside LSF (job 806290)"),
        ({"RUN_TIME": "7150 second(s)"}, "timeout",
         "the job's time limit of 120 minutes was reached (slurm.time, job 806290)"),
        ({"RUN_TIME": "01:59:10", "RUNTIMELIMIT": "02:00:00"}, "timeout",
         "the job's time limit of 120 minutes was reached (slurm.time, job 806290)"),
    ],
)  # fmt: skip
def test_why_a_job_ended(programs: BatchPrograms, changes: dict[str, str], kind: str, reason: str) -> None:
    programs.answers("bjobs", out="Please wait ...\n" + answer(**changes))
    assert lsf().cause("806290") == Cause(kind, reason)  # type: ignore[arg-type]  # a kind of outcome
    assert programs.calls() == [["bjobs", "-a", "-json", "-o", FIELDS, "806290"]]


def test_the_host_that_lsf_does_not_reach_is_named(programs: BatchPrograms) -> None:
    programs.answers("bjobs", out=answer(STAT="ZOMBI"))
    statuses = ({"HOST_NAME": "node1", "STATUS": "closed_Full"}, {"HOST_NAME": "node2", "STATUS": "unavail"})
    programs.answers("bhosts", out=records("bhosts", *statuses))
    assert lsf().cause("806290") == Cause("failed", "node failed: node2 (job 806290)", "node2")
    assert programs.calls()[-1] == ["bhosts", "-json", "-o", "host_name status", "node1", "node2"]
    programs.answers("bhosts", out="garbage")
    assert lsf().cause("806290") == Cause("failed", "a node of the job failed (job 806290 on node1, node2)")


@pytest.mark.parametrize("garbage", ["{", "<html>", '{"RECORDS": [1, null, {}]}', '{"RECORDS": 7}'])
def test_answers_that_cannot_be_read(programs: BatchPrograms, garbage: str) -> None:
    programs.answers("bjobs", out=garbage)
    assert lsf().cause("12").reason == "job 12 ended before this run was done; LSF does not say why (any more)"
    if "RECORDS" in garbage:
        assert lsf().states([NAME]) == []
    else:
        with pytest.raises(SchedulerError, match="the answer of `bjobs` is no JSON"):
            lsf().states([NAME])


def test_lsf_that_is_down_is_waited_for(programs: BatchPrograms) -> None:
    programs.answers("bjobs", err="LSF is down. Please wait ...\n", code=255)
    with pytest.raises(SchedulerSilentError):
        lsf().states([NAME])
    programs.answers("bjobs", err="User permission denied\n", code=255)
    with pytest.raises(SchedulerError, match="LSF refuses `bjobs`: User permission denied"):
        lsf().states([NAME])


# --- the job around this process -----------------------------------------------------------------------------------


def test_a_job_goes_on_while_lsf_only_does_not_hear_from_its_host(
    programs: BatchPrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LSB_JOBID", "806290")
    monkeypatch.setenv("LSB_MCPU_HOSTS", "node1 32")
    own = lsf().own_job()
    assert own is not None
    programs.answers("bjobs", out=answer(STAT="UNKWN"))
    assert own.placement.lost() is None
    programs.answers("bjobs", out=answer(STAT="EXIT", EXIT_REASON="TERM_OWNER: job killed by owner"))
    assert own.placement.lost() == Cause("failed", "cancelled by bkill (job 806290)")


def test_the_hosts_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are cores, and say nothing about ranks."""
    for name in ("LSB_JOBID", "LSB_DJOB_HOSTFILE", "LSB_MCPU_HOSTS"):
        monkeypatch.delenv(name, raising=False)
    assert lsf().own_job() is None
    monkeypatch.setenv("LSB_JOBID", "806290")
    monkeypatch.setenv("LSB_MCPU_HOSTS", "node1 32 node2 32 ")
    own = lsf().own_job()
    assert own is not None
    assert (own.job_id, own.nodes) == ("806290", "node1 node2")
    assert own.placement.hosts(TWO_BY_FOUR) == (Host("node1"), Host("node2"))
    host_file = tmp_path / "hosts"
    host_file.write_text("node3\n" * 32 + "node4\n" * 32)
    monkeypatch.setenv("LSB_DJOB_HOSTFILE", str(host_file))
    own = lsf().own_job()
    assert own is not None
    assert own.placement.pool() == (Host("node3"), Host("node4"))
