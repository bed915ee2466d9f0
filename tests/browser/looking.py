"""A page in a real browser: its states, its texts, pictures of it, and what axe-core finds against it."""

import os
import shutil
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright import sync_api

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PICTURES = os.environ.get("COTERIE_SCREENSHOTS")
WAIT_S = 90.0
"""Long enough for a machine that does much else."""
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]


class Looked:
    """A page in a browser of its own, with everything that it said and asked for."""

    def __init__(
        self, browser: sync_api.Browser, width: int = 1200, scheme: str = "light", **more: Any
    ) -> None:
        size = {"width": width, "height": 900}
        self.context = browser.new_context(viewport=size, color_scheme=scheme, **more)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def state(self, wanted: str, seconds: float = WAIT_S) -> None:
        """Wait for a state of the connection."""
        self.page.wait_for_selector(f"body[data-state={wanted}]", timeout=seconds * 1000)

    def text(self, part: str) -> str:
        return self.page.locator(f"#{part}").inner_text()

    def until(self, part: str, words: str, seconds: float = WAIT_S) -> None:
        """Wait for words in a part of the page."""
        self.page.locator(f"#{part}").filter(has_text=words).first.wait_for(timeout=seconds * 1000)

    def picture(self, name: str) -> None:
        if PICTURES:
            Path(PICTURES).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=f"{PICTURES}/{name}.png", full_page=True)

    def violations(self) -> list[str]:
        """Return what axe-core finds against the page."""
        found = Axe().run(self.page).response["violations"]
        return [f"{one['id']}: {[node['html'] for node in one['nodes']]}" for one in found]
