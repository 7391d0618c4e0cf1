from __future__ import annotations

import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

from study_factory import expanded
from vitscale.errors import RequestError
from vitscale.launchers import LAUNCHERS, launcher_for
from vitscale.trial import Trial, World

FOLDER = Path("/results/with a space/runs/0123456789ab-r0-a0")


def world(ranks: int, nodes: int = 1) -> World:
    return World(nodes=nodes, ranks_per_node=ranks, threads_per_rank=2)


def a_trial(tmp_path: Path, launcher: str, ranks: int, nodes: int = 1) -> Trial:
    trial = next(iter(expanded(tmp_path).trials.values()))
    return trial.model_copy(update={"launcher": launcher, "world": world(ranks, nodes)})


@pytest.mark.parametrize(
    ("launcher", "ranks", "argv"),
    [
        (
            "in-process", 1,
            [sys.executable, "-m", "vitscale.worker", "/results/with a space/runs/0123456789ab-r0-a0"],
        ),
        (
            "torchrun", 1,
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--max-restarts=0",
             "-m", "vitscale.worker", "/results/with a space/runs/0123456789ab-r0-a0"],
        ),
        (
            "torchrun", 8,
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=8", "--max-restarts=0",
             "-m", "vitscale.worker", "/results/with a space/runs/0123456789ab-r0-a0"],
        ),
    ],
)  # fmt: skip
def test_the_exact_command(launcher: str, ranks: int, argv: list[str]) -> None:
    assert LAUNCHERS[launcher].command(world(ranks), FOLDER) == argv


def test_torchrun_knows_every_option_it_is_given() -> None:
    """Asked of torch itself, without starting a rank."""
    options = [word.partition("=")[0] for word in LAUNCHERS["torchrun"].command(world(2), FOLDER) if word[:2] == "--"]
    helped = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert options
    assert all(option in helped for option in options)


@pytest.mark.parametrize("launcher", sorted(LAUNCHERS))
def test_every_launcher_starts_one_rank(tmp_path: Path, launcher: str) -> None:
    assert launcher_for(a_trial(tmp_path, launcher, 1)) is LAUNCHERS[launcher]


@pytest.mark.parametrize(
    ("launcher", "ranks", "nodes", "said"),
    [
        ("mpirum", 1, 1, "unknown launcher 'mpirum'. Valid: in-process, torchrun"),
        ("torchrum", 1, 1, "Did you mean 'torchrun'?"),
        ("in-process", 2, 1, "it starts one rank, not 2; use launcher = 'torchrun', or scaling.gpus = [1]"),
        ("torchrun", 1, 2, "it is used on one node here, not 2"),
    ],
)
def test_what_cannot_start_is_refused(tmp_path: Path, launcher: str, ranks: int, nodes: int, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        launcher_for(a_trial(tmp_path, launcher, ranks, nodes))
    assert said in str(caught.value)


def test_a_launcher_that_is_not_here_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(util, "find_spec", lambda _: None)
    with pytest.raises(
        RequestError, match=r"launch.launcher = 'torchrun' cannot be used: torch is not installed; install it"
    ):
        launcher_for(a_trial(tmp_path, "torchrun", 1))
    assert launcher_for(a_trial(tmp_path, "in-process", 1))
