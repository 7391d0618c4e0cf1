"""Batch scripts to the letter, and what cannot stand in one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vitscale.errors import RequestError
from vitscale.schedulers.base import BatchJob, SchedulerError
from vitscale.schedulers.job_settings import time_span_seconds
from vitscale.schedulers.slurm import overriding_variables
from vitscale.schedulers.slurm_cluster import SlurmCluster, _is_warned_of_limit, batch_script
from vitscale.study.sections import SlurmSection
from vitscale.trial.trial import World


def job(**changes: object) -> BatchJob:
    given: dict[str, object] = {
        "name": "vitscale-2x4-0123abcd",
        "world": World(nodes=2, ranks_per_node=4, threads_per_rank=8),
        "on_gpus": True,
        "results": Path("/shared/results"),
        "cwd": Path("/home/user/work"),
    }
    return BatchJob(**(given | changes))  # type: ignore[arg-type]  # fields of a job


def test_the_least() -> None:
    assert (
        batch_script(SlurmSection(), job(on_gpus=False))
        == f"""\
#!/bin/bash
#SBATCH --job-name=vitscale-2x4-0123abcd
#SBATCH --chdir=/home/user/work
#SBATCH --output=/shared/results/jobs/vitscale-2x4-0123abcd-%j.out
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --signal=B:TERM@60
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8

exec {sys.executable} -P -m vitscale.runner.job /shared/results vitscale-2x4-0123abcd
"""
    )


def test_an_array_is_limited_to_so_many_at_a_time() -> None:
    script = batch_script(SlurmSection(jobs="array"), job(elements=100, at_a_time=8))
    assert "#SBATCH --array=0-99%8\n" in script
    assert "#SBATCH --array=0-99\n" in batch_script(SlurmSection(jobs="array"), job(elements=100))


def test_everything_as_an_array() -> None:
    slurm = SlurmSection(
        jobs="array",
        partition="gpu,long",
        account="vit",
        qos="high",
        time="1-02:00:00",
        constraint="[rack1|rack2]&a100*2",
        reservation="study week",
        gpu_type="a100",
        modules=["cuda/12.4", "openmpi"],
        python="/opt/env/bin/python",
        options=["--mail-type=END", "--exclusive", '--comment=it\'s "ours" #1 \\'],
        setup=["source /opt/site/settings.sh", 'export NCCL_DEBUG="$HOME"'],
    )
    assert (
        batch_script(slurm, job(elements=6))
        == """\
#!/bin/bash
#SBATCH --job-name=vitscale-2x4-0123abcd
#SBATCH --chdir=/home/user/work
#SBATCH --output=/shared/results/jobs/vitscale-2x4-0123abcd-%A_%a.out
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --signal=B:TERM@60
#SBATCH --array=0-5
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=a100:4
#SBATCH --partition=gpu,long
#SBATCH --account=vit
#SBATCH --qos=high
#SBATCH --time=1-02:00:00
#SBATCH --constraint="[rack1|rack2]&a100*2"
#SBATCH --reservation="study week"
#SBATCH --mail-type=END
#SBATCH --exclusive
#SBATCH --comment="it's \\"ours\\" #1 \\\\"

command -v module > /dev/null || source /etc/profile
vitscale_ends_at() { # code, line; called from deeper where something fails in a sourced file, which may be meant
  [ "${#BASH_SOURCE[@]}" -eq 2 ] || return 0
  printf 'vitscale: the job ends: line %s of its script failed with exit code %s: %s\\n' \\
    "$2" "$1" "$(sed -n "$2p" "$0")"
  exit "$1"
}
trap 'vitscale_ends_at $? $LINENO' ERR
module load cuda/12.4
module load openmpi
source /opt/site/settings.sh
export NCCL_DEBUG="$HOME"
exec /opt/env/bin/python -P -m vitscale.runner.job /shared/results vitscale-2x4-0123abcd
"""
    )


@pytest.mark.parametrize(
    ("slurm", "line"),
    [
        (SlurmSection(), "#SBATCH --gpus-per-node=4"),
        (SlurmSection(gpus="gres"), "#SBATCH --gres=gpu:4"),
        (SlurmSection(gpus="gres", gpu_type="h100"), "#SBATCH --gres=gpu:h100:4"),
    ],
)
def test_forms_of_asking_for_gpus(slurm: SlurmSection, line: str) -> None:
    assert [found for found in batch_script(slurm, job()).splitlines() if "gpu" in found] == [line]
    assert "gpu" not in batch_script(slurm, job(on_gpus=False))


def test_gpus_that_are_not_asked_for() -> None:
    assert "gpu" not in batch_script(SlurmSection(gpus="none"), job())


def test_the_driver_of_a_container_runs_outside_of_it() -> None:
    slurm = SlurmSection(container="image.sif", python="/usr/bin/python3")
    assert f"exec {sys.executable} -P -m vitscale.runner.job" in batch_script(slurm, job())


def test_a_hostile_path_and_a_hostile_interpreter() -> None:
    """Spaces, both quotes, $(), backticks, % and a line's comment sign: one word for sbatch, one for bash."""
    nasty = Path('/tmp/it\'s $(x) `y` "q" %j #1')
    text = batch_script(SlurmSection(python="/opt/my env/python"), job(results=nasty, cwd=nasty))
    assert '#SBATCH --chdir="/tmp/it\'s $(x) `y` \\"q\\" %j #1"\n' in text
    output = '"/tmp/it\'s $(x) `y` \\"q\\" %%j #1/jobs/vitscale-2x4-0123abcd-%j.out"'
    assert f"#SBATCH --output={output}\n" in text
    assert text.endswith(
        "exec '/opt/my env/python' -P -m vitscale.runner.job '/tmp/it'\"'\"'s $(x) `y` \"q\" %j #1' "
        "vitscale-2x4-0123abcd\n"
    )


@pytest.mark.parametrize(
    ("slurm", "part"),
    [
        ({"partition": "gpu\n#SBATCH --account=other"}, "slurm.partition is 'gpu\\n#SBATCH --account=other'"),
        ({"account": "a\x1b[0m"}, "slurm.account is"),
        ({"constraint": ""}, "slurm.constraint is ''"),
        ({"modules": ["cuda; rm -rf /"]}, "slurm.modules has 'cuda; rm -rf /'"),
        ({"modules": ["-h"]}, "slurm.modules has '-h'"),
        ({"gpu_type": "a100:2"}, "slurm.gpu_type is 'a100:2'"),
        ({"options": ["-p gpu"]}, "slurm.options has '-p gpu'"),
        ({"options": ["--comment=a\nrm -rf /"]}, "slurm.options[0] is '--comment=a\\nrm -rf /'"),
        ({"options": ["--nodes=4"]}, "it follows from each trial's world"),
        ({"options": ["--partition=gpu"]}, "say slurm.partition"),
        ({"options": ["--output=here"]}, "vitscale sets it"),
        ({"options": ["--exclude=node1"], "exclude": "node2"}, "say slurm.exclude"),
        ({"nodelist": "node1"}, "slurm.nodelist names 1 nodes, and a trial needs 2"),
        ({"nodelist": "node[1-2]", "exclude": "node1"}, "1 nodes without those of slurm.exclude"),
        ({"nodelist": "node[1-2"}, "slurm.nodelist is 'node[1-2': no name of a host"),
        ({"exclude": "$(x)"}, "slurm.exclude is '$(x)': no name of a host"),
        ({"srun_options": ["--mem=1\n2"]}, "slurm.srun_options[0] is"),
        ({"sizes": [{"min_nodes": 9, "partition": "a\nb"}]}, "slurm.sizes[0].partition is"),
    ],
)
def test_what_cannot_stand_in_a_script(slurm: dict[str, object], part: str) -> None:
    with pytest.raises(RequestError) as caught:
        batch_script(SlurmSection.model_validate(slurm), job())
    assert part in str(caught.value)


def options_of(slurm: SlurmSection, *names: str, nodes: int = 2) -> list[str]:
    """Lines of a script for so many nodes with these options."""
    script = batch_script(slurm, job(world=World(nodes=nodes, ranks_per_node=4, threads_per_rank=8)))
    prefixes = tuple(f"#SBATCH --{name}=" for name in names)
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith(prefixes)]


@pytest.mark.parametrize(("nodes", "names"), [(1, "node03"), (2, "node03,node04"), (3, "node03,node04,node9")])
def test_each_world_takes_the_first_of_the_nodes_that_are_named(nodes: int, names: str) -> None:
    slurm = SlurmSection(nodelist="node[02-04],node9", exclude="node02,node17")
    assert options_of(slurm, "nodelist", "exclude", nodes=nodes) == [f"--nodelist={names}", "--exclude=node02,node17"]


def test_nodes_to_avoid_alone_and_as_an_option() -> None:
    assert options_of(SlurmSection(exclude="node[1-2]"), "nodelist", "exclude") == ['--exclude="node[1-2]"']
    assert options_of(SlurmSection(options=["--exclude=node1"]), "nodelist", "exclude") == ["--exclude=node1"]


@pytest.mark.parametrize(
    ("nodes", "options"),
    [
        (1, ["--partition=small", "--account=vit", "--time=60"]),
        (2, ["--partition=standard", "--account=vit", "--time=60"]),
        (7, ["--partition=standard", "--account=vit", "--time=60"]),
        (8, ["--partition=large", "--account=vit", "--qos=big", "--time=10"]),
    ],
)
def test_worlds_of_many_nodes_go_to_other_partitions(nodes: int, options: list[str]) -> None:
    """In whatever order they are given; what an entry leaves out stays."""
    large = {"min_nodes": 8, "partition": "large", "qos": "big", "time": "10"}
    slurm = SlurmSection.model_validate(
        {
            "partition": "small",
            "account": "vit",
            "time": "60",
            "sizes": [large, {"min_nodes": 2, "partition": "standard"}],
        }
    )
    assert options_of(slurm, "partition", "account", "qos", "time", nodes=nodes) == options


def test_the_warning_before_the_end_follows_the_time_of_the_size() -> None:
    slurm = SlurmSection.model_validate({"time": "60", "sizes": [{"min_nodes": 2, "time": "1"}]})
    assert "#SBATCH --signal=B:TERM@15\n" in batch_script(slurm, job())


def test_a_results_folder_that_slurm_would_misread() -> None:
    with pytest.raises(RequestError, match="backslash"):
        batch_script(SlurmSection(), job(results=Path("/a\\b")))


@pytest.mark.parametrize(
    ("limit", "seconds", "told_before"),
    [
        ("1", 60, 15),
        ("90", 5400, 60),
        ("10080", 604_800, 60),
        ("1:30", 90, 22),
        ("2:00:00", 7200, 60),
        ("1-2", 93600, 60),
        ("1-02:03", 93780, 60),
        ("1-02:03:04", 93784, 60),
    ],
)
def test_time_limits_as_slurm_reads_them(limit: str, seconds: int, told_before: int) -> None:
    assert time_span_seconds(limit) == seconds
    assert _is_warned_of_limit({"TimeLimit": limit, "RunTime": limit})
    script = batch_script(SlurmSection(time=limit), job())
    assert f"#SBATCH --signal=B:TERM@{told_before}\n" in script
    assert f"#SBATCH --time={limit}\n" in script


@pytest.mark.parametrize(
    ("slurm", "dropped", "kept"),
    [
        (
            {},
            "ARRAY_INX CLUSTERS WAIT REQUEUE NO_REQUEUE OPEN_MODE JOB_NAME OUTPUT SIGNAL",
            "PARTITION ACCOUNT TIMELIMIT",
        ),
        (
            {"partition": "gpu", "time": "1", "account": "a"},
            "PARTITION TIMELIMIT ACCOUNT",
            "QOS RESERVATION CONSTRAINT",
        ),
        ({"qos": "q", "reservation": "r", "constraint": "c"}, "QOS RESERVATION CONSTRAINT", "PARTITION TIMELIMIT"),
        ({}, "GPUS GPUS_PER_NODE GPUS_PER_TASK GRES", "MEM_PER_NODE GPU_BIND"),
        ({"gpus": "gres"}, "GPUS GPUS_PER_NODE GPUS_PER_TASK GRES", "MEM_PER_CPU"),
        ({"gpus": "none"}, "OUTPUT", "GPUS GRES"),
        ({"options": ["--mem=9G", "--exclusive"]}, "MEM_PER_NODE MEM_PER_CPU MEM_PER_GPU EXCLUSIVE", "SWITCHES"),
        ({"options": ["--switches=1@5"]}, "REQ_SWITCH WAIT4SWITCH", "EXCLUSIVE"),
    ],
)
def test_what_a_script_sets_no_variable_of_the_shell_overrides(
    slurm: dict[str, object], dropped: str, kept: str
) -> None:
    """Names as in "INPUT ENVIRONMENT VARIABLES" of sbatch(1); what the script does not set stays the user's default."""
    names = overriding_variables(batch_script(SlurmSection.model_validate(slurm), job()))
    assert {f"SBATCH_{name}" for name in dropped.split()} <= names
    assert not {f"SBATCH_{name}" for name in kept.split()} & names


def test_sbatch_does_not_see_what_would_override_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\nenv | grep -E '^(SBATCH_|SLURM_TIME)' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name in ("PARTITION", "TIMELIMIT", "ACCOUNT", "WAIT"):
        monkeypatch.setenv(f"SBATCH_{name}", "mine")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")  # in which times could not be compared
    script = tmp_path / "job.sh"
    script.write_text(batch_script(SlurmSection(partition="low", time="30"), job()))
    with pytest.raises(SchedulerError) as caught:
        SlurmCluster(SlurmSection(), None).submit(script)
    assert str(caught.value) == "Slurm refuses `sbatch`: SBATCH_ACCOUNT=mine."
