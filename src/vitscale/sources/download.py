"""Fetches a file over HTTP with a progress bar; it appears under its name only once its checksum is right."""

from __future__ import annotations

import hashlib
import http.client
import os
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO

from vitscale.errors import RequestError, explain, shown
from vitscale.sources.paths import reason

_TIMEOUT_SECONDS = 30
_CHUNK_BYTES = 1 << 18


def fetch(url: str, target: Path, *, md5: str | None, most_bytes: int) -> None:
    """Downloads `url` to `target`, through a temporary file beside it that never outlives the call.

    `md5` None accepts any content. Raises `RequestError` where there is no network, the transfer breaks off, the
    content is larger than `most_bytes` or has another MD5, or the folder cannot be written.
    """
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise RequestError(explain(f"cannot download {shown(url)}: only http and https"))
    by_hand = f"without a network here, download {url} elsewhere and place it at {target}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent)
    except OSError as error:
        raise RequestError(
            explain(
                f"cannot write to {shown(str(target.parent))}: {reason(error)}",
                next_step="Set data.root to a folder you can write to",
            )
        ) from None
    partial = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            found = _transfer(url, file, most_bytes)
        if md5 is not None and found != md5:
            raise RequestError(
                explain(
                    f"what {url} sent has the MD5 {found}, not {md5}: nothing was kept",
                    next_step=f"Try again; {by_hand}",
                )
            )
        partial.replace(target)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise RequestError(
            explain(f"could not download {url}: {reason(error)}", next_step=f"Try again; {by_hand}")
        ) from None
    finally:
        partial.unlink(missing_ok=True)


def _transfer(url: str, file: IO[bytes], most_bytes: int) -> str:
    """Copies the body of `url` into `file` and returns its MD5. Raises `OSError` where it breaks off."""
    digest = hashlib.md5(usedforsecurity=False)
    received = 0
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:  # noqa: S310  `fetch` admits only http(s)
        length = response.headers.get("Content-Length")
        expected = int(length) if length is not None else None
        with _Progress(url.rsplit("/", 1)[-1], expected) as progress:
            while chunk := response.read(_CHUNK_BYTES):
                received += len(chunk)
                if received > most_bytes:
                    raise OSError(f"it is larger than {most_bytes:,} bytes")
                digest.update(chunk)
                file.write(chunk)
                progress(len(chunk))
    if expected is not None and received != expected:
        raise OSError(f"the transfer broke off after {received:,} of {expected:,} bytes")
    return digest.hexdigest()


class _Progress:
    """A bar on standard error; where that is no terminal, rich prints one line at the end."""

    def __init__(self, name: str, total_bytes: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task(f"downloading {name}", total=total_bytes)

    def __enter__(self) -> Callable[[int], None]:
        self._bar.start()
        return lambda count: self._bar.advance(self._task, count)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
