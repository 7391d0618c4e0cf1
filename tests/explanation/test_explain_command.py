"""`vitscale explain` from the command line to the answer: real ranks, the real hook, a planted cause."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from driving import processes_naming, vitscale
from explanation.scripted_commands import python, scripted_ranks

DDP = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

class Slow(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.randn(16), index % 4

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "checkpoint.pt")
data = Slow()
print("training", flush=True)
for images, classes in DataLoader(data, batch_size=8, sampler=DistributedSampler(data)):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images), classes).backward()
    optimizer.step()
"""


@pytest.mark.ranks
def test_a_slow_loader_of_a_torchrun_command_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DDP)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    answer = vitscale("explain", "--json", "--steps", "10", "--seconds", "5", "--", *launch, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    told = json.loads(answer.stdout)
    assert told["command_end"] == "agreed_step"
    assert (told["ranks_read"], told["ranks_missing"], told["survivors"], told["problems"]) == (2, 0, [], [])
    assert told["causes"][0]["kind"] == "data-wait"
    assert told["causes"][0]["code"]["function"] == "__getitem__"
    assert [file["path"] for file in told["files_written"]] == ["checkpoint.pt"]
    assert "training" in answer.stderr  # its own output goes beside the JSON
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "checkpoint.pt", "vitscale-explain-1"}
    results = tmp_path / "vitscale-explain-1"
    assert json.loads((results / "explain.json").read_text())["answer"] == told["answer"]
    assert told["answer"][1:] in (results / "explain.md").read_text()
    assert "training" in (results / "output.log").read_text()
    assert processes_naming(tmp_path) == []


def test_the_answer_follows_the_output_of_the_command(tmp_path: Path) -> None:
    command = scripted_ranks(tmp_path, 2, "short")
    answer = vitscale("explain", "-o", "explained", "--seconds", "0.5", "--", *command, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    launched, _, rest = answer.stdout.partition("\n")
    assert launched == "launched [0, 0]"
    assert "a step" in rest
    assert "explained" in rest
    first, *_ = answer.stderr.splitlines()
    assert first.startswith("vitscale: The program runs as it is: it may overwrite its own checkpoints and logs.")


def test_a_command_that_fails_is_an_error_with_its_last_lines(tmp_path: Path) -> None:
    command = python("import sys; print('reading'); sys.exit('no such data set')")
    answer = vitscale("explain", "--", *command, cwd=tmp_path)
    assert answer.returncode == 1
    assert answer.stdout == "reading\n"
    assert "the command ended with exit code 1" in answer.stderr
    assert answer.stderr.count("no such data set") == 2  # as it was printed, and in the error
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no command is given"),
        (("--steps", "0", "--", "python"), "--steps: 0 cannot be"),
        (("--seconds", "0", "--", "python"), "--seconds: 0 cannot be"),
        (("-o", "there", "--", "python"), "has something in it"),
        (("-o", "a:b", "--", "python"), "PYTHONPATH"),
        (("--", "no-such-program"), "cannot be run"),
    ],
)
def test_a_wrong_request_starts_and_writes_nothing(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/mine").write_text("mine")
    answer = vitscale("explain", *arguments, cwd=tmp_path)
    assert answer.returncode == 2
    assert message in answer.stderr.replace("\n", " ")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine", "there"]


def test_options_of_the_command_are_its_own(tmp_path: Path) -> None:
    """Also those that vitscale has too, with and without the two dashes."""
    code = "import sys; print(sys.argv[1:])"
    for dashes in (["--"], []):
        answer = vitscale("explain", *dashes, *python(code), "--json", "-o", "x", "--steps", "--", "7", cwd=tmp_path)
        assert answer.stdout == "['--json', '-o', 'x', '--steps', '--', '7']\n"


def test_a_command_that_is_kept_gives_its_exit_code(tmp_path: Path) -> None:
    command = scripted_ranks(tmp_path, 1, "brief")
    answer = vitscale("explain", "--keep", "--steps", "5", "--seconds", "0.5", "--", *command, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "a step" in answer.stdout
    assert answer.stdout.rstrip().endswith("launched [0]")
