"""A whole study by jobs of PBS: shell scripts stand for PBS, and run its jobs on this machine; ranks only record."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from driving import TINY_MODEL, start
from forks import Prepared
from lab import srun_ranks
from needs import root_and
from processes import wait_until
from vitscale import store
from vitscale.store.results import Outcome

pytestmark = pytest.mark.ranks

_STUDY = """
name = "pbs"
{model}
[data]
name = "digits"
[train]
precision = "fp32"
device = "cpu"
micro_batch = 8
[scaling]
gpus = [2]
[launch]
launcher = "mpirun"
scheduler = "pbs"
threads_per_rank = 1
oversubscribe = true
[slurm]
python = "{python}"
time = "30"
[node]
cores = 4
[measure]
steps = 5
repeats = 2
"""
_RANK = """\
#!/bin/sh
if [ "$3" = vitscale.worker ]; then
    SLURM_PROCID="$OMPI_COMM_WORLD_RANK" exec "{python}" "{ranks}" "{folder}" "$4"
fi
exec "{python}" "$@"
"""
# A job is a folder: its script's name, its process while it runs, its exit code once it is over.
_QSUB = """\
#!/bin/sh
cd "{folder}" || exit 1
job="$(( $(ls -d *.pbs1 2>/dev/null | wc -l) + 1 )).pbs1"
mkdir "$job"
sed -n 's/^#PBS -N //p' "$1" > "$job/name"
for rank in 1 2; do hostname; done > "$job/nodes"
date '+%a %b %d %H:%M:%S %Y' > "$job/start"
env -i HOME="$HOME" PATH="$PATH" PBS_JOBID="$job" PBS_NODEFILE="$PWD/$job/nodes" setsid sh -c '
  /bin/bash < "$1" & echo $! > "$2/process"; wait $!; echo $? > "$2/code.new"; mv "$2/code.new" "$2/code"
' sh "$1" "$PWD/$job" > "$job/out" 2>&1 < /dev/null &
echo "$job"
"""
_QSELECT = """\
#!/bin/sh
cd "{folder}" && grep -lx "$3" */name 2>/dev/null | sed 's:/name::'
exit 0
"""
_QSTAT = """\
#!/bin/sh
shift 4
cd "{folder}" || exit 1
echo '{{"pbs_version": "23.06.06", "Jobs": {{'
comma=
for job; do
  state='"job_state": "R", "substate": 42'
  [ ! -e "$job/code" ] || state="\\"job_state\\": \\"F\\", \\"substate\\": 92, \\"Exit_status\\": $(cat "$job/code")"
  [ ! -e "$job/deleted" ] || state="$state, \\"comment\\": \\"Job run at Sat and terminated by user@here\\""
  echo "$comma \\"$job\\": {{\\"Job_Name\\": \\"$(cat "$job/name")\\", \\"stime\\": \\"$(cat "$job/start")\\", $state,"
  echo '"Resource_List": {{"walltime": "00:30:00"}}, "exec_host": "here/0*2"}}'
  comma=,
done
echo '}}}}'
"""
_QDEL = """\
#!/bin/sh
cd "{folder}" && touch "$1/deleted" && kill -TERM "$(cat "$1/process")"
"""


class PbsStudy:
    """One study in a folder of its own, and the programs that stand for PBS."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results = folder / "results"
        self.hold = folder / "hold"
        """While it exists, ranks do not get beyond their first step."""
        self._jobs = folder / "pbs"
        self._jobs.mkdir()
        programs = folder / "bin"
        programs.mkdir()
        for name, text in (("qsub", _QSUB), ("qselect", _QSELECT), ("qstat", _QSTAT), ("qdel", _QDEL)):
            self._write(programs / name, text.format(folder=self._jobs))
        python = folder / "python"
        self._write(python, _RANK.format(python=sys.executable, ranks=srun_ranks.__file__, folder=folder))
        (folder / "study.toml").write_text(_STUDY.format(model=TINY_MODEL, python=python))
        self.environment = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120"}

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def run(self) -> tuple[int, str]:
        """Return the exit code of `vitscale run`, and what it printed."""
        command = ["run", "study.toml", "-o", "results"]
        variables = os.environ | self.environment
        request = {"kind": "command", "argv": command, "environment": variables, "cwd": str(self.folder)}
        done = Prepared.of_all("commands").run(request, 120, together=True)
        return done.returncode, done.stdout

    def outcomes(self) -> list[Outcome]:
        paths = sorted(self.results.glob("runs/*/outcome.json"))
        return [Outcome.model_validate_json(path.read_text()) for path in paths]

    def recording(self) -> list[Path]:
        """Return the records that have lines in them."""
        return [path for path in self.results.glob("runs/*/rank-*.jsonl") if path.stat().st_size]


@pytest.fixture
def study(tmp_path: Path) -> PbsStudy:
    root_and("mpirun")
    return PbsStudy(tmp_path)


def test_a_job_of_pbs_does_the_runs(study: PbsStudy) -> None:
    code, said = study.run()
    assert code == 0, said
    assert "job 1.pbs1 submitted: 2 runs on 1 x 2 ranks" in said
    loaded = store.load(study.results)
    assert [len(run.ranks) for run in loaded.runs] == [2, 2]
    assert [run.outcome.kind for run in loaded.runs] == ["completed"] * 2
    assert {run.header.hosts for run in loaded.runs} == {(socket.gethostname(),)}
    (output,) = study.results.glob("jobs/*-1.pbs1.out")
    assert output.read_text(), "what the job prints is seen while it runs"
    (job,) = study.results.glob("jobs/*.json")
    assert json.loads(job.read_text())["closed"] is True


def test_a_job_that_is_deleted_says_so_and_the_same_command_goes_on(study: PbsStudy) -> None:
    study.hold.touch()
    watching = start(sys.executable, "-m", "vitscale", "run", "study.toml", "-o", "results", cwd=study.folder,
                     **study.environment)  # fmt: skip
    wait_until(lambda: len(study.recording()) == 2, "both ranks record")
    subprocess.run(["qdel", "1.pbs1"], check=True, env=os.environ | study.environment)
    said, _ = watching.communicate(timeout=60)
    assert {(outcome.kind, outcome.reason) for outcome in study.outcomes()} == {
        ("failed", "cancelled by qdel (job 1.pbs1)")
    }, said
    study.hold.unlink()
    code, said = study.run()
    assert code == 0, said
    assert "job 2.pbs1 submitted: 2 runs" in said
    assert sorted(run.outcome.kind for run in store.load(study.results).runs) == ["completed"] * 2
