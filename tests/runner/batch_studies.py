"""A study of ranks that only write records, run by real batch jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

from driving import TINY_MODEL, start
from forks import Prepared
from lab.slurm_cluster import SlurmCluster
from lab.srun_ranks import install
from processes import wait_until
from vitscale import store
from vitscale.store.results import Outcome

_STUDY = """
name = "batch"
{model}
[data]
name = "digits"
[train]
precision = "fp32"
device = "cpu"
micro_batch = 8
[scaling]
gpus = {gpus}
gpus_per_node = 1
[launch]
launcher = "srun"
scheduler = "slurm"
threads_per_rank = 1
[slurm]
python = "{python}"
{slurm}
[node]
cores = 4
[measure]
steps = 5
repeats = {repeats}
{measure}
"""


class BatchStudy:
    """One study in a folder of its own, on a cluster."""

    def __init__(
        self,
        folder: Path,
        cluster: SlurmCluster,
        *,
        gpus: str = "[1, 2]",
        repeats: int = 2,
        slurm: str = "",
        measure: str = "",
    ) -> None:
        folder.mkdir()
        self.folder = folder
        self.results = folder / "results"
        self.cluster = cluster
        self.hold = folder / "hold"
        """While it exists, ranks do not get beyond their first step."""
        python = install(folder)
        text = _STUDY.format(model=TINY_MODEL, gpus=gpus, python=python, slurm=slurm, repeats=repeats, measure=measure)
        (folder / "study.toml").write_text(text)

    def start(self, *arguments: str, within: tuple[str, ...] = (), **environment: str) -> subprocess.Popen[str]:
        """Starts `vitscale run`, `within` an salloc where the nodes' names are known."""
        command = [*within, sys.executable, "-m", "vitscale", "run", "study.toml", "-o", "results", *arguments]
        command = self.cluster.command(command, cwd=self.folder) if within else command
        return start(*command, cwd=self.folder, COLUMNS="120", **self.cluster.environment, **environment)

    def run(self, *arguments: str, **environment: str) -> tuple[int, str]:
        """`vitscale run` to its end: exit code and what it printed."""
        variables = os.environ | {"COLUMNS": "120"} | self.cluster.environment | environment
        command = ["run", "study.toml", "-o", "results", *arguments]
        request = {"kind": "command", "argv": command, "environment": variables, "cwd": str(self.folder)}
        done = Prepared.of_all("commands").run(request, 120, together=True)
        return done.returncode, done.stdout

    def outcomes(self) -> dict[str, Outcome]:
        """By the names of the runs' folders."""
        paths = sorted(self.results.glob("runs/*/outcome.json"))
        return {path.parent.name: Outcome.model_validate_json(path.read_text()) for path in paths}

    def jobs(self) -> list[dict[str, object]]:
        """The job files."""
        return [json.loads(path.read_text()) for path in sorted(self.results.glob("jobs/*.json"))]

    def job_ids(self) -> list[str]:
        """Slurm's numbers of the jobs that have been written down."""
        return [str(job["job_id"]) for job in self.jobs() if job["job_id"] is not None]

    def job_of(self, ranks: int) -> str:
        """The number of the job whose worlds have so many ranks."""
        (job_id,) = (str(job["job_id"]) for job in self.jobs() if str(job["name"]).startswith(f"vitscale-{ranks}x1-"))
        return job_id

    def wait_for_ranks(self, ranks: int) -> None:
        """Returns when so many ranks record."""
        wait_until(lambda: len(self.recording()) >= ranks, f"{ranks} ranks record")

    def recording(self) -> list[Path]:
        """The records that have lines in them."""
        return [path for path in self.results.glob("runs/*/rank-*.jsonl") if path.stat().st_size]

    def check_complete(self, runs: int) -> None:
        """Every run is there once, whole and unmixed."""
        loaded = store.load(self.results)
        assert [problem for problem in loaded.problems if "was tried again" not in problem] == []
        keys = [(one.header.trial_id, one.header.repeat) for one in loaded.runs]
        assert len(keys) == len(set(keys)) == runs
        for one in loaded.runs:
            mark = int(one.header.trial_id, 16) % 1_000_000 + one.header.repeat
            assert one.outcome.kind == "completed"
            # Slurm chooses where a run goes that needs fewer: another job may be completing on the first node.
            assert one.header.hosts in combinations(self.cluster.names, one.header.trial.world.nodes)
            assert [record.rank for record in one.ranks] == list(range(one.header.trial.world.size))
            for record in one.ranks:
                assert [(line.step, line.images) for line in record.steps] == [(n, mark) for n in range(5)]
        assert all(job["closed"] for job in self.jobs())
