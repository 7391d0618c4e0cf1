"""Only whole, harmless archives are read, in memory; nothing is written and nothing large is believed."""

from __future__ import annotations

import contextlib
import gzip
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cifar_factory import member, truncate, write_tar
from vitscale.errors import RequestError
from vitscale.sources.download import read_members

LIMIT = 1 << 20


def header(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, target
    return made


def an_archive(path: Path, *extra: tarfile.TarInfo) -> Path:
    files = [(member(f"d/{name}", content), content) for name, content in (("a", b"first"), ("b", b"x" * 70_000))]
    return write_tar(path, [(member("d"), None), *files, *((one, b"") for one in extra)])


def test_reads_what_was_asked_for(tmp_path: Path) -> None:
    archive = an_archive(tmp_path / "x.tar.gz")
    assert read_members(archive, ["d/a", "d/b"], LIMIT) == {"d/a": b"first", "d/b": b"x" * 70_000}
    assert read_members(archive, ["d/a"], LIMIT) == {"d/a": b"first"}
    assert list(tmp_path.iterdir()) == [archive]


def test_a_leading_dot_is_the_same_name(tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "x.tar.gz", [(member("./d/a", b"1"), b"1")])
    assert read_members(archive, ["d/a"], LIMIT) == {"d/a": b"1"}


@pytest.mark.parametrize(
    "bad",
    [
        header("/etc/escape"),
        header("../escape"),
        header("d/../../escape"),
        header("d\\..\\escape"),
        header("d/link", tarfile.SYMTYPE, "/etc/passwd"),
        header("d/link", tarfile.LNKTYPE, "../../escape"),
        header("d/pipe", tarfile.FIFOTYPE),
        header("d/device", tarfile.CHRTYPE),
    ],
    ids=lambda bad: f"{bad.name} {bad.type!r}",
)
def test_an_archive_that_leads_outside_its_folder_is_refused(tmp_path: Path, bad: tarfile.TarInfo) -> None:
    archive = an_archive(tmp_path / "folder.tar.gz", bad)
    with pytest.raises(RequestError, match=r"refused.*(outside its folder|link or a device)"):
        read_members(archive, ["d/a"], LIMIT)
    assert list(tmp_path.iterdir()) == [archive]


def test_the_same_name_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="twice"):
        read_members(an_archive(tmp_path / "x.tar.gz", header("./d/a")), ["d/a"], LIMIT)


def test_a_decompression_bomb_is_refused(tmp_path: Path) -> None:
    content = b"\0" * (4 * LIMIT)
    archive = write_tar(tmp_path / "x.tar.gz", [(member("d/a", content), content)])
    assert archive.stat().st_size < LIMIT / 10
    with pytest.raises(RequestError, match="holds more than 1,048,576 bytes"):
        read_members(archive, ["d/a"], LIMIT)


def test_a_bomb_behind_the_last_member_is_refused(tmp_path: Path) -> None:
    archive = an_archive(tmp_path / "x.tar.gz")
    with archive.open("ab") as file:
        file.write(gzip.compress(b"\0" * (4 * LIMIT)))
    with pytest.raises(RequestError, match="holds more than"):
        read_members(archive, ["d/a"], LIMIT)


def test_too_many_members_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="more than 1000 members"):
        read_members(an_archive(tmp_path / "x.tar.gz", *map(header, map(str, range(1000)))), ["d/a"], 16 * LIMIT)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"lacks d/absent, d/gone"):
        read_members(an_archive(tmp_path / "x.tar.gz"), ["d/gone", "d/a", "d/absent"], LIMIT)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.9, 0.99])
def test_a_truncated_archive_is_refused(tmp_path: Path, share: float) -> None:
    archive = truncate(an_archive(tmp_path / "x.tar.gz"), share)
    with pytest.raises(RequestError, match=r"'x\.tar\.gz'.*truncated"):
        read_members(archive, ["d/a"], LIMIT)


def test_a_wrong_checksum_is_found_though_the_members_read_well(tmp_path: Path) -> None:
    archive = an_archive(tmp_path / "x.tar.gz")
    content = bytearray(archive.read_bytes())
    content[-8] ^= 1  # of the CRC that ends a gzip file
    archive.write_bytes(content)
    with pytest.raises(RequestError, match="corrupt"):
        read_members(archive, ["d/a"], LIMIT)


def test_an_endless_chain_of_long_names_is_refused(tmp_path: Path) -> None:
    chain = [(header("x", tarfile.GNUTYPE_LONGNAME), b"") for _ in range(3000)]
    with pytest.raises(RequestError, match=r"corrupt|lacks"):
        read_members(write_tar(tmp_path / "x.tar.gz", chain), ["d/a"], 64 * LIMIT)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=2000), is_gzip=st.booleans())
def test_arbitrary_bytes_raise_nothing_but_a_request_error(tmp_path: Path, content: bytes, is_gzip: bool) -> None:
    archive = tmp_path / "x.tar.gz"
    archive.write_bytes(gzip.compress(content) if is_gzip else content)
    with pytest.raises(RequestError):
        read_members(archive, ["d/a"], LIMIT)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_headers_raise_nothing_but_a_request_error(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(gzip.decompress(an_archive(tmp_path / "x.tar.gz", header("e/" + "long" * 60)).read_bytes()))
    for position in data.draw(st.lists(st.integers(0, 1600), min_size=1, max_size=5)):
        content[position] = data.draw(st.integers(0, 255))
    archive = tmp_path / "damaged.tar.gz"
    archive.write_bytes(gzip.compress(bytes(content)))
    with contextlib.suppress(RequestError):
        read_members(archive, ["d/a", "d/b"], LIMIT)
