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

COMPUTING_FOLDERS = (
    "advice", "analysis", "api", "base", "deepspeed_lint", "importers", "models", "pages", "prediction", "present",
    "profiles", "published", "sources", "store", "study", "trial",
)  # fmt: skip
"""Folders whose tests are marked `computing`, but for those that start ranks or measure times. Other files say so
themselves."""


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
    """Whether a file's tests are marked `computing`, as far as the file says nothing else of one of them."""
    is_in_folder = path.relative_to(Path(__file__).parent).parts[0] in COMPUTING_FOLDERS
    return is_in_folder or "mark.computing" in path.read_text(encoding="utf-8")


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
    items.sort(key=lambda item: (_place_of_file(item), item.path not in ranks))


def _place_of_file(item: pytest.Item) -> float:
    """Return the number in the file's mark `long`; a number behind all of these where it has none."""
    long = item.get_closest_marker("long")
    return float("inf") if long is None else float(long.args[0])


class _FilesAndGroups(LoadFileScheduling):  # type: ignore[misc]  # xdist is untyped
    """Has a file's tests run by one process, and so all tests that are marked with one `xdist_group`.

    xdist itself, with `--dist loadgroup`, would send tests without a group to any process, one by one.
    """

    def _split_scope(self, nodeid: str) -> str:
        # xdist writes the group behind the test's parameters: "tests/test_a.py::test_b[c]@group".
        _, mark, group = nodeid[nodeid.rfind("]") + 1 :].rpartition("@")
        if mark:
            return group
        file: str = super()._split_scope(nodeid)
        return file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return _FilesAndGroups(config, log) if config.option.dist == "loadgroup" else None
