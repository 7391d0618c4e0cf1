"""Fixtures that several folders share; the order of all tests, and what is done by the same process."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import shutil
import signal
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest
from threadpoolctl import threadpool_limits
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from forks import AT_FIRST, BRIEF, FOLDER, share_forks

hypothesis.settings.register_profile("day", deadline=None, max_examples=30)
hypothesis.settings.register_profile("night", deadline=None, max_examples=200)

WORLDS = ("tests/engines/test_equality.py", "tests/engines/test_checkpoints_on_ranks.py")
"""Files that share worlds of ranks: one process runs them, so that each world is trained once."""
LONG = (
    "tests/test_examples.py",
    *WORLDS,
    "tests/engines/test_traffic_volumes.py",
    "tests/runner/test_batch_jobs.py",
    "tests/lab/test_launchers_across_hosts.py",
    "tests/prediction/memory/test_forecast_on_ranks.py",
    "tests/runner/test_kills.py",
    "tests/lab/test_packed_and_spread.py",
    "tests/worker/test_convergence_on_ranks.py",
    "tests/test_documented_commands.py",
    "tests/runner/test_faults_on_ranks.py",
    "tests/runner/test_driver_death_on_ranks.py",
    "tests/lab/test_faults_across_hosts.py",
    "tests/worker/test_prepared.py",
    "tests/worker/test_training_on_ranks.py",
    "tests/runner/test_batch_jobs_on_ranks.py",
)
"""Files that begin first, the longest before the others: the one that ends last decides when all have ended."""
APART = (
    "test_each_way_to_tell_a_probe_leaves_the_same_steps",
    "test_batch_sizes_16_to_256_on_1_and_2_ranks_show_where_the_time_goes",
    "test_vit_b16_at_224_trains_on_cifar_10_on_two_ranks_under_both_engines",
    "test_imagenet_100_trains_alike_from_files_from_the_cache_and_from_memory",
    "test_the_thesis_study_runs_from_jpeg_and_png_and_tells_what_the_thesis_could_not",
)
"""Long tests of the longest file that share nothing with its others: any process may run them."""
COMPUTING = (
    "advice", "analysis", "api", "base", "deepspeed_lint", "importers", "models", "present", "prediction", "profiles",
    "published", "pages", "sources", "store", "study", "trial", "test_cli_advise.py", "test_cli_bad_input.py",
    "test_cli_option_values.py", "test_cli_predict.py", "test_documented_commands.py", "test_docs_site.py",
    "test_fuzzing.py", "test_json_forms.py", "test_measures.py", "test_packaging.py", "test_readme.py",
)  # fmt: skip
"""Folders and files whose tests compute: what goes before them on the machine only makes them take longer. Tests in
them that start ranks or measure times do not."""


def pytest_configure(config: pytest.Config) -> None:
    """What measures how long things take goes before what else runs on this machine, where that is allowed, and tests
    that compute take what it leaves; and Ctrl-C is heard: a shell starts what it runs in the background deaf to it, and
    all that is started from there is too.

    Linux shares cores between sessions first, and then by nice.
    """
    if config.option.markexpr == "computing" and not hasattr(config, "workerinput"):
        with contextlib.suppress(OSError):
            os.setsid()
            _weigh_session("19")
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        signal.signal(signal.SIGUSR1, _yield_no_more)
    if config.option.markexpr != "alone":
        # OpenMP's threads wait for each other in loops, by default: where more processes run than there are cores that
        # takes most of the time from those that compute. Before forks are shared: they are for one environment.
        AT_FIRST["OMP_WAIT_POLICY"] = os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # So do those that numpy's BLAS starts, for a tenth of a second in every process that imports it.
        AT_FIRST["OPENBLAS_NUM_THREADS"] = os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        AT_FIRST[BRIEF] = "1"
    config.add_cleanup(share_forks())
    hypothesis.settings.load_profile("night" if "nightly" in config.option.markexpr else "day")
    gc.disable()  # until all tests are there: what is imported and collected stays
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.markexpr == "alone":
        with contextlib.suppress(OSError):
            os.nice(-10)
            # "/autogroup-7 nice 0", of the user's shell; a session of before the feature was switched on has none.
            if group := Path("/proc/self/autogroup").read_text().split():
                _weigh_session("-10")
                config.add_cleanup(lambda: _weigh_session(group[-1]))


def _weigh_session(nice: str) -> None:
    """Sets what Linux goes by when sessions share cores, where it is built so (sched(7), the autogroup feature)."""
    Path("/proc/self/autogroup").write_text(nice)


def _yield_no_more(*_: object) -> None:
    """Nothing is measured beside these tests any more: they take their share of a busy machine, where they may."""
    with contextlib.suppress(OSError):
        _weigh_session("0")
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        with contextlib.suppress(OSError, psutil.Error):
            for thread in process.threads():
                os.sched_setscheduler(thread.id, os.SCHED_OTHER, os.sched_param(0))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB; skipped with its reason where none can be mounted."""
    yield from _mounted(tmp_path / "disk", "size=2m")


@pytest.fixture
def disk_of_few_files(tmp_path: Path) -> Iterator[Path]:
    """A disk with room that takes 60 files and folders; skipped with its reason where none can be mounted."""
    yield from _mounted(tmp_path / "disk", "size=64m,nr_inodes=60")


def _mounted(disk: Path, options: str) -> Iterator[Path]:
    disk.mkdir()
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if mount is None or umount is None:
        pytest.skip("a small disk cannot be mounted: there is no mount program")
    answer = subprocess.run(
        [mount, "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if answer.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted: {answer.stderr.strip()}")
    yield disk
    subprocess.run([umount, "--lazy", str(disk)], check=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Of several processes the first compiles all tests, and the others wait to read what it has compiled."""
    if not hasattr(session.config, "workerinput"):
        return (yield)
    with Path(os.environ[FOLDER], "collected").open("a") as collected:
        fcntl.flock(collected, fcntl.LOCK_EX)
        if os.fstat(collected.fileno()).st_size:  # not where it ended when it was opened
            fcntl.flock(collected, fcntl.LOCK_UN)
        result = yield
        collected.write("x")
    return result


def pytest_collection_finish() -> None:
    """Nobody looks for garbage among what stays; and threads of numpy's and scipy's BLAS, loaded by now, wait in loops
    too: for its small matrices one is enough."""
    gc.freeze()
    gc.enable()
    threadpool_limits(1, user_api="blas")


def _computes(path: Path) -> bool:
    return path.relative_to(Path(__file__).parent).parts[0] in COMPUTING


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files in which the asked part of the tests has none are not imported."""
    wanted = {"computing": True, "not alone and not computing": False}.get(config.option.markexpr)
    if wanted is None or not collection_path.name.startswith("test_") or collection_path.is_dir():
        return None
    computes = _computes(collection_path)
    mixed = computes and "mark.ranks" in collection_path.read_text()
    return True if computes is not wanted and not mixed else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what computes, leaves out what is for the night, and puts files first that are long: of several processes
    none is to begin with the longest file when the others have nothing left."""
    for item in items:
        if _computes(item.path) and not any(item.get_closest_marker(name) for name in ("ranks", "alone")):
            item.add_marker("computing")
    if "nightly" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("nightly") is not None]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    ranks = {item.path for item in items if item.get_closest_marker("ranks") is not None}
    places = {config.rootpath / file: place for place, file in enumerate(LONG)}
    items.sort(key=lambda item: (places.get(item.path, len(places)), item.path not in ranks))


class _FilesAndWorlds(LoadFileScheduling):  # type: ignore[misc]  # xdist is untyped
    """A file's tests are run by one process, and so are those of all files that share worlds."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        name = nodeid.partition("::")[2].partition("[")[0]
        return nodeid if name in APART else WORLDS[0] if file in WORLDS else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return _FilesAndWorlds(config, log) if config.option.dist == "loadfile" else None
