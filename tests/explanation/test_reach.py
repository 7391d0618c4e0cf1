"""What keeps the hook from the ranks, by command lines as people write them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from processes import wait_until
from vitscale.explanation.reach import ReachedProcess, hindrances, ignores_python_path, looked_at, reach_sentences


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("python train.py", None),
        ("python -I train.py", "-I"),
        ("/usr/bin/python3.11 -uE -m train", "-E"),
        ("python3 -S train.py", "-S"),
        ("python -u -W ignore -X faulthandler -I train.py", "-I"),
        ("python -Wignore -Xdev -E train.py", "-E"),
        ("python -W -I train.py", None),  # the filter is called -I
        ("python -m train -I", None),
        ("python -mIE", None),
        ("python -c 'x' -S", None),
        ("python train.py -E", None),
        ("python -s -P -u train.py", None),
        ("python --check-hash-based-pycs always -I", None),
        ("torchrun -I train.py", None),
        ("pythonic -I", None),
        ("python", None),
        ("", None),
    ],
)
def test_flags_of_python(line: str, flag: str | None) -> None:
    assert ignores_python_path(line.split()) == flag


@pytest.mark.parametrize(
    ("line", "sign"),
    [
        ("python -I train.py", "python -I in the command"),
        ("torchrun --no-python python -E train.py", "python -E in the command"),
        ("docker run image torchrun train.py", "docker in the command"),
        ("/usr/bin/apptainer exec image.sif python train.py", "apptainer in the command"),
        ("sudo -u me python train.py", "sudo in the command"),
        ("ssh host torchrun train.py", "ssh in the command"),
        ("mpirun -n 4 python train.py", "mpirun without -x PYTHONPATH in the command"),
        ("srun --export=NONE python train.py", "srun --export in the command"),
        ("srun --container-image=torch.sqsh python train.py", "srun --container-... in the command"),
    ],
)
def test_signs_in_the_command(line: str, sign: str) -> None:
    assert [hindrance.sign for hindrance in hindrances(line.split(), [])] == [sign]


@pytest.mark.parametrize(
    "line",
    [
        "python train.py",
        "torchrun --nproc-per-node 2 train.py --data docker_images",
        "accelerate launch train.py",
        "deepspeed train.py --deepspeed_config ds.json",
        "mpirun -x PYTHONPATH -n 4 python train.py",
        "srun --export=ALL,X=1 python train.py",
        "bash train.sh",
    ],
)
def test_no_sign_where_the_variable_reaches(line: str) -> None:
    assert hindrances(line.split(), []) == []


def test_signs_in_processes() -> None:
    processes = [
        ReachedProcess(11, ("bash", "train.sh"), has_hook_in_path=True, has_torch=False),
        ReachedProcess(12, ("python", "train.py", "--lr", "1"), has_hook_in_path=False, has_torch=True),
        ReachedProcess(13, ("python", "-I", "other.py"), has_hook_in_path=True, has_torch=True),
    ]
    signs = [hindrance.sign for hindrance in hindrances(["bash", "train.sh"], processes)]
    assert signs == [
        "process 12 (python train.py) has loaded torch, but its PYTHONPATH was set anew",
        "python -I in process 13",
    ]


def test_many_ranks_with_one_fault_are_one_sign() -> None:
    processes = [ReachedProcess(pid, ("python", "-I", "x.py"), True, True) for pid in range(100, 164)]
    assert len(hindrances(["bash", "x.sh"], processes)) == 1


def test_a_process_with_torch_and_the_hook_leaves_no_doubt() -> None:
    argv = ["mpirun", "-n", "2", "python", "train.py"]
    rank = ReachedProcess(12, ("python", "train.py"), has_hook_in_path=True, has_torch=True)
    assert reach_sentences(argv, [rank]) == "The hook is in process 12 (python train.py), which has loaded torch."
    assert "mpirun without -x PYTHONPATH" in reach_sentences(argv, [rank._replace(has_torch=False)])
    isolated = rank._replace(words=("python", "-I", "train.py"))
    assert "Leave -I out" in reach_sentences(argv, [isolated])


def test_a_command_without_torch_is_said_to_have_none() -> None:
    shell = ReachedProcess(12, ("bash", "train.sh"), has_hook_in_path=True, has_torch=False)
    assert reach_sentences(["bash", "train.sh"], [shell]) == "None of its processes on this host has loaded torch."


MAPS_TORCH = """
import mmap, pathlib, time
with open("libtorch_cpu.so", "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
    pathlib.Path("ready").touch()
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say which libraries a process has")
@pytest.mark.parametrize(("search_path", "is_hooked"), [("/r/hook", True), ("/x:/r/hook", True), ("/r/hook2", False)])
def test_a_real_process_shows_torch_and_its_search_path(tmp_path: Path, search_path: str, is_hooked: bool) -> None:
    (tmp_path / "libtorch_cpu.so").write_bytes(b"torch")
    argv = [sys.executable, "-S", "-c", MAPS_TORCH]
    process = subprocess.Popen(argv, cwd=tmp_path, env={"PYTHONPATH": search_path})
    try:
        wait_until((tmp_path / "ready").exists, "the library is mapped")
        (seen,) = looked_at([psutil.Process(process.pid)], Path("/r/hook"))
    finally:
        process.kill()
        process.wait()
    assert seen == ReachedProcess(process.pid, tuple(argv), has_hook_in_path=is_hooked, has_torch=True)
