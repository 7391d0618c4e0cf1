"""Files with the run's token or the values of [launch.environment] are their owner's alone: another user reads none."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launching import BareLauncher, world
from prediction_factory import resolved_study
from processes import wait_until
from results_factory import write_results
from vitscale.launchers import LAUNCHERS
from vitscale.processes import launch_file
from vitscale.runner.batch_file import BatchTask, JobFile
from vitscale.runner.one_run import launch_plan, start_ranks
from vitscale.schedulers import Local
from vitscale.store import read_study, write_record, write_study
from vitscale.store.bundles import write_bundle
from vitscale.store.private_values import is_private, launch_variables, study_tables
from vitscale.study.sections import LaunchSection, MeasureSection, SlurmSection

KEY = "very-secret-key"
NOBODY = 65534


@pytest.fixture(autouse=True)
def bare_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bare` starts a rank by its own command."""
    monkeypatch.setitem(LAUNCHERS, "bare", BareLauncher())


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all users may enter, as under /scratch, and the usual umask."""
    folder = Path(tempfile.mkdtemp(prefix="vitscale-shared-"))
    folder.chmod(0o755)
    before = os.umask(0o022)
    yield folder
    os.umask(before)
    shutil.rmtree(folder)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def as_another_user(*command: str | Path) -> subprocess.CompletedProcess[str]:
    setpriv = shutil.which("setpriv")
    if os.geteuid() != 0 or setpriv is None:
        pytest.skip("only root may act as another user, by setpriv")
    argv = [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--", *map(str, command)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def started(folder: Path) -> launch_file.LaunchFile:
    """A run with a secret in its study's variables, ended."""
    section = LaunchSection(environment={"WANDB_API_KEY": KEY})
    spawn = launch_plan(Local(), section, "bare", world(1, 1), folder, "platform")
    job = start_ranks(spawn, Local(), section, environment={})
    try:
        wait_until(lambda: job.exit_code is not None, "it ends")
    finally:
        job.end()
    written = launch_file.read(folder)
    assert written is not None
    return written


def test_another_user_reads_neither_token_nor_variables(shared: Path) -> None:
    assert started(shared).environment["WANDB_API_KEY"] == KEY, "its owner reads it"
    assert mode(shared / "launch.json") == 0o600
    assert as_another_user("ls", shared).stdout == "launch.json\nlog.txt\n", "the folder itself is open to all"
    looked = as_another_user("cat", shared / "launch.json")
    assert (looked.returncode, looked.stdout) == (1, "")
    assert "Permission denied" in looked.stderr


def test_a_private_file_is_private_from_its_first_byte_on_and_when_replaced(shared: Path) -> None:
    path = shared / "file.json"
    write_record(path, "open")
    assert mode(path) == 0o644
    write_record(path, "secret", private=True)
    assert mode(path) == 0o600


@pytest.mark.parametrize(
    ("launch", "overrides", "kept"),
    [
        (f'environment = {{ WANDB_API_KEY = "{KEY}" }}', (), 0o600),
        (f'environment = {{ MY_SETTING = "{KEY}" }}', (), 0o600),
        (f'[launch.environment]\nHF_PAT = "{KEY}"', (), 0o600),
        ("", (f"launch.environment.MY_PAT={KEY}",), 0o600),
        ("", (f'launch.environment={{ A = "{KEY}" }}',), 0o600),
        ('environment = { NCCL_SOCKET_IFNAME = "ib0,ib1", MODE = "offline" }', (), 0o644),
        ('environment = { PYTHONPATH = "/study:/more" }', (), 0o644),
        ("", (), 0o644),
        ("= no TOML", (), 0o644),
    ],
)
def test_study_json_is_private_where_it_has_such_values(
    shared: Path, launch: str, overrides: tuple[str, ...], kept: int
) -> None:
    study = resolved_study({1: [0.1]}).study
    text = f'name = "x"\n[launch]\n{launch}\n'
    write_study(shared, study.model_copy(update={"text": text, "overrides": overrides}))
    assert mode(shared / "study.json") == kept
    assert read_study(shared) is not None


def test_a_job_s_file_is_private_where_it_has_such_values(shared: Path) -> None:
    for digits, environment, kept in (("0" * 8, {"A_TOKEN": KEY}, 0o600), ("1" * 8, {"NCCL_DEBUG": "INFO"}, 0o644)):
        job = JobFile(
            name=f"vitscale-1x1-{digits}",
            array=False,
            tasks=(BatchTask(trial_id="0" * 12, repeat=0, attempt=0),),
            study_folder="/study",
            launch=LaunchSection(environment=environment),
            slurm=SlurmSection(),
            measure=MeasureSection(),
        )
        job.write(shared)
        assert mode(shared / "jobs" / f"{job.name}.json") == kept


def test_a_bundle_of_a_private_study_is_private_until_it_is_redacted(shared: Path) -> None:
    results = resolved_study({1: [0.1]})
    text = f'name = "x"\n[launch]\nenvironment = {{ WANDB_API_KEY = "{KEY}" }}\n'
    write_results(results.model_copy(update={"study": results.study.model_copy(update={"text": text})}), shared / "r")
    for redact, kept in ((False, 0o600), (True, 0o644)):
        write_bundle(shared / "r", shared / "bundle.tar.gz", redact=redact)
        assert mode(shared / "bundle.tar.gz") == kept


def test_variables_are_found_wherever_a_study_says_them() -> None:
    study = resolved_study({1: [0.1]}).study
    text = '[launch]\nenvironment.A = "1 of text"\nenvironment.B = "2"\n'
    overrides = ('launch.environment.B=a "bare" \\ word', "train.micro_batch=4", "no key")
    told = launch_variables(study.model_copy(update={"text": text, "overrides": overrides}))
    assert told == {"A": "1 of text", "B": 'a "bare" \\ word'}
    assert [*study_tables("a." * 50 + "b = 1")] == [], "keys that take tomllib quadratic time are not parsed"


def test_a_path_and_a_library_s_setting_are_no_secrets() -> None:
    shown = {"HF_HOME": "/models", "NCCL_IB_HCA": "mlx5_0:1", "MODE": "offline"}
    assert not any(is_private(name, value) for name, value in shown.items())
    assert is_private("NCCL_MY_SECRETX", "x")
    assert is_private("SETTING", "hunter32passabc")
