"""What CIFAR files contain is read exactly; everything else is refused without being executed."""

from __future__ import annotations

import contextlib
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cifar_factory import STYLES, Style, malicious_pickles, object_outside_its_array, pickled
from vitscale.errors import RequestError
from vitscale.sources.restricted_pickle import read_pickle

HARMLESS = ("bytes of an exabyte", "memo index of 2^31", "nested a hundred thousand deep", "contains itself")
"""Of the malicious: those that only do harm to a reader that believes their numbers or follows them by recursion."""
NAMES = sorted(malicious_pickles(Path("trace")))
DATA = np.arange(6144, dtype=np.int64).astype(np.uint8).reshape(2, 3072)
ENTRIES: dict[str, Any] = {"labels": [0, 255, 256, 70_000, -1], "data": DATA, "batch_label": "testing batch 1 of 1"}


@pytest.mark.parametrize("style", STYLES)
def test_every_way_the_files_were_written_reads_the_same(style: Style) -> None:
    found = read_pickle(pickled(ENTRIES, style), "data_batch_1")
    assert list(found) == list(ENTRIES)
    assert found["labels"] == ENTRIES["labels"]
    assert found["batch_label"] == b"testing batch 1 of 1"
    assert found["data"].dtype == np.uint8
    np.testing.assert_array_equal(found["data"], DATA)


def test_the_factory_writes_what_pickle_itself_reads() -> None:
    """Guards the tests: their imitation of Python 2 must be real pickles."""
    found = pickle.loads(pickled(ENTRIES, "python2"), encoding="latin1")  # noqa: S301  made by this very line
    np.testing.assert_array_equal(found.pop("data"), DATA)
    assert found == {key: value for key, value in ENTRIES.items() if key != "data"}


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("dtype", ["u1", "<i4", ">i4", "<i8", ">i8"])
def test_integer_arrays_of_any_order_and_protocol(protocol: int, dtype: str) -> None:
    array = np.asfortranarray(np.arange(-6, 6).reshape(3, 4).astype(dtype))
    entries = {
        "rows": array,
        "columns": np.ascontiguousarray(array),
        "flat": array.ravel(),
        "none": np.zeros((0, 3), dtype),
    }
    found = read_pickle(pickle.dumps(entries, protocol), "x")
    for name, expected in entries.items():
        assert found[name].dtype == expected.dtype
        np.testing.assert_array_equal(found[name], expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_malicious_pickle_is_refused_and_not_executed(name: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    says = "is damaged" if name in HARMLESS else "was refused, and nothing in it was executed"
    with pytest.raises(RequestError, match=f"^the file data_batch_3 {says}") as caught:
        read_pickle(malicious_pickles(trace)[name], "the file data_batch_3")
    assert not trace.exists()
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["os.system", "os.system, protocol 0", "eval", "nested in labels", "INST", "OBJ"])
def test_the_exploits_are_real(name: str, tmp_path: Path) -> None:
    """Guards the test above: plain `pickle.loads` does execute these."""
    trace = tmp_path / "trace"
    content = malicious_pickles(trace)[name]
    subprocess.run(
        [sys.executable, "-c", f"import pickle\ntry: pickle.loads({content!r})\nexcept BaseException: pass"], check=True
    )
    assert trace.exists()


def test_a_name_that_is_refused_is_named() -> None:
    with pytest.raises(RequestError, match=r"nothing in it was executed.*'posix\.system'"):
        read_pickle(malicious_pickles(Path("trace"))["os.system"], "data_batch_1")


@pytest.mark.parametrize("dtype", ["O", "f8", "U3", "V8", "M8[s]", "c16"])
def test_arrays_of_other_types_are_refused(dtype: str) -> None:
    with pytest.raises(RequestError, match="was refused"):
        read_pickle(pickle.dumps({"data": np.zeros(3, dtype)}, 2), "x")


@pytest.mark.parametrize("shape", [(3, 3), (-2, -3), (2,), (1 << 62, 1 << 62), ("2", 3), (True, 6), 6])
def test_an_array_whose_shape_is_not_its_content_is_refused(shape: object) -> None:
    buffer, dtype = (b"\x00" * 6, np.dtype("u1"))
    state = pickle.dumps((1, shape, dtype, False, buffer), 4)[2:-1]
    empty = pickle.dumps(np.zeros(0, "u1"), 4)
    start = empty[: empty.index(b"R") + 1]
    with pytest.raises(RequestError, match=r"damaged|refused"):
        read_pickle(start + state + b"b.", "x")


@pytest.mark.parametrize("value", [[1], 3, None, b"x", ({},)])
def test_only_a_dictionary_is_a_file(value: object) -> None:
    with pytest.raises(RequestError, match="not a dictionary"):
        read_pickle(pickle.dumps(value, 2), "x")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("style", STYLES)
def test_a_truncated_file_is_refused(style: Style, share: float) -> None:
    content = pickled(ENTRIES, style)
    with pytest.raises(RequestError, match="damaged"):
        read_pickle(content[: int(len(content) * share)], "x")


def test_a_hostile_file_costs_little_memory() -> None:
    """A megabyte of file must not become gigabytes: read by a process that gets no more than half of one."""
    program = (
        "import pathlib, resource\n"
        "from cifar_factory import malicious_pickles\n"
        "from vitscale.errors import RequestError\n"
        "from vitscale.sources.restricted_pickle import read_pickle\n"
        "contents = malicious_pickles(pathlib.Path('trace'))\n"
        "used = int(pathlib.Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20),) * 2)\n"
        "for content in contents.values():\n"
        "    try:\n"
        "        read_pickle(content, 'x')\n"
        "    except RequestError:\n"
        "        continue\n"
        "    raise SystemExit('accepted')\n"
    )
    tests = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program], cwd=tests, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_allow_list_lets_a_small_file_fill_memory() -> None:
    """Why this reader stays: nine bytes name nothing that `find_class` could refuse, and cost the unpickler 4 GiB."""
    small = b"\x80\x02Nr" + (2**28).to_bytes(4, "little") + b"."
    with pytest.raises(RequestError):
        read_pickle(small, "x")
    program = (
        "import io, pickle, resource, sys\n"
        "class Nothing(pickle.Unpickler):\n"
        "    def find_class(self, module, name): raise pickle.UnpicklingError(name)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "try: Nothing(io.BytesIO(sys.stdin.buffer.read())).load()\n"
        "except MemoryError: raise SystemExit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], input=small, check=False)
    assert done.returncode == 3


def test_names_of_the_allow_list_alone_write_outside_an_array() -> None:
    """Why no child process takes its place: `dtype` and `ndarray` let a file choose where numpy writes. The child is
    the user's, and may do what the user may."""
    content = object_outside_its_array()
    names = {argument for opcode, argument, _ in pickletools.genops(content) if opcode.name == "GLOBAL"}
    assert names == {"numpy dtype", "numpy ndarray"}
    with pytest.raises(RequestError, match="was refused"):
        read_pickle(content, "x")


@given(st.binary(max_size=300))
def test_arbitrary_bytes_raise_nothing_but_a_request_error(content: bytes) -> None:
    for start in (b"", b"\x80\x02", b"\x80\x02}q\x01(U\x04data"):
        with contextlib.suppress(RequestError):
            assert isinstance(read_pickle(start + content, "x"), dict)


OPCODES = [
    bytes([byte]) for byte in b"()]}.0125abcdeghijlpqrstuNRKMJIFSUTVXBC\x80\x85\x86\x87\x88\x89\x8a\x8c\x93\x94\x95"
]


@given(
    st.lists(
        st.sampled_from([*OPCODES, b"K\x01", b"U\x01a", b"q\x01", b"h\x01", b"cnumpy\nndarray\n", b"cnumpy\ndtype\n"])
    )
)
def test_arbitrary_instructions_raise_nothing_but_a_request_error(instructions: list[bytes]) -> None:
    with contextlib.suppress(RequestError):
        assert isinstance(read_pickle(b"".join(instructions) + b".", "x"), dict)


@given(st.data())
def test_a_damaged_file_raises_nothing_but_a_request_error(data: st.DataObject) -> None:
    content = bytearray(pickled({**ENTRIES, "data": DATA[:, :8]}, data.draw(st.sampled_from(STYLES))))
    for position in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[position] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RequestError):
        assert isinstance(read_pickle(bytes(content), "x"), dict)
