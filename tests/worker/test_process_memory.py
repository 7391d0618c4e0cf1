"""A process writes over what others see of it, as an ordinary user too, and maps pages that it has not touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vitscale.processes.launch_file import TOKEN_VARIABLE

PROGRAM = """
import ctypes, mmap, os, sys
from pathlib import Path
from vitscale.worker.prepared import InitialMemory, file_pages, map_pages
token, path, user = sys.argv[1:4]
file = open(path, "rb")
if user == "nobody":
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: as every process that began as this user is
def seen(name): return Path(f"/proc/{os.getppid()}/{name}").read_bytes()
memory = InitialMemory()
assert memory.unfit() is None, memory.unfit()
before = Path("/proc/self/environ").read_bytes()
memory.set_token(token)
memory.set_command(["python", "-m", "a rank", "/results"])
if os.fork() == 0:
    environment = seen("environ")
    assert ("TOKEN_NAME=" + token).encode() in environment.split(b"\\0"), environment
    assert environment.replace(token.encode(), b"-" * 32) == before
    assert seen("cmdline").rstrip(b"\\0").split(b"\\0") == [b"python", b"-m", b"a rank", b"/results"]
    os._exit(0)
assert os.wait()[1] == 0
memory.set_command(["x" * 100_000])
whole = Path("/proc/self/cmdline").read_bytes()
assert whole == b"x" * (len(whole) - 1) + b"\\0"
memory.set_token(None)
assert Path("/proc/self/environ").read_bytes() == before
for bad in ("short", token + "x"):
    try:
        memory.set_token(bad)
    except ValueError:
        continue
    raise AssertionError(bad)

with file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    before = sum(size for _, size in file_pages())
    _ = mapped[0]
    stretches = file_pages()
    more = sum(size for _, size in stretches) - before
    assert 0 < more < 1 << 22, more
    if os.fork() == 0:
        assert sum(size for _, size in file_pages()) < before, "a fork has them mapped by itself: nothing to do"
        map_pages(stretches)
        def pages(of): return {page for begin, size in of for page in range(begin, begin + size, mmap.PAGESIZE)}
        assert pages(stretches) <= pages(file_pages())
        os._exit(0)
    assert os.wait()[1] == 0
print("done", os.geteuid())
""".replace("TOKEN_NAME", TOKEN_VARIABLE)


@pytest.mark.parametrize("user", ["its own", "nobody"])
def test_what_others_see_is_written_over_and_pages_are_mapped(tmp_path: Path, user: str) -> None:
    if user == "nobody" and os.geteuid() != 0:
        pytest.skip("only root can become an ordinary user")
    (tmp_path / "file").write_bytes(bytes(1 << 22))
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, "0123456789abcdef" * 2, str(tmp_path / "file"), user, "room" * 20],
        env={**os.environ, TOKEN_VARIABLE: "-" * 32},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (answer.returncode, answer.stdout.startswith("done")) == (0, True), answer.stderr
