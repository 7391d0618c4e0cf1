"""`python -m vitscale.processes.local_ranks` and its ranks: real processes, as unruly as ranks can be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from processes import alive, pid_in, wait_until
from vitscale.runner import evidence

# A rank: says who it is and who started it, then does what its folder's file of its number says.
RANK = """
import json, os, signal, sys, time
folder, rank = sys.argv[1], os.environ.get("RANK", "0")
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")
with open(f"{folder}/said-{rank}", "w") as file:
    json.dump({name: os.environ.get(name) for name in names}, file)
with open(f"{folder}/draft-{rank}", "w") as file:
    file.write(f"{os.getpid()}\\n")
os.rename(f"{folder}/draft-{rank}", f"{folder}/pid-{rank}")
exec(open(f"{folder}/do-{rank}").read())
"""
SLEEPS = "time.sleep(600)"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); open(f'{folder}/deaf', 'w'); time.sleep(600)"
WAITS_FOR_DEAF = "\nwhile not os.path.exists(f'{folder}/deaf'): time.sleep(0.01)\n"


def start(folder: Path, *ranks: str, setting: str = "", **environment: str) -> subprocess.Popen[str]:
    (folder / "a_rank.py").write_text(RANK)
    for number, does in enumerate(ranks):
        (folder / f"do-{number}").write_text(does)
    program = (
        f"import sys; from vitscale.processes import local_ranks as own; {setting}\nsys.exit(own.main(sys.argv[1:]))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, str(len(ranks)), "23456", "a_rank", str(folder)],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(folder)} | environment,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, evidence.Reports]:
    said = process.communicate(timeout=300)[1]
    return process.returncode, evidence.read_reports(said)


def test_each_rank_is_told_its_place_and_not_that_of_a_launcher_around(tmp_path: Path) -> None:
    code, reports = ended(start(tmp_path, "", "", SLURM_PROCID="7", RANK="9"))
    assert (code, reports.codes, reports.lists_all_failures) == (0, (), False)
    for rank in range(2):
        assert json.loads((tmp_path / f"said-{rank}").read_text()) == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "23456",
            "SLURM_PROCID": None,
        }


def test_a_lone_rank_meets_nobody(tmp_path: Path) -> None:
    assert ended(start(tmp_path, ""))[0] == 0
    assert set(json.loads((tmp_path / "said-0").read_text()).values()) == {None}


@pytest.mark.parametrize(
    ("does", "code", "told"), [("sys.exit(7)", 7, 7), ("os.kill(os.getpid(), signal.SIGKILL)", 137, -9)]
)
def test_when_one_fails_the_others_are_ended_and_all_codes_told(
    tmp_path: Path, does: str, code: int, told: int
) -> None:
    process = start(tmp_path, SLEEPS, f"\nwhile not os.path.exists(f'{{folder}}/pid-0'): time.sleep(0.01)\n{does}")
    answer, reports = ended(process)
    assert answer == code
    assert reports.codes == ((1, told), (0, -signal.SIGTERM)), "the cause first"
    assert (reports.lists_all_failures, reports.launcher_killed) == (True, False)
    assert not alive(pid_in(tmp_path / "pid-0"))


def test_one_that_does_not_heed_is_killed_and_that_is_said(tmp_path: Path) -> None:
    process = start(tmp_path, DEAF, f"{WAITS_FOR_DEAF}sys.exit(3)", setting="own._GRACE_SECONDS = 0.1")
    code, reports = ended(process)
    assert (code, reports.codes, reports.launcher_killed) == (3, ((1, 3), (0, -signal.SIGKILL)), True)


def test_ranks_that_end_by_themselves_are_heard_first(tmp_path: Path) -> None:
    """What a rank says of another's end is not cut off."""
    waits = (
        "\nwhile not os.path.exists(f'{folder}/gone'): time.sleep(0.01)"
        "\npid = open(f'{folder}/gone').read()"
        "\nwhile os.path.exists(f'/proc/{pid}'): time.sleep(0.01)"  # until its end was heard, and not only near
        "\nsys.exit(5)"
    )
    goes = (
        "\nopen(f'{folder}/going', 'w').write(str(os.getpid()))"
        "\nos.rename(f'{folder}/going', f'{folder}/gone')"
        "\nsys.exit(4)"
    )
    process = start(tmp_path, waits, goes, setting="own._MESSAGE_SECONDS = 60")
    assert ended(process)[1].codes == ((1, 4), (0, 5))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_are_passed_on(tmp_path: Path, number: signal.Signals) -> None:
    tells = f"signal.signal({int(number)}, lambda *_: sys.exit(21)); open(f'{{folder}}/ready-{{rank}}', 'w'); {SLEEPS}"
    process = start(tmp_path, tells, tells)
    wait_until(lambda: len([*tmp_path.glob("ready-*")]) == 2, "both ranks wait for it")
    process.send_signal(number)
    code, reports = ended(process)
    assert code == 21
    assert sorted(reports.codes) == [(0, 21), (1, 21)]


@pytest.mark.parametrize("arguments", [[], ["0", "1", "a", "b"], ["two", "1", "a", "b"], ["2", "port", "a", "b"]])
def test_other_arguments_are_refused_with_the_usage(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "vitscale.processes.local_ranks", *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (answer.returncode, answer.stderr.startswith("usage: ")) == (1, True)
