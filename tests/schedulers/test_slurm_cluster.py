from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launching import launch, world
from vitscale.errors import RequestError
from vitscale.launchers import LAUNCHERS
from vitscale.launchers.base import Spawn
from vitscale.launchers.srun import Srun
from vitscale.launchers.torchrun import Torchrun
from vitscale.machine.hosts import Host
from vitscale.schedulers import Placement, Scheduler, described, slurm, slurm_cluster
from vitscale.schedulers.base import Cause, SchedulerError, SchedulerSilentError
from vitscale.schedulers.slurm import SlurmAllocation
from vitscale.schedulers.slurm_cluster import SlurmCluster
from vitscale.study.sections import NodeSection, SlurmSection

NODE = NodeSection(cores=64, gpus=4)
SLURM = SlurmSection()


def test_trials_are_planned_for_the_node_that_is_described() -> None:
    assert SlurmCluster(SLURM, NODE).machine() == described(NODE)
    with pytest.raises(RequestError) as caught:
        SlurmCluster(SLURM, None).machine()
    assert "nodes that this machine knows nothing of" in str(caught.value)
    assert "[node] with cores = 64 and gpus = 4" in str(caught.value)


def test_a_node_takes_a_rank_on_each_gpu_and_without_any_as_many_as_the_study_says() -> None:
    assert SlurmCluster(SLURM, NODE).slots() == 4
    assert SlurmCluster(SLURM, NodeSection(cores=8)).slots() is None


def test_the_interpreter_is_that_of_the_nodes() -> None:
    assert SlurmCluster(SlurmSection(python="/opt/python"), NODE).python == "/opt/python"
    assert SlurmCluster(SLURM, NODE).python == sys.executable


@pytest.mark.parametrize(
    ("launcher", "nodes", "taken"),
    [
        ("srun", 1, True),
        ("srun", 2, True),
        ("torchrun", 1, True),
        ("torchrun", 2, True),
        ("mpirun", 1, False),
        ("deepspeed", 2, False),
    ],
)
def test_jobs_start_their_ranks_by_srun_or_torchrun(launcher: str, nodes: int, taken: bool) -> None:
    said = SlurmCluster(SLURM, NODE).refuses(launcher, world(nodes, 1))
    refusal = "jobs of Slurm start their ranks by srun, or by torchrun; use launcher = 'srun' or 'torchrun'"
    assert said == (None if taken else refusal)


def test_hosts_are_known_only_in_the_job_and_nothing_starts_here() -> None:
    scheduler = SlurmCluster(SLURM, NODE)
    stand_ins = (Host("node1.invalid"), Host("node2.invalid"))
    assert scheduler.hosts(world(2, 2)) == stand_ins
    made = launch(Srun(), world(2, 2), stand_ins)
    assert scheduler.adapt(made).commands == made.commands
    assert not isinstance(scheduler, Placement)
    assert not hasattr(scheduler, "start")


APPTAINER = ["apptainer", "exec", "--rocm", "--bind", "RESULTS:RESULTS", "--bind", "/work:/work"]
"""Up to the working directory."""


def test_commands_are_shown_with_the_container_and_the_options() -> None:
    slurm = SlurmSection(python="python3", container="vit.sif", container_gpus="amd", srun_options=["--cpu-bind=cores"])
    run = Path("RESULTS/runs/TRIAL")
    spawn = Spawn((("python3", "-P", "-m", "vitscale.worker", str(run)),), run, cwd=Path("/work"))
    (command,) = SlurmCluster(slurm, NODE).adapt(Srun().launch(world(2, 2), spawn)).commands
    assert list(command) == [
        *("srun", "--job-name=TRIAL", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--distribution=block"),
        *("--overlap", "--mpi=none", "--export=ALL", "--kill-on-bad-exit=1", "--cpu-bind=cores"),
        *APPTAINER,
        *("--pwd", "/work", "vit.sif", "python3", "-P", "-m", "vitscale.worker", str(run)),
    ]


def test_torchrun_on_one_node_is_shown_as_the_step_that_it_is() -> None:
    run = Path("RESULTS/runs/TRIAL")
    cluster = SlurmCluster(SlurmSection(python="python3", container="vit.sif", container_gpus="amd"), NODE)
    rank = ("python3", "-P", "-m", "vitscale.worker", str(run))
    spawn = Spawn((rank,), run, cluster.hosts(world(1, 2)), cwd=Path("/work"))
    (command,) = cluster.adapt(Torchrun().launch(world(1, 2), spawn)).commands
    assert list(command) == [
        *("srun", "--job-name=TRIAL", "--nodelist=node1.invalid", "--nodes=1", "--ntasks=1", "--overlap"),
        *("--cpu-bind=none", "--mpi=none", "--export=ALL"),
        *APPTAINER,
        *("--pwd", "/work", "vit.sif", "python3", "-P", "-m", "vitscale.processes.host_agent", str(run), "--"),
        *("python3", "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=0"),
        *("-m", "vitscale.worker", str(run)),
    ]


TWO_BY_TWO = world(2, 2)


def planned(scheduler: Scheduler, launcher: str, hosts: tuple[Host, ...]) -> list[list[str]]:
    """Argvs of ranks on two GPUs of each of two nodes."""
    run = Path("RESULTS/runs/TRIAL")
    rank = ("python3", "-P", "-m", "vitscale.worker", str(run))
    spawn = Spawn((rank,), run, hosts, gpus_per_node=2, cwd=Path("/work"))
    return [list(command) for command in scheduler.adapt(LAUNCHERS[launcher].launch(TWO_BY_TWO, spawn)).commands]


def test_a_planned_step_asks_for_its_gpus() -> None:
    cluster = SlurmCluster(SlurmSection(python="python3"), NODE)
    assert planned(cluster, "srun", cluster.hosts(TWO_BY_TWO)) == [
        [
            *("srun", "--gpus-per-node=2", "--job-name=TRIAL", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2"),
            *("--nodelist=node1.invalid,node2.invalid", "--distribution=block", "--overlap", "--cpu-bind=none"),
            *("--mpi=none", "--export=ALL", "--kill-on-bad-exit=1"),
            *("python3", "-P", "-m", "vitscale.worker", "RESULTS/runs/TRIAL"),
        ]
    ]
    agents = planned(cluster, "torchrun", cluster.hosts(TWO_BY_TWO))
    assert [agent[:4] for agent in agents] == [
        ["srun", "--gpus-per-node=2", "--job-name=TRIAL", f"--nodelist=node{number}.invalid"] for number in (1, 2)
    ]


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
@pytest.mark.parametrize("slurm", [{}, {"gpus": "gres"}, {"container": "vit.sif", "srun_options": ["--mem=0"]}])
def test_planned_commands_are_those_of_a_job_but_for_the_names_of_nodes(
    monkeypatch: pytest.MonkeyPatch, launcher: str, slurm: dict[str, object]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    monkeypatch.delenv("SLURM_JOB_CPUS_PER_NODE", raising=False)
    section = SlurmSection.model_validate({"python": "python3"} | slurm)
    cluster = SlurmCluster(section, NODE)
    before = planned(cluster, launcher, cluster.hosts(TWO_BY_TWO))
    inside = planned(SlurmAllocation(section, NODE), launcher, (Host("n07"), Host("n11")))
    named = [[word.replace("node1.invalid", "n07").replace("node2.invalid", "n11") for word in argv] for argv in before]
    assert named == inside


@pytest.mark.parametrize(
    ("slurm", "asks"),
    [
        ({"gpus": "none"}, False),
        ({"gpus": "none", "options": ["--gres=gpu:a100:4"]}, True),
        ({"gpus": "none", "options": ["--gres=shard:2", "--cpus-per-gpu=4"]}, False),
    ],
)
def test_a_planned_step_asks_for_gpus_where_its_job_has_them(slurm: dict[str, object], asks: bool) -> None:
    cluster = SlurmCluster(SlurmSection.model_validate(slurm), NODE)
    (command,) = planned(cluster, "srun", cluster.hosts(TWO_BY_TWO))
    assert ("--gpus-per-node=2" in command) is asks


def test_a_world_larger_than_the_nodes_that_are_named_is_refused_as_it_is_planned() -> None:
    cluster = SlurmCluster(SlurmSection(nodelist="node[1-2]"), NODE)
    assert cluster.hosts(world(2, 1)) == (Host("node1"), Host("node2"))
    with pytest.raises(RequestError, match="names 2 nodes, and a trial needs 3"):
        cluster.hosts(world(3, 1))


def test_binding_of_each_task_does_not_go_with_one_task_for_all_ranks() -> None:
    cluster = SlurmCluster(SlurmSection(srun_options=["--cpu-bind=cores"]), NODE)
    assert "binds each task of srun" in (cluster.refuses("torchrun", world(1, 4)) or "")
    assert cluster.refuses("srun", world(1, 4)) is None


# As `scontrol --oneliner show job` answered (Slurm 22.05), shortened.
JOB = (
    "JobId=12 JobName=alloc UserId=root(0) JobState={state} Reason={reason} Requeue=1 BatchFlag={batch} ExitCode=0:0 "
    "RunTime=00:00:27 TimeLimit={limit} StartTime=2026-11-26T10:23:32 PreemptEligibleTime=2026-11-26T10:23:32 "
    "PreemptTime={preempted} NodeList=node0 BatchHost=node0\n"
)
UNKNOWN = SchedulerError("Slurm refuses `scontrol`: slurm_load_jobs error: Invalid job id specified")
NO_ELEMENT = SchedulerError("Slurm refuses `scontrol`: Job 1_2 not found")
REFUSED = SchedulerError("Slurm refuses `scontrol`: slurm_load_jobs error: Access/permission denied")
SILENT = SchedulerSilentError("slurmctld does not answer")


def shown_job(state: str, **changes: str) -> str:
    given = {"state": state, "reason": "None", "batch": "1", "limit": "UNLIMITED", "preempted": "None"}
    return JOB.format(**(given | changes))


class Scontrol:
    """What `scontrol` answers of job 12, within an allocation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer: str | SchedulerError = ""
        self.job = "12"
        self.asked: list[str] = []
        monkeypatch.setattr(slurm, "ask", self.ask)
        monkeypatch.setattr(slurm_cluster, "ask", self.ask)
        monkeypatch.setenv("SLURM_JOB_ID", "12")
        monkeypatch.setenv("SLURM_JOB_NODELIST", "node0")
        for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_HET_SIZE"):
            monkeypatch.delenv(name, raising=False)

    def ask(self, *argv: str) -> str:
        self.asked.append(argv[1])
        if argv == ("scontrol", "show", "config"):
            return "MailProg                = /bin/mail\nMaxArraySize            = 4\nMaxJobCount             = 1000\n"
        assert argv == ("scontrol", "--oneliner", "show", "job", self.job)
        if isinstance(self.answer, SchedulerError):
            raise self.answer
        return self.answer

    def lost(self, answer: str | SchedulerError) -> Cause | None:
        """What the allocation's placement says of itself."""
        self.answer = answer
        own = SlurmCluster(SLURM, NODE).own_job()
        assert own is not None
        return own.placement.lost()


@pytest.fixture
def scontrol(monkeypatch: pytest.MonkeyPatch) -> Scontrol:
    return Scontrol(monkeypatch)


@pytest.mark.parametrize(
    "answer",
    [
        shown_job("RUNNING", batch="0"),
        shown_job("SUSPENDED"),
        shown_job("CONFIGURING"),
        # Begun anew since it was preempted.
        shown_job("RUNNING", preempted="2026-11-26T10:23:31"),
        "",
        REFUSED,
    ],
)
def test_an_allocation_goes_on_where_slurm_does_not_say_that_it_ends(
    scontrol: Scontrol, answer: str | SchedulerError
) -> None:
    assert scontrol.lost(answer) is None


@pytest.mark.parametrize(
    ("answer", "kind", "reason"),
    [
        (shown_job("CANCELLED", batch="0"), "failed", "cancelled by scancel (job 12)"),
        (shown_job("COMPLETING"), "failed", "cancelled by scancel (job 12)"),
        (shown_job("COMPLETING", batch="0"), "failed", "the allocation was cancelled, or given back (job 12)"),
        (shown_job("COMPLETED", batch="0"), "failed", "the allocation was given back (job 12)"),
        *(
            (
                shown_job(state, reason="TimeLimit", limit="00:01:00"),
                "timeout",
                "the job's time limit of 00:01:00 was reached (slurm.time, job 12)",
            )
            for state in ("TIMEOUT", "COMPLETING")
        ),
        *(
            (
                shown_job(state, preempted="2026-11-26T10:23:51"),
                "failed",
                "preempted by a job of higher priority (job 12)",
            )
            for state in ("RUNNING", "COMPLETING", "CANCELLED", "PREEMPTED", "FAILED")
        ),
        (UNKNOWN, "failed", "job 12 ended before this run was done; Slurm does not say why (any more)"),
        (NO_ELEMENT, "failed", "job 12 ended before this run was done; Slurm does not say why (any more)"),
    ],
)
def test_an_allocation_that_is_over_or_ending_says_why(
    scontrol: Scontrol, answer: str | SchedulerError, kind: str, reason: str
) -> None:
    assert scontrol.lost(answer) == Cause(kind, reason)  # type: ignore[arg-type]  # a kind of outcome


def test_an_element_of_an_array_asks_for_itself_alone(scontrol: Scontrol, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one has the array's number, under which scontrol tells of those that have ended too."""
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    scontrol.job = "12_1"
    assert scontrol.lost(shown_job("RUNNING")) is None
    assert scontrol.lost(shown_job("TIMEOUT")) == Cause(
        "timeout", "the job's time limit of UNLIMITED was reached (slurm.time, job 12_1)"
    )
    own = SlurmCluster(SLURM, NODE).own_job()
    assert own is not None
    assert (own.job_id, own.element) == ("12_1", 1)


def test_an_allocation_is_not_taken_for_lost_while_slurm_is_silent(scontrol: Scontrol) -> None:
    with pytest.raises(SchedulerSilentError):
        scontrol.lost(SILENT)


def test_a_job_that_reached_its_limit_or_lost_a_node_after_a_preemption_is_told_of_that(scontrol: Scontrol) -> None:
    late = "2026-11-26T10:23:51"
    scontrol.answer = shown_job("TIMEOUT", reason="TimeLimit", limit="00:01:00", preempted=late)
    assert SlurmCluster(SLURM, NODE).cause("12").kind == "timeout"


def test_an_array_has_no_more_elements_than_slurm_takes_which_is_asked_once(scontrol: Scontrol) -> None:
    cluster = SlurmCluster(SlurmSection(jobs="array"), NODE)
    assert [cluster.most_elements() for _ in range(2)] == [3, 3]
    assert scontrol.asked == ["show"]
