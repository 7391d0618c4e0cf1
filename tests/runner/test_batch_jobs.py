"""Studies by sbatch on a real Slurm: whatever happens to the jobs or to who watches them, each run is done once."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from driving import processes_naming, tree
from lab.slurm_cluster import SlurmCluster, slurm_cluster
from processes import wait_until
from runner.batch_studies import BatchStudy

pytestmark = pytest.mark.long(5)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BatchStudy, subprocess.Popen[str]]]:
    """A study that runs into its time limit, which takes a minute, while the other tests have theirs."""
    with slurm_cluster() as own:
        study = BatchStudy(tmp_path_factory.mktemp("limited") / "study", own, gpus="[2]", slurm='time = "1"')
        study.hold.touch()
        with study.start() as driver:
            yield study, driver


@pytest.fixture(autouse=True)
def _nothing_is_left_over(cluster: SlurmCluster, limited: object) -> Iterator[None]:
    yield
    cluster.ask("scancel", "--user=root", "--full", "--signal=KILL")
    cluster.ask("scancel", "--user=root")
    wait_until(lambda: not cluster.ask("squeue", "--noheader"), "no job is left")


def reasons(study: BatchStudy) -> dict[str, str]:
    """Why runs did not complete, by run."""
    return {name: outcome.reason for name, outcome in study.outcomes().items() if outcome.kind != "completed"}


def kill_drivers(study: BatchStudy, of: str = "vitscale-") -> None:
    """SIGKILL to the drivers inside the jobs whose names begin so."""
    lines = {process: process.cmdline() for process in processes_naming(study.results)}
    drivers = [process for process, line in lines.items() if "vitscale.runner.job" in line and line[-1].startswith(of)]
    assert drivers
    for driver in drivers:
        driver.kill()


# Slurm takes the job, and its first answer is lost on the way.
FORGETFUL_SBATCH = """\
#!/bin/sh
{sbatch} "$@" > "$0.answer" || exit 1
[ -e "$0.lost" ] || {{ touch "$0.lost"; echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1; }}
cat "$0.answer"
"""


def test_a_study_by_one_job_for_each_world(cluster: SlurmCluster, tmp_path: Path) -> None:
    study = BatchStudy(tmp_path / "study's $(folder)", cluster)
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(FORGETFUL_SBATCH.format(sbatch=shutil.which("sbatch")))
    sbatch.chmod(0o755)
    code, output = study.run(PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert code == 0, output
    assert "waiting for Slurm: slurmctld does not answer: sbatch: error: Socket timed out" in output
    names = [str(job["name"]) for job in study.jobs()]
    known = cluster.ask("squeue", "--noheader", "--states=all", "--format=%j", f"--name={','.join(names)}").split()
    assert sorted(known) == sorted(names)
    study.check_complete(runs=4)
    assert len(study.jobs()) == 2
    assert {name[-3:] for name in study.outcomes()} == {"-a0"}
    for job in study.jobs():
        assert re.search(rf"^job {job['job_id']} submitted: 2 runs on [12] x 1 ranks$", output, re.MULTILINE)
    assert len(list(study.results.glob("jobs/*.out"))) == 2
    # A second call finds nothing to do, and touches nothing.
    before = tree(study.results / "runs")
    assert study.run()[0] == 0
    assert tree(study.results / "runs") == before
    assert len(study.jobs()) == 2


def test_a_logout_ends_the_watching_and_not_the_jobs(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Hung up, then killed, while slurmctld restarts; the last call finds all jobs and does nothing twice.

    Arrays: where slurmctld 22.05 has restarted, a job that was running gets no further step.
    """
    study = BatchStudy(tmp_path / "study", cluster, slurm='jobs = "array"')
    study.hold.touch()
    first = study.start()
    study.wait_for_ranks(6)
    first.send_signal(signal.SIGHUP)
    output, _ = first.communicate(timeout=300)
    assert first.returncode == 130, output
    ids = study.job_ids()
    assert re.search(r"scancel \d+ \d+", output)
    assert all(f" {job_id}" in output for job_id in ids)
    assert "The same command again watches them" in output

    allocation = {"SLURM_JOB_ID": "999", "SLURM_JOB_NODELIST": "node[0-1]"}
    refused, said = study.run(**allocation)
    assert refused == 2
    assert "jobs of Slurm are still at work" in said

    second = study.start()
    lines: list[str] = []
    assert second.stdout is not None
    while not (lines and lines[-1].startswith("array ") and lines[-1].endswith(": 2 running\n")):
        lines.append(second.stdout.readline())
    assert "was submitted before: 2 runs to come" in "".join(lines)
    second.kill()
    second.communicate()

    cluster.stop_controller()
    third = study.start()
    assert third.stdout is not None
    line = third.stdout.readline()
    assert line.startswith("waiting for Slurm: slurmctld does not answer:"), line
    cluster.start_controller()
    study.hold.unlink()
    output, _ = third.communicate(timeout=120)
    assert third.returncode == 0, output
    assert "Slurm answers again" in output
    slurms = (cluster.folder / "slurmctld.log").read_text()[-5000:]
    assert study.job_ids() == ids, f"{output}\n{study.outcomes()}\n{slurms}"
    assert {name[-3:] for name in study.outcomes()} == {"-a0"}
    study.check_complete(runs=4)


@pytest.mark.parametrize("jobs", ["array", pytest.param("job", marks=pytest.mark.nightly)])
def test_no_more_runs_than_asked_for_are_at_work(cluster: SlurmCluster, tmp_path: Path, jobs: str) -> None:
    """The second world's are submitted when the first's are done."""
    most = {"job": 1, "array": 2}[jobs]
    study = BatchStudy(tmp_path / "study", cluster, slurm=f'jobs = "{jobs}"', measure=f"parallel_runs = {most}")
    study.hold.touch()
    driver = study.start()
    study.wait_for_ranks(1)
    assert len(study.job_ids()) == 1
    script = (study.results / "jobs" / f"{study.jobs()[0]['name']}.sh").read_text()
    assert ("#SBATCH --array=0-1%2\n" in script) == (jobs == "array")
    study.hold.unlink()
    output, _ = driver.communicate(timeout=300)
    assert driver.returncode == 0, output
    assert len(study.job_ids()) == 2
    study.check_complete(runs=4)
    ends = [(o.started_unix_seconds, o.started_unix_seconds + o.wall_seconds) for o in study.outcomes().values()]
    assert max(sum(began <= moment < ended for began, ended in ends) for moment, _ in ends) <= most


def test_a_crash_around_the_submission_makes_no_second_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    """As if the call had died after sbatch had taken one job, and before it was given the other."""
    study = BatchStudy(tmp_path / "study", cluster)
    study.hold.touch()
    first = study.start()
    study.wait_for_ranks(3)
    first.kill()
    first.communicate()
    taken, lost = study.job_of(2), study.job_of(1)
    cluster.ask("scancel", "--signal=KILL", "--full", lost)
    wait_until(lambda: lost not in cluster.ask("squeue", "--noheader", "--format=%i").split(), "one is gone")
    for path in study.results.glob("jobs/*.json"):
        content = json.loads(path.read_text()) | {"job_id": None}
        if path.name.startswith("vitscale-1x1-"):
            content["name"] = "vitscale-1x1-00000000"
            path.unlink()
            path = path.with_name("vitscale-1x1-00000000.json")
        path.write_text(json.dumps(content))
    second = study.start()
    wait_until(lambda: len(study.job_ids()) == 2, "both jobs have numbers")
    study.hold.unlink()
    output, _ = second.communicate(timeout=300)
    assert second.returncode == 0, output
    assert study.job_of(2) == taken
    study_jobs = {job["name"]: job["job_id"] for job in study.jobs()}
    assert study_jobs["vitscale-1x1-00000000"] is None
    assert len(study_jobs) == 3
    study.check_complete(runs=4)


def test_a_drained_node_and_cancelled_jobs(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Why it waits is shown; a job that is cancelled, waiting or running, gives its runs an outcome that says so."""
    study = BatchStudy(tmp_path / "study", cluster)
    study.hold.touch()
    cluster.ask("scontrol", "update", "NodeName=node1", "State=DRAIN", "Reason=fan")
    try:
        first = study.start()
        study.wait_for_ranks(1)
        assert first.stdout is not None
        lines: list[str] = []
        while not (lines and re.search(r"job \d+: pending \(.*(DRAINED|ReqNodeNotAvail)", lines[-1])):
            lines.append(first.stdout.readline())
        waiting, running = study.job_of(2), study.job_of(1)
        cluster.ask("scancel", waiting, running)
        output, _ = first.communicate(timeout=300)
        assert first.returncode == 1, output
        found = reasons(study)
        assert sorted(found.values()) == sorted(
            2 * [f"cancelled by scancel (job {waiting})"] + 2 * [f"cancelled by scancel (job {running})"]
        )
        assert all(outcome.external and outcome.kind == "failed" for outcome in study.outcomes().values())
        wait_until(lambda: processes_naming(study.results) == [], "Slurm has ended the ranks of the cancelled job")

        study.hold.unlink()
        again = study.start()
        wait_until(lambda: len(study.outcomes()) == 6, "what needs one node is done")
    finally:
        cluster.ask("scontrol", "update", "NodeName=node1", "State=RESUME")
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0, output
    assert len(study.outcomes()) == 8
    study.check_complete(runs=4)


def test_an_allocation_that_is_cancelled_under_a_study(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The run that was under way is to be done again, and those after it are not begun where no step can start."""
    study = BatchStudy(tmp_path / "study", cluster, gpus="[2]", measure="retries = 0")
    study.hold.touch()
    salloc = ("salloc", "--quiet", "--job-name=lent", "--nodes=2", "--ntasks-per-node=1")
    driver = study.start(within=salloc)
    study.wait_for_ranks(2)
    cluster.ask("scancel", "--name=lent")
    output, _ = driver.communicate(timeout=300)
    assert driver.returncode == 1, output
    assert "No further run was begun" in output
    (cut,) = study.outcomes().values()
    assert (cut.kind, cut.external, cut.transient) == ("failed", True, False), cut
    assert "cancelled" in cut.reason
    wait_until(lambda: processes_naming(study.results) == [], "no process is left")


def test_jobs_that_die_without_a_word(cluster: SlurmCluster, tmp_path: Path) -> None:
    """A driver killed, a node down, and a job that Slurm has forgotten: each is told as what it was."""
    study = BatchStudy(tmp_path / "study", cluster, repeats=1, slurm='jobs = "array"')
    study.hold.touch()
    first = study.start()
    study.wait_for_ranks(3)
    kill_drivers(study, "vitscale-1x1-")
    cluster.ask("scontrol", "update", "NodeName=node1", "State=DOWN", "Reason=power lost")
    output, _ = first.communicate(timeout=300)
    cluster.ask("scontrol", "update", "NodeName=node1", "State=RESUME")
    assert first.returncode == 1, output
    killed, failed = f"{study.job_of(1)}_0", f"{study.job_of(2)}_0"
    assert sorted(reasons(study).values()) == sorted(
        [
            f"the driver of job {killed} was ended by signal 9 before this run was done",
            f"node failed: node1 (power lost) (job {failed})",
        ]
    )
    (host,) = (outcome.host for outcome in study.outcomes().values() if "node failed" in outcome.reason)
    assert host == "node1"
    wait_until(lambda: processes_naming(study.results) == [], "no process is left")

    second = study.start()
    study.wait_for_ranks(6)
    second.kill()
    second.communicate()
    kill_drivers(study)
    wait_until(lambda: not cluster.ask("squeue", "--noheader"), "the jobs are over")
    cluster.stop_controller()
    cluster.start_controller(forgetful=True)
    cluster.wait_for_controller()
    study.hold.unlink()
    code, output = study.run()
    assert code == 0, output
    forgotten = [reason for reason in reasons(study).values() if "does not say why" in reason]
    assert len(forgotten) == 2
    assert len(study.outcomes()) == 6
    study.check_complete(runs=2)


def test_the_time_limit(limited: tuple[BatchStudy, subprocess.Popen[str]]) -> None:
    """The run under way is ended in order before the limit comes, and those after it are told of it too."""
    study, driver = limited
    output, _ = driver.communicate(timeout=180)
    assert driver.returncode == 1, output
    (job_id,) = study.job_ids()
    assert set(reasons(study).values()) == {f"the job's time limit of 00:01:00 was reached (slurm.time, job {job_id})"}
    assert {(outcome.kind, outcome.external) for outcome in study.outcomes().values()} == {("timeout", True)}
    assert processes_naming(study.results) == []
    # Its driver ended by itself, before Slurm would have killed it.
    assert study.cluster.ask("squeue", "--noheader", "--states=all", f"--job={job_id}", "--format=%T") == "FAILED"


def test_a_line_of_the_script_that_fails_ends_the_job_and_is_its_runs_reason(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    study = BatchStudy(tmp_path / "study", cluster, gpus="[1]", slurm='setup = ["true", "ls /no/such/file"]')
    code, output = study.run()
    assert code == 1, output
    script = (study.results / "jobs").glob("*.sh")
    number = next(script).read_text().splitlines().index("ls /no/such/file") + 1
    (job_id,) = study.job_ids()
    reason = f"line {number} of its script failed with exit code 2: ls /no/such/file (job {job_id})"
    assert list(reasons(study).values()) == [reason, reason]
    assert reason in output.replace("\n", " ")


def test_an_array_of_trials_on_nodes_that_are_named(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Each element does both runs of a trial, on the first of the nodes."""
    slurm = 'jobs = "trial-array"\nnodelist = "node[0-1]"\nexclude = "node0"\nsrun_options = ["--mem-bind=none"]'
    study = BatchStudy(
        tmp_path / "study", cluster, gpus="[1]", slurm=slurm, measure="[sweep]\n'train.micro_batch' = [4, 8]"
    )
    code, output = study.run()
    assert code == 0, output
    study.check_complete(runs=4)
    headers = [json.loads(path.read_text()) for path in study.results.glob("runs/*/trial.json")]
    assert {tuple(header["hosts"]) for header in headers} == {("node1",)}
    assert {"--mem-bind=none" in header["command"] for header in headers} == {True}
    (job,) = study.jobs()
    outputs = sorted(path.name for path in study.results.glob("jobs/*.out"))
    assert outputs == [f"{job['name']}-{job['job_id']}_{element}.out" for element in (0, 1)]


def test_what_slurm_refuses_is_told_in_its_words(cluster: SlurmCluster, tmp_path: Path) -> None:
    study = BatchStudy(tmp_path / "study", cluster, slurm='partition = "nowhere"')
    code, output = study.run()
    assert code == 2
    assert "Slurm refuses `sbatch`" in output
    assert "Invalid partition name specified" in output
    assert "Traceback" not in output
    assert study.jobs() == []
    assert not (study.results / "runs").exists()
