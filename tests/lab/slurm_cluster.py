"""A real Slurm for tests: munged, slurmctld and one slurmd per node, all on this machine, in a folder of their own.

Nodes are named node0, node1, ...; within the cluster (and only there) these names lead to this machine, through an
/etc/hosts in a mount namespace of its own. Needs root and Debian's slurm-wlm and munge.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from needs import root_and, skip_or_fail
from processes import wait_until

_CONF = """\
ClusterName=vitscale-tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=100
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,default_queue_depth=1000
SlurmdParameters=config_overrides
MinJobAge={min_job_age_seconds}
KillWait=5
InactiveLimit=0
ReturnToService=0
SlurmdTimeout=300
MessageTimeout=5
MaxJobCount=1000
{gres_types}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """A running cluster. Clients find it through `environment`."""

    def __init__(self, folder: Path, nodes: int, cpus: int, gpus: int, min_job_age_seconds: int) -> None:
        self.folder = folder
        self.names = tuple(f"node{number}" for number in range(nodes))
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._namespace: subprocess.Popen[bytes] | None = None
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._controller: subprocess.Popen[bytes] | None = None
        host = socket.gethostname().partition(".")[0]
        ports = _free_ports(nodes + 1)
        gres = f" Gres=gpu:{gpus}" if gpus else ""
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=1000{gres}"
            for name, port in zip(self.names, ports[1:], strict=True)
        ]
        text = _CONF.format(
            host=host,
            ctld_port=ports[0],
            folder=folder,
            min_job_age_seconds=min_job_age_seconds,
            gres_types="GresTypes=gpu" if gpus else "",
            nodes="\n".join(lines),
        )
        (folder / "slurm.conf").write_text(text)
        if gpus:
            # slurmd opens no device file, but takes a node whose GPUs are not each a character device for INVALID.
            (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File=/dev/tty[0-{gpus - 1}]\n")
        (folder / "hosts").write_text(
            "127.0.0.1 localhost\n" + "".join(f"127.0.0.1 {name}\n" for name in (host, *self.names))
        )
        (folder / "state").mkdir()

    def command(self, argv: Sequence[str], cwd: Path = Path("/")) -> list[str]:
        """`argv` as it is run in `cwd` where the nodes' names are known."""
        assert self._namespace is not None
        return ["nsenter", f"--mount=/proc/{self._namespace.pid}/ns/mnt", f"--wdns={cwd}", *argv]

    def ask(self, *argv: str) -> str:
        """What a Slurm command prints."""
        return subprocess.run(
            argv, env=os.environ | self.environment, check=True, capture_output=True, text=True
        ).stdout.strip()

    def start(self) -> None:
        """Starts everything; returns when all nodes take jobs."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._enter_namespace()
        munge = [f"--{what}-file={self.folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
        self._daemon("munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *munge)
        wait_until(lambda: self._all_run() and (self.folder / "munge.socket").exists(), "munged listens")
        self.start_controller()
        for name in self.names:
            self._daemon(*self.command(["slurmd", "-D", "-N", name]))
        wait_until(lambda: self._all_run() and self._states() == ["idle"] * len(self.names), "all nodes are idle")

    def start_controller(self, *, forgetful: bool = False) -> None:
        """Starts slurmctld; `forgetful`: without the jobs it knew, as after MinJobAge."""
        self._controller = self._daemon("slurmctld", "-D", "-i", *(["-c"] if forgetful else []))

    def wait_for_controller(self) -> None:
        """Returns when slurmctld answers and all nodes are up."""
        wait_until(lambda: len(self._states()) == len(self.names), "slurmctld answers")

    def stop_controller(self) -> None:
        """Ends slurmctld; jobs go on, and nobody answers their users."""
        assert self._controller is not None
        self._controller.terminate()
        self._controller.wait(60)
        self._daemons.remove(self._controller)

    def stop(self) -> None:
        """Cancels all jobs, ends all daemons and every process of a job."""
        with contextlib.suppress(subprocess.CalledProcessError):
            self.ask("scancel", "--user=root")
        # At once: nothing of the cluster is kept, and a slurmd that is asked waits for its jobs.
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        # Two looks: what is just being forked can slip through the first.
        while left := self._left() or self._left():
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=1.0)
        if self._namespace is not None:
            self._namespace.kill()
            self._namespace.wait()

    def _all_run(self) -> bool:
        for daemon in self._daemons:
            if daemon.poll() is not None:
                said = "".join(path.read_text()[-2000:] for path in self.folder.glob("*.out"))
                skip_or_fail(f"a daemon of Slurm ended at once: {daemon.args!r}: {said}")
        return True

    def _states(self) -> list[str]:
        answer = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"],
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return answer.stdout.split()

    def _left(self) -> list[psutil.Process]:
        """All that runs on the nodes, by their mount namespace, and slurmctld's helpers, by their environment."""
        own = _mount_namespace(self._namespace.pid) if self._namespace is not None else None
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                on_a_node = _mount_namespace(process.pid) == own
                if on_a_node or process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                    found.append(process)
        return [process for process in found if self._namespace is None or process.pid != self._namespace.pid]

    def _enter_namespace(self) -> None:
        hosts = self.folder / "hosts"
        ready = self.folder / "namespace-is-ready"
        script = 'mount --bind "$1" /etc/hosts && : > "$2" && exec sleep infinity'
        namespace = subprocess.Popen(
            ["unshare", "--mount", "--propagation=slave", "sh", "-c", script, "sh", str(hosts), str(ready)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._namespace = namespace
        wait_until(lambda: ready.exists() or namespace.poll() is not None, "the namespace is there")
        if not ready.exists():
            skip_or_fail("cannot mount a hosts file in a namespace")

    def _daemon(self, *argv: str) -> subprocess.Popen[bytes]:
        log = self.folder / f"{Path(argv[0]).name}.out"
        with log.open("ab") as output:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | self.environment,
                cwd=self.folder,
                start_new_session=True,
            )
        self._daemons.append(process)
        return process


@contextmanager
def slurm_cluster(
    nodes: int = 2, cpus: int = 4, gpus: int = 0, min_job_age_seconds: int = 300
) -> Iterator[SlurmCluster]:
    """A cluster of `nodes` nodes, each said to have `cpus` CPUs and `gpus` GPUs. Nothing of it is left afterwards.

    A job is given the numbers of its GPUs (CUDA_VISIBLE_DEVICES), which are consoles: nothing computes on them.

    Skips the test, with the reason, where Slurm cannot be run.
    """
    root_and("slurmctld", "slurmd", "srun", "munged", "unshare", "nsenter")
    folder = Path(tempfile.mkdtemp(prefix="vitscale-slurm-"))
    with _one_at_a_time():
        cluster = SlurmCluster(folder, nodes, cpus, gpus, min_job_age_seconds)
        try:
            cluster.start()
        except BaseException:
            cluster.stop()
            shutil.rmtree(folder, ignore_errors=True)
            raise
    try:
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _mount_namespace(pid: int) -> int:
    return Path(f"/proc/{pid}/ns/mnt").stat().st_ino


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Ports are free until their daemons listen: another process's cluster must not find the same ones meanwhile."""
    with (Path(tempfile.gettempdir()) / "vitscale-slurm-starts.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
