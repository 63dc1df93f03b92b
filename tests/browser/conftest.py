"""A headless Chromium, and pages of it that must not break the page's policy or ask anybody but the service."""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import harmony, service, shared_service, tokenizer  # noqa: F401 (fixtures)

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / ".venv-browser"
NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium; a missing one fails the test and says what to install."""
    if not PACKAGES.exists():
        pytest.fail(f"{PACKAGES.name} is missing: run `make browser`, which makes it")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.fail("Chromium is missing: apt-get install chromium")
    sys.path.append(str(PACKAGES))
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # In containers Chromium's own sandbox and /dev/shm are often too small or not allowed.
        started = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        )
        yield started
        started.close()


Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """`open_page(url, **options of the context)`: the page, ready. At its end nothing unexpected may have happened."""
    contexts, faults = [], []

    def open_page(url: str, *, width: int = 1280, height: int = 800, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url)
        context.set_default_timeout(20_000)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: faults.append(message.text) if _is_fault(message) else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith(url) else faults.append(request.url))
        page.goto(url)
        page.wait_for_selector("#status[data-state=ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def _is_fault(message: Any) -> bool:
    """Everything on the console but what Chromium itself says of a refusal or of a service that is gone."""
    return not message.text.startswith("Failed to load resource")


def ask(page: Any, text: str, *, waits: bool = True) -> None:
    """Type a question and send it; wait for the end of its answer."""
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    if waits:
        page.wait_for_selector(".answer:last-child:not(.is-busy)")


def until(page: Any, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for a condition. The browser's own way to wait evaluates text, which the page's policy forbids."""
    for _ in range(int(timeout_s / 0.05)):
        if condition():
            return
        page.wait_for_timeout(50)
    pytest.fail("the condition did not come true")


def texts(page: Any, selector: str) -> list[str]:
    """Text of all elements."""
    return page.locator(selector).all_text_contents()
