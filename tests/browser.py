"""One Chromium without a network for all tests, driven by its own protocol: what a page really draws and does."""

from __future__ import annotations

import base64
import functools
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import needs

_NAMES = ("chromium", "chromium-browser", "google-chrome")


class Page:
    """An open page: expressions are evaluated in it, and what it logs and asks for is kept."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.logged: list[str] = []
        """Errors and exceptions."""
        self.requested: list[str] = []
        """Addresses, but that of the page itself and data."""

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.send(method, params, self._session)

    def ask(self, expression: str) -> Any:
        """The value of an expression, awaited."""
        answer = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def open(self, path: Path, fragment: str = "", width: int = 1280, height: int = 800, dark: bool = False) -> Page:
        """Loads a file and waits until its script has drawn."""
        self.logged.clear()
        self.requested.clear()
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", media="", features=scheme)
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=path.as_uri() + fragment)
        ready = (
            "location.protocol === 'file:' && document.readyState === 'complete' && "
            "Boolean(document.documentElement.dataset.ready || !document.querySelector('[data-figure]'))"
        )
        for _ in range(1500):
            if self.ask(ready) is True:
                return self
            time.sleep(0.02)
        raise AssertionError(f"{path.name} was not drawn: {self.logged}")

    def click(self, selector: str) -> None:
        """Clicks what a selector finds, and waits for what that draws."""
        self.ask(f"document.querySelector({json.dumps(selector)}).click()")
        self.settle()

    def settle(self) -> None:
        """Waits for what is being drawn."""
        self.ask("new Promise((done) => setTimeout(done, 250))")

    def picture(self, path: Path) -> None:
        """What is seen, as PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def pdf(self) -> bytes:
        """Printed on A4."""
        answer = self.send("Page.printToPDF", preferCSSPageSize=True, printBackground=True)
        return base64.b64decode(answer["data"])


class Browser:
    """A headless Chromium, spoken to through pipes."""

    def __init__(self, program: str) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        self.folder = tempfile.TemporaryDirectory(prefix="vitscale-chromium-", ignore_cleanup_errors=True)
        # The protocol is on its descriptors 3 and 4.
        wired = f'exec {program} "$@" 3<&{to_browser} 4>&{from_browser}'
        self.process = subprocess.Popen(
            [
                "bash", "-c", wired, program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
                "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
                "--disable-dev-shm-usage", "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND",
                f"--user-data-dir={self.folder.name}", "--remote-debugging-pipe", "about:blank",
            ],
            pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._numbers = itertools.count(1)
        self._rest = b""
        self._pages: dict[str, Page] = {}

    def send(self, method: str, params: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._in, 1 << 16)
            if not part:
                raise AssertionError("Chromium has ended")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        page = self._pages.get(event.get("sessionId", ""))
        if page is None:
            return
        params = event["params"]
        if event["method"] == "Runtime.exceptionThrown":
            page.logged.append(str(params["exceptionDetails"]))
        elif event["method"] == "Runtime.consoleAPICalled" and params["type"] == "error":
            page.logged.append(str(params["args"]))
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            page.logged.append(params["entry"]["text"])
        elif event["method"] == "Network.requestWillBeSent":
            address = params["request"]["url"]
            if not address.startswith(("file:", "data:", "about:")):
                page.requested.append(address)

    def page(self) -> Page:
        target = self.send("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Runtime", "Log", "Network", "Page"):
            page.send(f"{domain}.enable")
        return page

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        self.folder.cleanup()


def shared_page() -> Page:
    """One page of one browser for all tests of a process; skipped where no Chromium is installed."""
    program = next((name for name in _NAMES if shutil.which(name) is not None), None)
    if program is None:  # also where an earlier test has opened a page
        needs.programs("chromium")
        raise AssertionError
    return _page_of(program)


@functools.cache
def _page_of(program: str) -> Page:
    import atexit

    browser = Browser(program)
    atexit.register(browser.close)
    return browser.page()


def drawn(page: Path) -> str:
    """The DOM of a page after its scripts have run."""
    return str(shared_page().open(page).ask("document.documentElement.outerHTML"))
