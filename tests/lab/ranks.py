"""Runs the ranks of one trial, each on a host or a core of its own, and reads back what they recorded."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from forks import prepared_here
from lab.hosts import INTERFACE, Hosts
from vitscale import sources, store
from vitscale.store.results import Outcome, Run, RunHeader
from vitscale.trial.model_spec import ModelSpec, resolve
from vitscale.trial.parallel import ParallelSpec
from vitscale.trial.trial import DataSpec, TrainSpec, Trial, WindowSpec, World

_INJECTED = Path(__file__).with_name("injected.py")

MODEL = ModelSpec(name="vit-ti16", image_size=32, patch_size=8, layers=6)
"""2.7 million parameters, and few large operators: what the profiler costs stays small."""


def make_trial(
    engine: str = "ddp",
    ranks: int = 2,
    *,
    steps: int = 28,
    workers: int = 0,
    micro_batch: int = 32,
    samples: int | None = None,
    model: ModelSpec = MODEL,
    window: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    **train: Any,
) -> Trial:
    """A trial on synthetic images, one core per rank."""
    own = {"name": "synthetic", "samples": samples or 64 * micro_batch, "workers": workers, "augment": False}
    return Trial(
        model=resolve(model, 10),
        data=DataSpec.model_validate(own | (data or {})),
        train=TrainSpec(engine=engine, precision="fp32", device="cpu", micro_batch=micro_batch, **train),
        world=World(ranks_per_node=ranks, threads_per_rank=1),
        window=WindowSpec(**{"steps": steps, "warmup_steps": 2, "evaluate": False} | (window or {})),
        launcher="torchrun",
        parallel=ParallelSpec.model_validate(parallel or {}),
    )


def run_ranks(
    trial: Trial,
    results: Path,
    hosts: Hosts | None = None,
    injected: dict[str, Any] | None = None,
    *,
    repeat: int = 0,
    first_core: int = 0,
) -> Run:
    """Starts every rank, waits for all, and returns the run.

    Rank r computes on a core of its own: of those that this process may use, the one numbered `first_core` + r.
    """
    summary = sources.check(trial.data)
    header = RunHeader(
        trial_id=trial.identity(),
        repeat=repeat,
        attempt=0,
        trial=trial,
        command=(),
        dataset_fingerprint=summary.fingerprint,
    )
    folder = store.new_run_folder(results, header)
    cores = sorted(os.sched_getaffinity(0))
    port = 29500 if hosts else _free_port()
    forks = []
    for rank in range(trial.world.size):
        environment = {
            "RANK": rank,
            "WORLD_SIZE": trial.world.size,
            "LOCAL_RANK": 0,  # each is alone on its core, as on a host of its own
            "MASTER_ADDR": hosts.address(0) if hosts else "127.0.0.1",
            "MASTER_PORT": port,
            "INJECTED": json.dumps(injected or {}),
        } | ({"GLOO_SOCKET_IFNAME": INTERFACE} if hosts else {})
        forks.append(
            (hosts.prepared(rank) if hosts else prepared_here()).start(
                _INJECTED,
                folder,
                log=folder / f"log-{rank}.txt",
                environment=environment,
                core=cores[(first_core + rank) % len(cores)],
            )
        )
    codes = [fork.wait(300) for fork in forks]
    logs = [(folder / f"log-{rank}.txt").read_text()[-2000:] for rank in range(len(codes))]
    assert codes == [0] * len(codes), "\n".join(logs)
    outcome = Outcome(kind="completed", reason="", started_unix_seconds=1.0, wall_seconds=1.0)
    store.write_outcome(folder, outcome)
    return Run(header=header, outcome=outcome, ranks=store.read_ranks(folder))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
