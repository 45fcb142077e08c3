"""A headless Chromium, driven through chromedriver: the W3C's WebDriver over HTTP, and Chrome's own commands."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.waiting import PATIENCE_S

MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Browser:
    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = await self._http.request(method, path, json=body if method == "POST" else None)
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value

    async def open(self, url: str) -> None:
        await self.ask("POST", "url", {"url": url})

    async def run(self, script: str, *args: Any) -> Any:
        """What a function's body returns on the page."""
        return await self.ask("POST", "execute/sync", {"script": script, "args": args})

    async def until(self, condition: str) -> None:
        """Wait until an expression is true on the page."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if await self.run(f"return Boolean({condition})"):
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"never true: {condition}\n{await self.run('return document.body.innerText')}")

    async def devtools(self, command: str, **params: Any) -> Any:
        return await self.ask("POST", "goog/cdp/execute", {"cmd": command, "params": params})

    async def show_as(self, width: int, height: int = 900, scheme: str = "light", scale: float = 1) -> None:
        phone = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        await self.devtools("Emulation.setDeviceMetricsOverride", **phone)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.devtools("Emulation.setEmulatedMedia", features=features)
        await self.devtools("Emulation.setScrollbarsHidden", hidden=True)

    async def screenshot(self) -> bytes:
        shot = await self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    async def complaints(self) -> list[str]:
        """What the console has been told since the last call."""
        return [entry["message"] for entry in await self.ask("POST", "se/log", {"type": "browser"})]

    async def requested(self) -> list[str]:
        """The addresses asked for since the last call."""
        entries = await self.ask("POST", "se/log", {"type": "performance"})
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


@asynccontextmanager
async def chromium(folder: Path) -> AsyncIterator[Browser]:
    """A browser with a profile of its own in `folder`."""
    driver = await asyncio.create_subprocess_exec(
        "chromedriver", "--port=0", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        assert driver.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            while b"started successfully on port" not in (line := await driver.stdout.readline()):
                assert line, "chromedriver ended"
        base = f"http://127.0.0.1:{int(line.rstrip(b'.').rsplit(b' ', 1)[1].strip().rstrip(b'.'))}/session"
        options = {"binary": shutil.which("chromium"), "args": [*FLAGS, f"--user-data-dir={folder}"]}
        logs = {"browser": "ALL", "performance": "ALL"}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": logs}
        async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
            started = await http.post(base, json={"capabilities": {"alwaysMatch": wanted}})
            session = started.json()["value"]
            assert started.status_code == 200, session
            try:
                async with httpx.AsyncClient(timeout=PATIENCE_S, base_url=f"{base}/{session['sessionId']}/") as client:
                    yield Browser(client)
            finally:  # else the browser outlives a test that fails, and the server waits for it
                await http.delete(f"{base}/{session['sessionId']}")
    finally:
        driver.terminate()
        await driver.wait()
