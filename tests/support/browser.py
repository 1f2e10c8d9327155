"""Headless Chromium, driven by ChromeDriver's WebDriver protocol over plain HTTP and JSON."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--force-color-profile=srgb",
)  # fmt: skip
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {"right": "\ue014", "left": "\ue012", "up": "\ue013", "down": "\ue015", "tab": "\ue004", "enter": "\ue007"}


class Browser:
    def __init__(self, address: str, profile: str) -> None:
        self.address = address
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        capabilities = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.session = self.ask("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})["sessionId"]

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()) from None

    def do(self, method: str, path: str, body: Any = None) -> Any:
        return self.ask(method, f"/session/{self.session}{path}", body)

    def open(self, path: Path) -> None:
        self.do("POST", "/url", {"url": path.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        return self.do("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, seconds: float = 20) -> Any:
        """Repeats the script until its result is true, and returns that."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"timeout: {script}"
            time.sleep(0.05)
        return value

    def find(self, selector: str) -> str:
        return self.do("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]

    def click(self, selector: str) -> None:
        self.do("POST", f"/element/{self.find(selector)}/click")

    def press(self, selector: str, *keys: str) -> None:
        text = "".join(KEYS[key] for key in keys)
        self.do("POST", f"/element/{self.find(selector)}/value", {"text": text})

    def choose(self, selector: str, value: str) -> None:
        """Clicks an option of a <select>."""
        self.click(f'{selector} option[value="{value}"]')

    def hover(self, selector: str, x: int, y: int) -> None:
        """Moves the pointer over an element, x and y relative to its centre."""
        origin = {ELEMENT: self.find(selector)}
        move = {"type": "pointerMove", "duration": 0, "origin": origin, "x": x, "y": y}
        self.do("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def console(self) -> list[str]:
        """Console messages since the last call."""
        return [entry["message"] for entry in self.do("POST", "/se/log", {"type": "browser"})]

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self.do("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def look(self, *, width: int, height: int, dark: bool = False, phone: bool = False) -> None:
        """Sets the window size and the preferred colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self.devtools("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme, still])

    def screenshot(self, path: Path, whole: bool = False) -> Path:
        picture = self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(picture))
        return path


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    assert CHROMIUM
    assert DRIVER
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        log = Path(folder, "driver.log")
        with log.open("w") as out:
            driver = subprocess.Popen([DRIVER, "--port=0"], stdout=out, stderr=subprocess.STDOUT)
        try:
            browser = Browser(f"http://127.0.0.1:{port_of(log, driver)}", f"{folder}/profile")
            yield browser
            browser.do("DELETE", "")
        finally:
            driver.terminate()
            driver.wait(20)


def port_of(log: Path, driver: subprocess.Popen[bytes]) -> str:
    """The free port that ChromeDriver chose, from its log."""
    end = time.monotonic() + 60
    while time.monotonic() < end and driver.poll() is None:
        _, found, rest = log.read_text().partition("started successfully on port ")
        if found and "." in rest:
            return rest.split(".")[0].strip()
        time.sleep(0.05)
    raise RuntimeError(f"ChromeDriver did not start: {log.read_text()}")
