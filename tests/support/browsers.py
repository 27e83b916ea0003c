"""Chromium, and pages in it that note what goes wrong."""

from __future__ import annotations

import shutil

import pytest

from support.dashboards import TOKEN, Server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed: scripts/setup-browser installs it"
)
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="module")
def chromium():
    """Start a browser for the tests of a file."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


class Watched:
    """A page, and what went wrong in it."""

    def __init__(self, context, server: Server) -> None:
        self.page = context.new_page()
        self.server = server
        self.faults: list[str] = []
        self.page.on("console", lambda message: self._note(message.type in ("error", "warning"), message.text))
        self.page.on("pageerror", lambda error: self._note(True, str(error)))
        self.page.on("requestfailed", lambda request: self._note(request.failure != "net::ERR_ABORTED", request.url))
        self.page.on("request", lambda request: self._note(not self._is_own(request.url), request.url))
        self.page.goto(f"{server.address}/?token={TOKEN}")

    def _note(self, is_fault: bool, text: str) -> None:
        if is_fault:
            self.faults.append(text)

    def _is_own(self, url: str) -> bool:
        return url.startswith((self.server.address, "data:", "blob:"))

    def open(self, path: str) -> None:
        """Open a page, and wait for its charts."""
        self.page.goto(self.server.address + path)
        for kind in ("curves", "compare", "bars", "spans"):
            if self.page.locator(f"[data-{kind}]").count():
                self.page.wait_for_selector(f"[data-{kind}][data-is-drawn=all]", state="attached", timeout=30_000)
