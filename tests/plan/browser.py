"""Headless Chromium, driven over a pipe in the DevTools protocol: what a page shows, says and asks for."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "google-chrome-stable", "chrome")
TIMEOUT_S = 120.0  # on a busy machine


def found() -> str | None:
    """The browser of this machine, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """Owns a process and its pipe. `errors`: what the page said was wrong. `asked`: addresses that it asked for."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self._process, self._to, self._back = process, to, back
        self._rest, self._count = b"", 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.asked: list[str] = []

    def open(self, page: Path, width: int, height: int) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        self.call("Page.navigate", url=page.as_uri())
        self.until("document.readyState === 'complete' && document.querySelectorAll('.main-svg').length > 0")

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def evaluate(self, script: str) -> Any:
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def until(self, script: str) -> Any:
        """The value of a script once it is true."""
        stop = time.monotonic() + TIMEOUT_S
        while not (value := self.evaluate(script)):
            assert time.monotonic() < stop, f"never true: {script}"
            time.sleep(0.05)
        return value

    def point_at(self, x: float, y: float) -> None:
        for dx in (-2, 0):  # plotly listens to moves
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + dx, y=y)

    def picture(self, path: Path) -> None:
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        stop = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._back], [], [], max(0.0, stop - time.monotonic()))
            data = os.read(self._back, 1 << 16) if ready else b""
            assert data, "the browser ended, or is silent"
            self._rest += data
        one, _, self._rest = self._rest.partition(b"\0")
        return json.loads(one)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])


@contextmanager
def started(binary: str) -> Iterator[Browser]:
    """A browser with a profile of its own, which ends with it."""
    pipes = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (*os.pipe(), *os.pipe())]  # clear of 3 and 4
    read, to, back, write = pipes

    def as_three_and_four() -> None:
        os.dup2(read, 3)
        os.dup2(write, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        process = subprocess.Popen(
            [binary, *flags, f"--user-data-dir={profile}", "--no-first-run", "about:blank"],
            preexec_fn=as_three_and_four,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        try:
            yield Browser(process, to, back)
        finally:
            process.terminate()
            process.wait(30)
            os.close(to)
            os.close(back)
