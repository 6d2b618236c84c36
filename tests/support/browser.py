"""A headless Chromium for tests of pages: what a reader sees, and that nothing but the file itself is ever asked for.

`tests/conftest.py` makes the fixture `browser` of it. It is driven through Debian's own `chromedriver`; nothing is downloaded, and no
host name can be resolved by the browser.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHROMIUM, CHROMEDRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
PHONE, DESKTOP = (360, 740), (1280, 800)
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


def absent() -> str | None:
    """Why no browser can be started here, or None."""
    gone = [str(path) for path in (CHROMIUM, CHROMEDRIVER) if not path.is_file()]
    return f"no {' and no '.join(gone)}: install Debian's chromium and chromium-driver" if gone else None


class Browser:
    """One tab."""

    def __init__(self, driver, downloads: Path) -> None:
        self.driver = driver
        self.downloads = downloads
        self.size = DESKTOP

    def open(self, file: Path, size: tuple[int, int] = DESKTOP, dark: bool = False) -> None:
        """Load a file into a window of `size` CSS pixels."""
        self.size = size
        self.driver.get("about:blank")
        for log in ("browser", "performance"):
            self.driver.get_log(log)
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size[0] < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(file.resolve().as_uri())

    def run(self, script: str, *arguments):
        """The value that a JavaScript function body returns."""
        return self.driver.execute_script(script, *arguments)

    def console(self) -> list[str]:
        """Messages of the console since `open`: errors, refusals of the content security policy, anything."""
        return [f"{entry['level']}: {entry['message']}" for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """URLs that were asked for since `open`, the page itself and data: left out."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        assert self.driver.current_url in urls, "the log of the network does not work"
        return [url for url in urls if url != self.driver.current_url and not url.startswith("data:")]

    def overflow(self) -> int:
        """CSS pixels by which the page is wider than the window: more than 0, and it scrolls sideways."""
        return max(0, self.run("return document.documentElement.scrollWidth") - self.size[0])

    def on_first_screen(self, selector: str) -> bool:
        """Whether the whole element is seen without scrolling."""
        script = """const e = document.querySelector(arguments[0]); if (!e) return false;
            const r = e.getBoundingClientRect();
            return e.checkVisibility() && r.width > 0 && r.height > 0 && r.top >= 0 && r.left >= 0
                && r.bottom <= arguments[2] && r.right <= arguments[1];"""
        return self.run(script, selector, *self.size)

    def downloaded(self, name: str, seconds: float = 10) -> Path:
        """The complete file that a click saved."""
        path, deadline = self.downloads / name, time.monotonic() + seconds
        while not path.is_file():
            assert time.monotonic() < deadline, f"{name} was not saved, only {[p.name for p in self.downloads.iterdir()]}"
            time.sleep(0.05)
        return path

    def screenshot(self, file: Path) -> None:
        """The whole page, not only what the window shows."""
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        file.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def started(folder: Path) -> Iterator[Browser]:
    """A browser whose profile and downloads lie in `folder`, empty before."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*_FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    downloads = folder / "downloads"
    downloads.mkdir()
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # With both paths given, selenium never looks for a driver to download.
    driver = webdriver.Chrome(options=options, service=Service(executable_path=str(CHROMEDRIVER)))
    try:
        where = {"behavior": "allow", "downloadPath": str(downloads)}
        driver.execute_cdp_cmd("Browser.setDownloadBehavior", where)
        yield Browser(driver, downloads)
    finally:
        driver.quit()
