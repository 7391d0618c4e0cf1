"""What `init` finds on machines of known make, and that the study it writes for each is one."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from study_factory import EIGHT_CORES, gpus
from vitscale.machine.hardware import Machine
from vitscale.preflight.first_study import Wishes, first_study, look_around, rank_counts_for
from vitscale.study.file import StudyFile

EIGHT_GPUS = Machine(cores=64, cpu_quota_cores=None, gpus=gpus(8), cpu_has_fast_bf16=False)


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No Slurm and no MPI of the machine that the tests run on."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "bin").mkdir()


def program(folder: Path, name: str, *lines: str) -> None:
    path = folder / "bin" / name
    path.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    path.chmod(0o755)


def test_one_machine_with_gpus(tmp_path: Path) -> None:
    where = look_around(None, tmp_path, EIGHT_GPUS)
    assert (where.description, where.launch, where.node) == ("this machine: 64 cores and 8 GPUs", (), ())
    assert rank_counts_for(where) == (1, 2, 4, 8)
    study = StudyFile.checked(tmp_path / "s.toml", first_study("s", where, Wishes())).study
    assert (study.model.name, study.model.image_size, study.data.name, study.data.source_size) == (
        *("vit-b16", 224), *("synthetic", 224),
    )  # fmt: skip
    assert (study.scaling.gpus, study.train.micro_batch, study.measure.repeats) == ((1, 2, 4, 8), 64, 3)


@pytest.mark.parametrize("data", ["folder", "hf", "shards", "ade20k"])
def test_pictures_are_stored_as_large_as_the_model_takes_them(tmp_path: Path, data: str) -> None:
    """Not at 32 pixels, which is the study file's own default."""
    where = look_around(None, tmp_path, EIGHT_GPUS)
    study = StudyFile.checked(tmp_path / "s.toml", first_study("s", where, Wishes(data=data))).study
    assert (study.model.image_size, study.data.source_size) == (224, 224)


def test_hosts_of_a_hostfile_that_lies_there(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=6\nb slots=6\nc slots=6\n")
    where = look_around(None, tmp_path, EIGHT_CORES)
    assert rank_counts_for(where) == (1, 2, 4, 6, 12, 18)
    study = StudyFile.checked(tmp_path / "s.toml", first_study("s", where, Wishes())).study
    assert study.launch.hostfile == "hosts"
    assert where.description.startswith("the 3 hosts of hosts")
    (tmp_path / "two").write_text("a\nb\n")
    other = look_around(Path("two"), tmp_path, EIGHT_GPUS)
    assert rank_counts_for(other) == (1, 2, 4, 8, 16)


@pytest.mark.parametrize(
    ("said", "partition", "cores", "gpus_each"),
    [
        (["cpu|64|(null)", "gpu*|96+|gpu:a100:4(S:0-1)"], "gpu", 96, 4),
        (["all|32|gpu:2,gpu:a100:1"], "all", 32, 3),
        (["cpu*|16|(null)"], "cpu", 16, 0),
    ],
)
def test_a_login_node_of_slurm(tmp_path: Path, said: list[str], partition: str, cores: int, gpus_each: int) -> None:
    program(tmp_path, "sbatch")
    program(tmp_path, "sinfo", *said)
    where = look_around(None, tmp_path, EIGHT_CORES)
    study = StudyFile.checked(tmp_path / "s.toml", first_study("s", where, Wishes())).study
    assert (study.launch.scheduler, study.launch.launcher, study.slurm.partition) == ("slurm", "srun", partition)
    assert study.node is not None
    assert (study.node.cores, study.node.gpus) == (cores, gpus_each)
    assert max(study.scaling.gpus) == (gpus_each or 4)


def test_slurm_that_does_not_answer_or_is_around_it_is_no_cluster_to_submit_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "sbatch")
    for lines in ([], ["no answer"], ["gpu|many|x"]):
        program(tmp_path, "sinfo", *lines)
        assert look_around(None, tmp_path, EIGHT_CORES).slurm == ()
    program(tmp_path, "sinfo", "gpu*|96|gpu:4")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    where = look_around(None, tmp_path, EIGHT_CORES)
    assert (where.slurm, where.description) == ((), "this machine: 8 cores and no GPU, in an allocation of Slurm")


def test_open_mpi_is_offered_and_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "mpirun", "mpirun (Open MPI) 4.1.4")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    where = look_around(None, tmp_path, EIGHT_CORES)
    text = first_study("s", where, Wishes())
    assert '# launcher = "mpirun"' in text
    assert tomllib.loads(text)["launch"] == {}


@pytest.mark.parametrize(
    ("wishes", "section", "values"),
    [
        (Wishes(model="vit-l16"), "model", {"name": "vit-l16", "image_size": 224}),
        (Wishes(data="folder"), "data", {"name": "folder", "root": "~/data", "source_size": 32}),
        (Wishes(data="folder", root='/a "b"'), "data", {"name": "folder", "root": '/a "b"', "source_size": 32}),
        (Wishes(data="ade20k"), "model", {"name": "swinv2-t", "task": "segmentation", "image_size": 64}),
        (Wishes(gpus=(3,)), "scaling", {"mode": "strong-micro", "gpus": [3]}),
        (Wishes(engine="fsdp2"), "train", {"engine": "fsdp2", "micro_batch": 16}),
    ],
)
def test_wishes_are_written_as_they_are(
    tmp_path: Path, wishes: Wishes, section: str, values: dict[str, object]
) -> None:
    text = first_study("s", look_around(None, tmp_path, EIGHT_CORES), wishes)
    assert tomllib.loads(text)[section] == values
    StudyFile.checked(tmp_path / "s.toml", text)
