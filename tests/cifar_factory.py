"""CIFAR-10 and CIFAR-100 datasets in the official layout, small, with learnable images; and the bad ones.

`write_cifar10(folder)` gives the unpacked folder, `pack` the tar.gz of it. The files are pickles as Python 2 wrote the
official ones (protocol 2, byte strings), or as Python 3 writes the same dictionary.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import struct
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vitscale.sources.cifar import CIFAR10, CIFAR100

Style = Literal["python2", "modern-2", "modern-5"]
STYLES: tuple[Style, ...] = ("python2", "modern-2", "modern-5")


def write_cifar10(folder: Path, per_batch: int = 100, seed: int = 0, style: Style = "python2") -> Path:
    """Makes `folder/cifar-10-batches-py`, five training files and one test file of `per_batch` images each."""
    unpacked = folder / CIFAR10.folder
    unpacked.mkdir(parents=True)
    for number, name in enumerate((*CIFAR10.train_files, *CIFAR10.held_out_files)):
        data, labels = images_of(10, per_batch, seed * 100 + number)
        entries = {
            "batch_label": f"batch {number + 1} of 6",
            "labels": labels,
            "data": data,
            "filenames": [f"image_s_{number:06d}.png" for number in range(per_batch)],
        }
        (unpacked / name).write_bytes(pickled(entries, style))
    meta = {"num_cases_per_batch": per_batch, "label_names": list(CIFAR10.classes), "num_vis": 3072}
    (unpacked / "batches.meta").write_bytes(pickled(meta, style))
    return unpacked


def write_cifar100(folder: Path, train: int = 500, test: int = 100, seed: int = 0, style: Style = "python2") -> Path:
    """Makes `folder/cifar-100-python` with `train` and `test` images."""
    unpacked = folder / CIFAR100.folder
    unpacked.mkdir(parents=True)
    for name, count in (("train", train), ("test", test)):
        data, labels = images_of(100, count, seed * 100 + len(name))
        entries = {
            "filenames": [f"image_s_{number:06d}.png" for number in range(count)],
            "batch_label": f"{name}ing batch 1 of 1",
            "fine_labels": labels,
            "coarse_labels": [label // 5 for label in labels],
            "data": data,
        }
        (unpacked / name).write_bytes(pickled(entries, style))
    coarse = [f"group {number}" for number in range(20)]
    meta = {"fine_label_names": list(CIFAR100.classes), "coarse_label_names": coarse}
    (unpacked / "meta").write_bytes(pickled(meta, style))
    return unpacked


def images_of(classes: int, count: int, seed: int) -> tuple[NDArray[np.uint8], list[int]]:
    """Rows uint8 `[count, 3072]` (red, green, blue plane) whose colours tell the class, and the labels."""
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(count) % classes)
    colours = np.random.default_rng(classes).integers(40, 216, size=(classes, 3, 2, 1, 2, 1))
    noise = random.integers(-40, 40, size=(count, 3, 2, 16, 2, 16))
    return (colours[labels] + noise).astype(np.uint8).reshape(count, 3072), [int(label) for label in labels]


def pack(folder: Path, name: str | None = None) -> Path:
    """Writes the official archive's name (or `name`) beside the unpacked `folder`; the same bytes every time."""
    layout = CIFAR10 if folder.name == CIFAR10.folder else CIFAR100
    members = [
        (folder.name, None),
        *((f"{folder.name}/{file.name}", file.read_bytes()) for file in sorted(folder.iterdir())),
    ]
    return write_tar(
        folder.parent / (name or layout.archive), [(member(name, content), content) for name, content in members]
    )


def member(name: str, content: bytes | None = None) -> tarfile.TarInfo:
    """A header: of a file, or of a folder where there is no content."""
    header = tarfile.TarInfo(name)
    header.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
    header.size = len(content or b"")
    return header


def write_tar(path: Path, members: Iterable[tuple[tarfile.TarInfo, bytes | None]]) -> Path:
    """A tar.gz of headers and contents as they are, sensible or not."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for header, content in members:
            tar.addfile(header, io.BytesIO(content or b""))
    path.write_bytes(gzip.compress(plain.getvalue(), compresslevel=1, mtime=0))
    return path


def pack_escaping(folder: Path, bad: tarfile.TarInfo) -> Path:
    """The archive of `folder` with one more member, which ought to have the whole refused."""
    files = [
        (member(f"{folder.name}/{file.name}", file.read_bytes()), file.read_bytes())
        for file in sorted(folder.iterdir())
    ]
    return write_tar(folder.parent / CIFAR10.archive, [*files, (bad, b"x" * bad.size)])


def truncate(path: Path, share: float = 0.5) -> Path:
    """Cuts the file off."""
    os.truncate(path, int(path.stat().st_size * share))
    return path


def md5_of(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def pickled(entries: dict[str, Any], style: Style) -> bytes:
    """The dictionary as a file of the archive, its keys and strings bytes as in the official files."""
    if style == "python2":
        return b"\x80\x02" + _Python2().value(entries) + b"."
    return pickle.dumps(_with_bytes(entries), protocol=int(style[-1]))


def _with_bytes(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict):
        return {_with_bytes(key): _with_bytes(item) for key, item in value.items()}
    return [_with_bytes(item) for item in value] if isinstance(value, list) else value


class _Python2:
    """What Python 2's cPickle wrote with protocol 2: byte strings as SHORT_BINSTRING, everything memoised."""

    def __init__(self) -> None:
        self.memoised = 0

    def memo(self) -> bytes:
        self.memoised += 1
        number = self.memoised
        return b"q" + bytes([number]) if number < 256 else b"r" + struct.pack("<I", number)

    def value(self, value: Any) -> bytes:
        if isinstance(value, dict):
            items = b"".join(self.value(key) + self.value(item) for key, item in value.items())
            return b"}" + self.memo() + b"(" + items + b"u"
        if isinstance(value, list):
            return b"]" + self.memo() + b"(" + b"".join(map(self.value, value)) + b"e"
        if isinstance(value, str):
            return self.string(value.encode()) + self.memo()
        if isinstance(value, int):
            return self.integer(value)
        return self.array(value)

    def integer(self, value: int) -> bytes:
        if 0 <= value < 256:
            return b"K" + bytes([value])
        return b"M" + struct.pack("<H", value) if 0 <= value < 65_536 else b"J" + struct.pack("<i", value)

    def string(self, value: bytes) -> bytes:
        if len(value) < 256:
            return b"U" + bytes([len(value)]) + value
        return b"T" + struct.pack("<i", len(value)) + value

    def array(self, value: NDArray[np.uint8]) -> bytes:
        empty = (
            b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
            + self.integer(0)
            + b"\x85"
            + self.string(b"b")
            + b"\x87R"
        )
        shape = self.integer(value.shape[0]) + self.integer(value.shape[1]) + b"\x86"
        element = b"cnumpy\ndtype\n" + self.string(b"u1") + self.integer(0) + self.integer(1) + b"\x87R"
        order = b"(" + self.integer(3) + self.string(b"|") + b"NNN" + self.integer(-1) * 2 + self.integer(0) + b"tb"
        return (
            empty
            + self.memo()
            + b"("
            + self.integer(1)
            + shape
            + element
            + order
            + b"\x89"
            + self.string(value.tobytes())
            + b"tb"
        )


class _Calls:
    """Pickles as a call of anything."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


class _CallsThenSets:
    """Pickles as a call whose result then gets a state."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], state: tuple[Any, ...]) -> None:
        self.call = (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.call


def object_outside_its_array() -> bytes:
    """A pickle of allowed names alone: items of 8 bytes whose one field, an object, lies a gigabyte beyond them.

    numpy 2.4 believes the offset: making the array writes there.
    """
    fields = {"a": (np.dtype("O"), 1 << 30)}
    element = _CallsThenSets(np.dtype, ("V8", False, True), (3, "|", None, ("a",), fields, 8, 1, 63))
    return pickle.dumps({"data": _Calls(np.ndarray, (2,), element)}, 2)


def malicious_pickles(trace: Path) -> dict[str, bytes]:
    """Name -> a pickle that makes the file `trace`, or takes the process down, where it is unpickled carelessly."""
    touch = f"touch {trace}"
    create = f"__import__('pathlib').Path({str(trace)!r}).touch()"
    object_array = np.array([_Calls(os.system, touch)], dtype=object)
    state = pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, _Calls(os.system, touch)]}, 2)
    posix_by_text = b"cposix\nsystem\n(S" + repr(touch).encode() + b"\ntR."
    text = create.encode()
    encode = b"\x80\x02c_codecs\nencode\nX" + struct.pack("<I", len(text)) + text
    empty = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
    return {
        "os.system": pickle.dumps(_Calls(os.system, touch), 2),
        "os.system, protocol 0": posix_by_text,
        "os.system, protocol 5": pickle.dumps(_Calls(os.system, touch), 5),
        "eval": pickle.dumps(_Calls(eval, create), 2),
        "exec": pickle.dumps(_Calls(exec, create), 4),
        "nested in labels": state,
        "as a key": pickle.dumps({_Calls(os.system, touch): 1}, 2),
        "numpy object array": pickle.dumps({b"data": object_array}, 2),
        "numpy load": b"cnumpy\nload\n(S'" + str(trace).encode() + b"'\ntR.",
        "numpy's own exec": b"cnumpy.testing._private.utils\nrunstring\n(S" + repr(create).encode() + b"\n(dtR.",
        "attribute of an allowed name": b"\x80\x04\x8c\x05numpy\x8c\x11ndarray.__class__\x93.",
        "getattr": pickle.dumps(_Calls(getattr, np.dtype, "__class__"), 2),
        "codecs with another codec": encode + b"U\x05rot13\x86R.",
        "INST": b"(S" + repr(touch).encode() + b"\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nS" + repr(touch).encode() + b"\no.",
        "NEWOBJ": b"\x80\x02csubprocess\nPopen\n(S'touch'\nV" + str(trace).encode() + b"\nl\x85\x81.",
        "persistent id": b"Pos.system\n.",
        "extension registry": b"\x80\x02\x82\x01.",
        "build with a dict": b"\x80\x02cnumpy\nndarray\n}U\x01aK\x01sb.",
        "array of a terabyte": empty + b"\x8a\x06" + (1 << 40).to_bytes(6, "little") + b"\x85U\x01b\x87R.",
        "array of another type": empty.replace(b"ndarray", b"dtype") + b"K\x00\x85U\x01b\x87R.",
        "an object outside its array": object_outside_its_array(),
        "bytes of an exabyte": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"x.",
        "memo index of 2^31": b"\x80\x02]r" + struct.pack("<I", (1 << 32) - 1) + b".",
        "nested a hundred thousand deep": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
        "a deep tuple as a key": b"\x80\x02}N" + b"\x85" * 300_000 + b"K\x01s.",
        "contains itself": b"\x80\x02]q\x01h\x01a.",
        "integer of a million bytes": b"\x80\x02\x8b" + struct.pack("<I", 1_000_000) + b"\x7f" * 1_000_000 + b".",
        "too many instructions": b"\x80\x02" + b"]" * 1_100_000 + b".",
    }
