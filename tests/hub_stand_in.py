"""A local server in place of the Hugging Face hub: it serves the files of a folder, ORGANISATION/NAME/FILE, and counts.

Programs use it that are started with `HF_ENDPOINT` and a cache of their own (`StandIn.environment`).
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_FILE = re.compile(r"/([\w.-]+/[\w.-]+)/resolve/[\w.-]+/([\w.-]+)")


class StandIn(NamedTuple):
    """A running server."""

    endpoint: str
    requests: list[str]
    """ "HEAD facebook/dinov2-tiny config.json" for each request so far."""
    cache: Path

    @property
    def environment(self) -> dict[str, str]:
        """Variables that let huggingface_hub use it, and nothing that it has kept from elsewhere."""
        return {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(self.cache), "HF_HUB_DISABLE_XET": "1"}


@contextmanager
def hub_stand_in(folder: Path, cache: Path) -> Iterator[StandIn]:
    """Serves the folder until the end of the context."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

        def _answer(self, *, with_body: bool) -> None:
            match = _FILE.fullmatch(self.path.partition("?")[0])
            requests.append(f"{self.command} {match[1]} {match[2]}" if match else f"{self.command} {self.path}")
            path = folder / match[1] / match[2] if match else None
            if path is None or not path.is_file():
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            content = path.read_bytes()
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", _COMMIT)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if with_body:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield StandIn(f"http://127.0.0.1:{server.server_address[1]}", requests, cache)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
