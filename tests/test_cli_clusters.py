"""`plan --commands` and `run --dry-run` to the letter, and what is said of a cluster that is asked for wrongly."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from driving import tree
from vitscale import cli

STUDY = """\
name = "example"
[model]
name = "vit-ti16"
image_size = 32
patch_size = 8
[data]
name = "digits"
[train]
micro_batch = 32
epochs = 3
precision = "fp32"
device = "cpu"
[scaling]
gpus = [1, 2]
[launch]
threads_per_rank = 1
oversubscribe = true
"""
HOSTS = "198.51.100.1 slots=1\n198.51.100.2 slots=1\n"  # set aside for documentation (RFC 5737)

TORCHRUN = """\
# f15048742de5: 1 x 2 ranks, 3 runs
PYTHON -P -m torch.distributed.run --standalone --nproc-per-node=2 --max-restarts=0 -m vitscale.worker \
RESULTS/runs/f15048742de5-r0-a0

# 54ac535df4c7: 1 x 1 ranks, 3 runs
PYTHON -P -m torch.distributed.run --standalone --nproc-per-node=1 --max-restarts=0 -m vitscale.worker \
RESULTS/runs/54ac535df4c7-r0-a0
"""
LOCAL = """\
# 2f7d09c5d113: 1 x 2 ranks, 3 runs
PYTHON -P -m vitscale.processes.local_ranks 2 PORT(2f7d09c5d113-r0-a0) vitscale.worker RESULTS/runs/2f7d09c5d113-r0-a0

# 48fada5a9075: 1 x 1 ranks, 3 runs
PYTHON -P -m vitscale.processes.local_ranks 1 PORT(48fada5a9075-r0-a0) vitscale.worker RESULTS/runs/48fada5a9075-r0-a0
"""
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=5 -o ServerAliveCountMax=4 --"

Answer = tuple[int, str, str]
Call = Callable[..., Answer]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs `vitscale` in this process and beside the study: exit code and output. Nothing is written."""
    (tmp_path / "bin").mkdir()
    for name in ("mpirun", "ssh"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("VITSCALE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # mpirun is told where it is root
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "study.toml").write_text(STUDY)
    (tmp_path / "hosts").write_text(HOSTS)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Answer:
        before = {name for name in tree(tmp_path) if not name.startswith("cache")}
        monkeypatch.setattr(sys, "argv", ["vitscale", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        said = capsys.readouterr()
        assert {name for name in tree(tmp_path) if not name.startswith("cache")} == before, "something was written"
        return code, said.out, said.err

    return call


def golden(text: str, results: str = "RESULTS") -> str:
    """`PORT(run)` follows from the run's folder: two drivers of one study, at the same time, must not meet."""

    def port(run: re.Match[str]) -> str:
        folder = f"{results.strip(chr(39))}/runs/{run[1]}"
        return str(20_000 + int(hashlib.sha256(folder.encode()).hexdigest()[:8], 16) % 12_000)

    text = text.replace("PYTHON", sys.executable).replace("RESULTS", results)
    return re.sub(r"PORT\((.*?)\)", port, text)


def test_torchrun_on_one_host(call: Call, tmp_path: Path) -> None:
    assert call("plan", "study.toml", "--commands", "--launcher", "torchrun") == (0, golden(TORCHRUN), "")


def test_one_host_by_default(call: Call, tmp_path: Path) -> None:
    """What starts the same ranks anew; the driver forks them."""
    assert call("plan", "study.toml", "--commands") == (0, golden(LOCAL), "")
    said = golden(LOCAL, f"{tmp_path}/results/example")
    assert call("run", "study.toml", "--dry-run") == (0, said, "")
    said = golden(LOCAL, f"'{tmp_path}/my results'").replace("results'", "results").replace("-a0", "-a0'")
    assert call("run", "study.toml", "--dry-run", "-o", "my results") == (0, said, "")


def test_torchrun_on_two_hosts(call: Call, tmp_path: Path) -> None:
    """An agent on each, under our host agent; the one rank of the smallest world is on the first."""

    def on(host: str, *agent: str) -> str:
        host_agent = ["PYTHON", "-P", "-m", "vitscale.processes.host_agent", agent[-1], "--", *agent]
        return f"{SSH} {host} " + shlex.quote(f"cd {tmp_path} && exec {' '.join(host_agent)}")

    module = ("PYTHON", "-P", "-m", "torch.distributed.run")
    two = "RESULTS/runs/5192783cd618-r0-a0"
    one = "RESULTS/runs/54ac535df4c7-r0-a0"
    agents = [
        on(
            f"198.51.100.{node + 1}", *module, "--nnodes=2", f"--node-rank={node}", "--rdzv-backend=static",
            "--rdzv-conf=timeout=300", "--master-addr=198.51.100.1", "--master-port=PORT(5192783cd618-r0-a0)",
            "--nproc-per-node=1", "--max-restarts=0", "-m", "vitscale.worker", two,
        )
        for node in range(2)
    ]  # fmt: skip
    alone = on(
        "198.51.100.1", *module, "--standalone", "--nproc-per-node=1", "--max-restarts=0", "-m", "vitscale.worker", one
    )
    lines = ["# 5192783cd618: 2 x 1 ranks, 3 runs", *agents, "", "# 54ac535df4c7: 1 x 1 ranks, 3 runs", alone, ""]
    said = golden("\n".join(lines))
    assert call("plan", "study.toml", "--commands", "--hostfile", "hosts") == (0, said, "")


def test_mpirun_on_two_hosts(call: Call, tmp_path: Path) -> None:
    program = f"{tmp_path}/bin/mpirun"
    said = golden(
        f"""\
# 935aba2154aa: 2 x 1 ranks, 3 runs
{program} -np 2 --hostfile RESULTS/runs/935aba2154aa-r0-a0/mpirun.hostfile --map-by ppr:1:node --bind-to none \
PYTHON -P -m vitscale.worker RESULTS/runs/935aba2154aa-r0-a0

# a08e7c49a4bb: 1 x 1 ranks, 3 runs
{program} -np 1 --hostfile RESULTS/runs/a08e7c49a4bb-r0-a0/mpirun.hostfile --map-by ppr:1:node --bind-to none \
PYTHON -P -m vitscale.worker RESULTS/runs/a08e7c49a4bb-r0-a0
"""
    )
    assert call("plan", "study.toml", "--commands", "--hostfile", "hosts", "--launcher", "mpirun") == (0, said, "")
    (tmp_path / "site.toml").write_text('[launch]\nlauncher = "deepspeed"\nhostfile = "hosts"\n')
    by_site = call("plan", "study.toml", "--commands", "--site", "site.toml", "--launcher", "mpirun")
    assert by_site == (0, said, ""), "the command line comes over the site file"


def test_a_plan_names_the_hosts_and_their_commands(call: Call, tmp_path: Path) -> None:
    code, out, err = call("plan", "study.toml", "--hostfile", "hosts")
    assert (code, err) == (0, "")
    assert "hosts" in out
    assert "--nnodes=2" in out
    code, out, err = call("plan", "study.toml", "--json", "--hostfile", "hosts")
    trials = {trial["gpus"]: trial for trial in json.loads(out)["trials"]}
    assert [(gpus, trials[gpus]["nodes"], len(trials[gpus]["commands"])) for gpus in (1, 2)] == [(1, 1, 1), (2, 2, 2)]


# --- what a stranger reads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--launcher", "torchrnu"],
            "unknown launcher 'torchrnu'. Did you mean 'torchrun'? Valid: deepspeed, local, mpirun, srun, torchrun.",
        ),
        (
            ["--hostfile", "nohosts"],
            "hostfile 'FOLDER/nohosts' cannot be read: No such file or directory. Write one line per host: "
            "NAME slots=4.",
        ),
        (
            ["--hostfile", "local"],
            "hostfile 'FOLDER/local' names localhost beside other hosts, to whom that is another. Write the name that "
            "the other hosts know this machine by.",
        ),
        (
            ["--hostfile", "broken"],
            "hostfile 'FOLDER/broken', line 2 is no line of a hostfile: 'node2; reboot'. Write one line per host: "
            "NAME slots=4.",
        ),
        (
            ["--hostfile", "hosts", "--scheduler", "local"],
            "launch.hostfile = 'FOLDER/hosts' has no meaning under launch.scheduler = 'local'. Remove one of the two.",
        ),
        (
            ["--hostfile", "hosts", "--launcher", "srun"],
            "launch.launcher = 'srun' cannot be used: srun not found: use it on a Slurm cluster, or use launcher = "
            "'torchrun'.",
        ),
        (
            ["--hostfile", "one"],
            "2 hosts with room for 1 rank each are needed, and the hostfile has 1. Valid: 198.51.100.1 slots=1. Add "
            "hosts or slots, or use fewer ranks in scaling.gpus.",
        ),
        (
            ["--scheduler", "hostfile"],
            "launch.scheduler = 'hostfile' needs hosts. Give launch.hostfile = \"hosts\" with one line per host: NAME "
            "slots=4.",
        ),
        (
            ["--scheduler", "slrm"],
            "command line: launch.scheduler is 'slrm', but should be 'auto', 'local', 'hostfile', 'slurm', 'pbs', "
            "'lsf', 'flux' or 'kubernetes'. Correct it on the command line. Did you mean 'slurm'?",
        ),
        (
            ["--site", "nosite"],
            "site file 'nosite' cannot be read: No such file or directory. Give a TOML file with [launch], [slurm], "
            "[kubernetes] or [node].",
        ),
        (
            ["--site", "broken"],
            "site file 'broken' is not TOML: Expected '=' after a key in a key/value pair (at line 1, column 7). "
            "Strings need quotes, lists brackets.",
        ),
        (
            ["--launcher", "in-process"],
            "unknown launcher 'in-process'. Valid: deepspeed, local, mpirun, srun, torchrun.",
        ),
    ],
)
@pytest.mark.parametrize("verb", [("plan", "--commands"), ("run", "--dry-run"), ("run", "-o", "results")])
def test_what_cannot_be_is_one_message(
    call: Call, tmp_path: Path, verb: tuple[str, ...], arguments: list[str], said: str
) -> None:
    (tmp_path / "local").write_text("localhost slots=4\nnode2 slots=4\n")
    (tmp_path / "broken").write_text("node1 slots=4\nnode2; reboot\n")
    (tmp_path / "one").write_text("198.51.100.1 slots=1\n")
    code, out, err = call(verb[0], "study.toml", *verb[1:], *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"vitscale: {said}".replace("FOLDER", str(tmp_path)))
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("gpus = [1, 2]", "gpus = [1, 3]\ngpus_per_node = 2", "3 ranks do not fill hosts of 2. Valid: scaling.gpus in"),
        (
            "gpus = [1, 2]",
            "gpus = [1, 4]\ngpus_per_node = 2",
            "launch.launcher = 'local' cannot be used: 2 nodes need 2 hosts, and none are named; name them",
        ),
        (
            "oversubscribe = true",
            'oversubscribe = true\n[sweep]\n"launch.hostfile" = ["a", "b"]',
            "'study.toml': sweep.'launch.hostfile' is no field that can be swept. Did you mean 'launch.launcher'? ",
        ),
        (
            "oversubscribe = true",
            'interface = "eth0; x"',
            "'study.toml', line 17: launch.interface is 'eth0; x', but should be",
        ),
        (
            "oversubscribe = true",
            "oversubscribe = true\n[node]\ngpus = 4",
            "'study.toml', line 18: node.cores is missing. Add",
        ),
    ],
)
def test_what_a_study_asks_for_wrongly_is_one_message(
    call: Call, tmp_path: Path, old: str, new: str, said: str
) -> None:
    (tmp_path / "study.toml").write_text(STUDY.replace(old, new))
    code, out, err = call("plan", "study.toml", "--commands")
    assert (code, out) == (2, "")
    assert err.startswith(f"vitscale: {said}")


def test_what_varies_is_not_given(call: Call, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY + '[sweep]\n"launch.launcher" = ["torchrun", "mpirun"]\n')
    code, _, err = call("plan", "study.toml", "--launcher", "torchrun")
    assert code == 2
    assert err == (
        "vitscale: 'study.toml': sweep.'launch.launcher' varies what --launcher or the site file decides. "
        "Remove one of the two.\n"
    )
    code, out, _ = call("plan", "study.toml", "--commands")
    assert (code, out.count("mpirun -np"), out.count("torch.distributed.run")) == (0, 2, 2)
