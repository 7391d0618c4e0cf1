"""PBS Pro: scripts to the letter, and qstat's answers in the form of OpenPBS's source. No PBS runs here."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from batch_programs import BatchPrograms
from vitscale.errors import RequestError
from vitscale.machine.hosts import Host
from vitscale.schedulers.base import BatchJob, Cause, JobState, SchedulerError, SchedulerSilentError
from vitscale.schedulers.pbs import Pbs
from vitscale.study.sections import NodeSection, SlurmSection, SlurmSize
from vitscale.trial.trial import World

NAME = "vitscale-2x4-0123abcd"
JOB = "12.pbs1"
TWO_BY_FOUR = World(nodes=2, ranks_per_node=4, threads_per_rank=8)


def job(**changes: object) -> BatchJob:
    given: dict[str, object] = {
        "name": NAME,
        "world": TWO_BY_FOUR,
        "on_gpus": True,
        "results": Path("/shared/results"),
        "cwd": Path("/home/user/work"),
    }
    return BatchJob(**(given | changes))  # type: ignore[arg-type]  # fields of a job


def pbs(**slurm: Any) -> Pbs:
    return Pbs(SlurmSection(**slurm), NodeSection(cores=64, gpus=4))


# --- scripts -------------------------------------------------------------------------------------------------------


def test_the_least() -> None:
    assert (
        pbs().script(job(on_gpus=False))
        == f"""\
#!/bin/bash
#PBS -N vitscale-2x4-0123abcd
#PBS -S /bin/bash
#PBS -j oe
#PBS -o /shared/results/jobs/vitscale-2x4-0123abcd.pbs.out
#PBS -r n
#PBS -l select=2:ncpus=32:mpiprocs=4
#PBS -l place=scatter

[ "$0" = /shared/results/jobs/vitscale-2x4-0123abcd.sh ] || exec /bin/bash /shared/results/jobs/vitscale-2x4-0123abcd.sh
exec >> /shared/results/jobs/vitscale-2x4-0123abcd-"$PBS_JOBID".out 2>&1
cd /home/user/work || exit 1
exec {sys.executable} -P -m vitscale.runner.job /shared/results vitscale-2x4-0123abcd
"""
    )


def test_everything() -> None:
    system = pbs(
        partition="gpuq",
        account="vit",
        time="1-02:00:00",
        constraint="gpu_model=a100:mem=200gb",
        modules=["cuda/12.4"],
        setup=["export NCCL_DEBUG=INFO"],
        python="/opt/my env/python",
        options=["-l place=scatter:excl", "-W group_list=vit", "-m e"],
    )
    head, _, body = system.script(job()).partition("\n\n")
    assert (
        head
        == """\
#!/bin/bash
#PBS -N vitscale-2x4-0123abcd
#PBS -S /bin/bash
#PBS -j oe
#PBS -o /shared/results/jobs/vitscale-2x4-0123abcd.pbs.out
#PBS -r n
#PBS -l select=2:ncpus=32:mpiprocs=4:ngpus=4:gpu_model=a100:mem=200gb
#PBS -l walltime=26:00:00
#PBS -q gpuq
#PBS -A vit
#PBS -l place=scatter:excl
#PBS -W group_list=vit
#PBS -m e"""
    )
    assert body.index("module load cuda/12.4\n") < body.index("export NCCL_DEBUG=INFO\n")
    assert body.endswith(
        "exec timeout --foreground --signal=TERM 93540s '/opt/my env/python' -P -m vitscale.runner.job "
        "/shared/results vitscale-2x4-0123abcd\n"
    )


def test_nodes_by_name_have_a_chunk_each() -> None:
    script = pbs(nodelist="node[01-04]", exclude="node02", constraint="mem=200gb").script(job())
    chunk = "1:ncpus=32:mpiprocs=4:ngpus=4:mem=200gb"
    assert f"#PBS -l select={chunk}:host=node01+{chunk}:host=node03\n" in script


def test_jobs_of_many_nodes_have_another_queue_and_time() -> None:
    system = pbs(partition="small", time="60", sizes=[SlurmSize(min_nodes=2, partition="large", time="4")])
    large = system.script(job())
    assert "#PBS -l walltime=00:04:00\n#PBS -q large\n" in large
    assert "--signal=TERM 180s" in large
    small = system.script(job(world=World(nodes=1, ranks_per_node=4, threads_per_rank=8)))
    assert "#PBS -l walltime=01:00:00\n#PBS -q small\n" in small


def test_gpus_that_are_not_asked_for() -> None:
    assert "ngpus" not in pbs(gpus="none").script(job())


@pytest.mark.parametrize(
    ("slurm", "said"),
    [
        ({"qos": "high"}, "slurm.qos = 'high' has no meaning under launch.scheduler = 'pbs'. Name the queue in"),
        (
            {"jobs": "array"},
            "slurm.jobs = 'array' has no meaning under launch.scheduler = 'pbs'. Leave it out",
        ),
        ({"exclude": "node3"}, "slurm.exclude = 'node3' has no meaning under launch.scheduler = 'pbs' without slurm.n"),
        ({"sizes": [{"min_nodes": 2, "qos": "big"}]}, "slurm.sizes[0].qos = 'big' has no meaning under"),
        ({"srun_options": ["--mem=0"]}, "They are options of Slurm's srun; write the jobs' own in slurm.options"),
        ({"container": "vit", "container_runtime": "pyxis"}, "slurm.container_runtime = 'pyxis' is a plug-in of Slurm"),
        ({"container": "vit.sif", "container_mounts": ["/data"]}, "slurm.container_mounts has '/data'"),
        ({"gpu_type": "a100"}, "Ask for the GPUs' model by slurm.constraint"),
        ({"gpus": "gres"}, "slurm.gpus = 'gres' is a form of Slurm's"),
    ],
)
def test_settings_that_are_slurms_alone_are_refused(slurm: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        pbs(**slurm)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("slurm", "changes", "said"),
    [
        ({"partition": "gpu q"}, {}, "slurm.partition is 'gpu q', which cannot stand in a script of PBS"),
        ({"account": "a\n#PBS -q b"}, {}, "slurm.account is 'a\\n#PBS -q b'"),
        ({"modules": ["-h"]}, {}, "slurm.modules has '-h'"),
        ({"constraint": "a=b+1:c=d"}, {}, "slurm.constraint is 'a=b+1:c=d'"),
        ({"options": ["-q other"]}, {}, "slurm.options has '-q other'. Remove it: say slurm.partition"),
        ({"options": ["-l walltime=1:00:00"]}, {}, "say slurm.time"),
        ({"options": ["-l mem=1gb,select=4"]}, {}, "it follows from each trial's world"),
        ({"options": ["-o here"]}, {}, "vitscale sets it"),
        ({"options": ["echo"]}, {}, "it is no option of qsub"),
        ({"options": ["-m e\nrm"]}, {}, "it is no line of printable characters"),
        ({}, {"results": Path("/a b")}, "the results folder is '/a b', which cannot stand in a script of PBS"),
        ({}, {"cwd": Path("/a:b")}, "the working directory is '/a:b'"),
    ],
)
def test_what_cannot_stand_in_a_script(slurm: dict[str, Any], changes: dict[str, object], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        pbs(**slurm).script(job(**changes))
    assert said in str(caught.value)


# --- planning ------------------------------------------------------------------------------------------------------


def test_trials_are_planned_for_the_node_that_is_described() -> None:
    assert (pbs().machine().cores, pbs().slots()) == (64, 4)
    with pytest.raises(RequestError, match=r"launch.scheduler = 'pbs' submits jobs to nodes that"):
        Pbs(SlurmSection(), None).machine()


def test_every_launcher_but_srun_can_start_ranks() -> None:
    refused = {name for name in ("srun", "torchrun", "mpirun", "deepspeed") if pbs().refuses(name, TWO_BY_FOUR)}
    assert refused == {"srun"}
    assert pbs().hosts(TWO_BY_FOUR) == (Host("node1.invalid"), Host("node2.invalid"))


# --- jobs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BatchPrograms:
    return BatchPrograms(tmp_path, monkeypatch, "qsub", "qselect", "qstat", "pbsnodes")


# As `qstat -f -F json` writes a job that runs (OpenPBS 23), shortened.
RUNNING: dict[str, Any] = {
    "Job_Name": NAME,
    "Job_Owner": "user@login1",
    "job_state": "R",
    "queue": "gpuq",
    "server": "pbs1",
    "exec_host": "node1/0*32+node2/0*32",
    "exec_vnode": "(node1:ncpus=32:ngpus=4)+(node2:ncpus=32:ngpus=4)",
    "Resource_List": {"ncpus": 64, "ngpus": 8, "nodect": 2, "place": "scatter", "walltime": "02:00:00"},
    "resources_used": {"cpupercent": 0, "walltime": "00:10:00"},
    "stime": "Sat Nov 28 03:00:00 2026",
    "substate": 42,
    "comment": "Job run at Sat Nov 28 at 03:00 on (node1:ncpus=32:ngpus=4)+(node2:ncpus=32:ngpus=4)",
    "Variable_List": {"PBS_O_HOME": "/home/user", "PBS_O_PATH": "/usr/bin"},
}
RAN = RUNNING["comment"]


def answer(**changes: Any) -> str:
    fields = {key: value for key, value in (RUNNING | changes).items() if value is not None}
    prolog = {"timestamp": 1795834006, "pbs_version": "23.06.06", "pbs_server": "pbs1"}
    return json.dumps(prolog | {"Jobs": {JOB: fields}}, indent=4)


def finished(comment: str, substate: int, status: int | None) -> str:
    return answer(job_state="F", comment=f"{RAN} and {comment}", substate=substate, Exit_status=status)


def started(seconds_ago: float) -> str:
    return time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(time.time() - seconds_ago))


def test_a_script_is_submitted(programs: BatchPrograms, tmp_path: Path) -> None:
    programs.answers("qsub", out="site: 10 hours are left\n12.pbs1\n")
    assert pbs().submit(tmp_path / "a job.sh") == JOB
    assert programs.calls() == [["qsub", str(tmp_path / "a job.sh")]]


def test_a_refusal_is_told_in_its_words(programs: BatchPrograms) -> None:
    programs.answers("qsub", err="qsub: Unknown queue\n", code=169)
    with pytest.raises(SchedulerError, match=r"^PBS refuses `qsub`: qsub: Unknown queue\.$"):
        pbs().submit(Path("job.sh"))
    programs.answers("qsub", out="queued\n")
    with pytest.raises(SchedulerError, match="qsub does not say the job's id, but 'queued'"):
        pbs().submit(Path("job.sh"))
    programs.answers("qsub", err="qsub: cannot connect to server pbs1 (errno=111)\n", code=111)
    with pytest.raises(SchedulerSilentError, match="PBS does not answer: qsub: cannot connect to server pbs1"):
        pbs().submit(Path("job.sh"))


@pytest.mark.parametrize(
    ("said", "state"),
    [
        (answer(job_state="Q", comment="Not Running: Insufficient amount of resource: ngpus", exec_host=None),
         JobState(JOB, NAME, None, "PENDING", "Not Running: Insufficient amount of resource: ngpus", over=False)),
        (answer(), JobState(JOB, NAME, None, "RUNNING", RAN, over=False)),
        (answer(job_state="E", substate=50), JobState(JOB, NAME, None, "EXITING", RAN, over=False)),
        (answer(job_state="M"), JobState(JOB, NAME, None, "MOVED", RAN, over=False)),
        (finished("finished", 92, 0), JobState(JOB, NAME, None, "FINISHED", f"{RAN} and finished", over=True)),
        (answer(Job_Name="another"), None),
    ],
)  # fmt: skip
def test_states(programs: BatchPrograms, said: str, state: JobState | None) -> None:
    programs.answers("qselect", out=f"{JOB}\n")
    programs.answers("qstat", out=said)
    assert pbs().states([NAME]) == ([state] if state else [])
    assert programs.calls() == [
        ["qselect", "-x", "-N", NAME],
        ["qstat", "-x", "-f", "-F", "json", JOB],
    ]


def test_jobs_that_nobody_knows_have_no_state(programs: BatchPrograms) -> None:
    assert pbs().states([NAME]) == []
    assert pbs().states([]) == []
    assert programs.calls() == [["qselect", "-x", "-N", NAME]]


def test_without_a_history_only_living_jobs_are_found(programs: BatchPrograms) -> None:
    """qselect then ends with code 0, as if there were no job."""
    programs.answers("qselect", err="qselect: PBS is not configured to maintain job history\n")
    programs.answers("qselect--N", out=f"{JOB}\n")
    programs.answers("qstat--x", err="qstat: PBS is not configured to maintain job history\n", code=36)
    programs.answers("qstat--f", out=answer())
    assert [state.state for state in pbs().states([NAME])] == ["RUNNING"]


SIGNALLED = Cause("failed", f"the driver of job {JOB} was ended by signal 9 before this run was done")
CANCELLED = Cause("failed", f"cancelled by qdel (job {JOB})")
TIMEOUT = Cause("timeout", f"the job's time limit of 02:00:00 was reached (slurm.time, job {JOB})")


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (finished("finished", 92, 3),
         Cause("failed", f"the driver of job {JOB} ended with exit code 3 before this run was done")),
        (finished("failed", 93, 265), SIGNALLED),
        (finished("failed", 93, 137), SIGNALLED),
        (finished("exceeded resource walltime", 93, -29), TIMEOUT),
        (finished("exceeded resource mem", 93, -27),
         Cause("failed", f"PBS ended it: exceeded resource mem (job {JOB})")),
        (finished("terminated by user@login1", 91, 271), CANCELLED),
        (answer(job_state="F", substate=91, exec_host=None, comment=None), CANCELLED),
    ],
)  # fmt: skip
def test_why_a_job_ended(programs: BatchPrograms, said: str, cause: Cause) -> None:
    programs.answers("qstat", out=said)
    assert pbs().cause(JOB) == cause
    assert programs.calls() == [["qstat", "-x", "-f", "-F", "json", JOB]]


def test_a_job_that_is_being_ended_is_near_its_limit_or_cancelled(programs: BatchPrograms) -> None:
    """Its driver asks while it runs."""
    programs.answers("qstat", out=answer(stime=started(600)))
    assert pbs().cause(JOB).reason == f"cancelled by qdel, or ended by a signal from outside PBS (job {JOB})"
    programs.answers("qstat", out=answer(stime=started(7_150)))
    assert pbs().cause(JOB) == TIMEOUT


@pytest.mark.parametrize("said", [finished("failed", 93, None), finished("failed", 93, -20)])
def test_the_node_that_failed_is_named_where_it_is_known_as_down(programs: BatchPrograms, said: str) -> None:
    programs.answers("qstat", out=said)
    programs.answers("pbsnodes", out="node2.cluster        state-unknown,down\nnode7        down\n")
    comment = f"{RAN} and failed"
    assert pbs().cause(JOB) == Cause("failed", f"node failed: node2 ({comment}) (job {JOB})", "node2")
    assert programs.calls()[-1] == ["pbsnodes", "-l"]
    programs.answers("pbsnodes", err="pbsnodes: Unauthorized Request\n", code=1)
    assert pbs().cause(JOB) == Cause("failed", f"a node of the job failed ({comment}) (job {JOB} on node1, node2)")


FORGOTTEN = Cause("failed", f"job {JOB} ended before this run was done; PBS does not say why (any more)")


def test_a_job_that_is_forgotten_or_an_answer_that_cannot_be_read(programs: BatchPrograms) -> None:
    programs.answers("qstat", err=f"qstat: Unknown Job Id {JOB}\n", code=153)
    assert pbs().cause(JOB) == FORGOTTEN
    programs.answers("qselect", out=f"{JOB}\n")
    for garbage in ('{"Jobs":{"12.pbs1":', "<xml/>", "[1]", '{"Jobs": 7}'):
        programs.answers("qstat", out=garbage)
        assert pbs().cause(JOB) == FORGOTTEN
    programs.answers("qstat", out='{"Jobs":{"12.pbs1":')
    with pytest.raises(SchedulerError, match="the answer of `qstat` is no JSON: "):
        pbs().states([NAME])


# --- the job around this process -----------------------------------------------------------------------------------


@pytest.fixture
def node_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "nodes"
    path.write_text("node1\nnode1\nnode2\nnode2\n")
    monkeypatch.setenv("PBS_JOBID", JOB)
    monkeypatch.setenv("PBS_NODEFILE", str(path))
    return path


def test_the_nodes_of_the_job(node_file: Path, programs: BatchPrograms) -> None:
    own = pbs().own_job()
    assert own is not None
    assert (own.job_id, own.element, own.nodes) == (JOB, None, "node1 node2")
    two = World(nodes=2, ranks_per_node=2, threads_per_rank=1)
    assert own.placement.hosts(two) == (Host("node1", 2), Host("node2", 2))
    with pytest.raises(RequestError) as caught:
        own.placement.hosts(TWO_BY_FOUR)
    assert str(caught.value).startswith(
        f"2 nodes with 4 ranks each are needed, and job {JOB} of PBS has 2, with 2 ranks on each. Ask for more nodes"
    )
    one = own.placement.limited_to([Host("node2")])
    assert one.hosts(World(nodes=1, ranks_per_node=4, threads_per_rank=1)) == (Host("node2"),)
    assert "srun is Slurm's, and jobs of PBS" in (own.placement.refuses("srun", two) or "")
    node_file.write_text("node1\nnode2\n")
    own = pbs().own_job()
    assert own is not None
    assert own.placement.slots() is None, "without mpiprocs a node says nothing about ranks"


def test_outside_a_job_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PBS_JOBID", raising=False)
    assert pbs().own_job() is None


def test_a_node_file_that_cannot_be_used(node_file: Path) -> None:
    node_file.write_text("-oProxyCommand=x\n")
    with pytest.raises(RequestError, match=r"PBS names no nodes of job 12\.pbs1"):
        pbs().own_job()
    node_file.unlink()
    with pytest.raises(RequestError, match="PBS_NODEFILE"):
        pbs().own_job()


def test_a_job_takes_no_more_runs_once_it_is_over(node_file: Path, programs: BatchPrograms) -> None:
    own = pbs().own_job()
    assert own is not None
    programs.answers("qstat", out=answer(stime=started(600)))
    assert own.placement.lost() is None
    programs.answers("qstat", out=finished("terminated by user@login1", 91, 271))
    assert own.placement.lost() == Cause("failed", f"cancelled by qdel (job {JOB})")
    programs.answers("qstat", err="qstat: cannot connect to server pbs1 (errno=111)\n", code=111)
    with pytest.raises(SchedulerSilentError):
        own.placement.lost()
    programs.answers("qstat", out="garbage")
    assert own.placement.lost() is None
