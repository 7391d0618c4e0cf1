"""Downloads from a server on this machine: whole, with the right checksum, or not at all."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from cifar_factory import md5_of, pack, write_cifar10
from vitscale.errors import RequestError
from vitscale.sources.cifar import CIFAR10, Cifar
from vitscale.sources.download import fetch
from vitscale.trial.trial import DataSpec

BODY = os.urandom(1 << 20)
BODY_MD5_WRONG = "0" * 32


class Handler(BaseHTTPRequestHandler):
    bodies: ClassVar[dict[str, bytes]] = {}
    requests: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.requests.append(self.path)
        action, _, name = self.path.lstrip("/").partition("/")
        body = self.bodies.get(name, BODY)
        if action == "absent":
            self.send_error(404)
            return
        self.send_response(200)
        if action != "unsized":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 3] if action == "truncated" else body)

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "*")
    Handler.bodies, Handler.requests = {}, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("action", ["whole", "unsized"])
def test_a_whole_file_arrives(address: str, tmp_path: Path, action: str) -> None:
    target = tmp_path / "new" / "x.tar.gz"
    fetch(f"{address}/{action}/x", target, md5=None, most_bytes=len(BODY))
    assert target.read_bytes() == BODY
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize(
    ("action", "md5", "most_bytes", "says"),
    [
        ("truncated", None, 1 << 30, r"broke off after 349,525 of 1,048,576 bytes"),
        ("whole", BODY_MD5_WRONG, 1 << 30, rf"not {BODY_MD5_WRONG}: nothing was kept"),
        ("whole", None, (1 << 20) - 1, r"larger than 1,048,575 bytes"),
        ("unsized", None, (1 << 20) - 1, r"larger than 1,048,575 bytes"),
        ("absent", None, 1 << 30, r"could not download .*404"),
    ],
)
def test_anything_else_is_refused_and_leaves_nothing(
    address: str, tmp_path: Path, action: str, md5: str | None, most_bytes: int, says: str
) -> None:
    target = tmp_path / "x.tar.gz"
    with pytest.raises(RequestError, match=says) as caught:
        fetch(f"{address}/{action}/x", target, md5=md5, most_bytes=most_bytes)
    assert str(target) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_without_a_network_the_message_says_how_to_do_it_by_hand(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/x"
        with pytest.raises(RequestError, match=rf"could not download {url}.*place it at {tmp_path}/x"):
            fetch(url, tmp_path / "x", md5=None, most_bytes=1)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused(address: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="cannot write to"):
        fetch(f"{address}/whole/x", tmp_path / "file" / "x", md5=None, most_bytes=1 << 30)
    assert Handler.requests == []


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/x", "/etc/passwd"])
def test_only_http_is_fetched(tmp_path: Path, url: str) -> None:
    with pytest.raises(RequestError, match="only http and https"):
        fetch(url, tmp_path / "x", md5=None, most_bytes=1)


@pytest.fixture
def source(address: str, tmp_path: Path) -> Cifar:
    """CIFAR-10 whose official archive is a small one on the server."""
    archive = pack(write_cifar10(tmp_path / "server", 2))
    Handler.bodies["cifar"] = archive.read_bytes()
    return Cifar(replace(CIFAR10, url=f"{address}/whole/cifar", archive_md5=md5_of(archive)))


@pytest.mark.parametrize("root", ["folder", "new/folder", "folder/own-name.tar.gz", None])
def test_cifar_is_downloaded_once(
    source: Cifar, tmp_path: Path, root: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITSCALE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "folder").mkdir()
    spec = DataSpec(name="cifar10", root=str(tmp_path / root) if root else None, download=True)
    assert source.check(spec).fingerprint == source.layout.archive_md5
    assert len(source.load(spec, tmp_path / "cache").train) == 10
    assert Handler.requests == ["/whole/cifar"]
    expected = tmp_path / (root or "cache/archives")
    assert (expected if expected.suffix == ".gz" else expected / CIFAR10.archive).is_file()


def test_cifar_with_another_md5_is_not_kept(source: Cifar, tmp_path: Path) -> None:
    Handler.bodies["cifar"] += b"x"
    spec = DataSpec(name="cifar10", root=str(tmp_path / "data"), download=True)
    with pytest.raises(RequestError, match="nothing was kept"):
        source.check(spec)
    with pytest.raises(RequestError, match="nothing was kept"):
        source.check(spec.model_copy(update={"verify": False, "md5": "0" * 32}))
    assert list((tmp_path / "data").iterdir()) == []


def test_without_download_nothing_is_fetched(source: Cifar, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"does not exist.*data\.download = true"):
        source.check(DataSpec(name="cifar10", root=str(tmp_path / "data")))
    assert Handler.requests == []
