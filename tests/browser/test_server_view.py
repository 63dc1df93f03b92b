"""The server view and the whole page in a browser, with the real service and the bundled model."""

import signal

import pytest

from tests.browser.conftest import ask, texts, until
from tests.server.service_process import start_bundled

pytestmark = pytest.mark.browser

MAP = "document.querySelector('{}').toDataURL()"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with start_bundled(tmp_path_factory.mktemp("service"), "--expert-load", "--max-num-seqs", "4") as running:
        yield running.url


def test_the_map_of_experts_moves_while_one_chats(url, open_page):
    page = open_page(url)
    ask(page, "What is the capital of France?")
    assert texts(page, ".answer-text") == ["The capital of France is Paris."]
    page.wait_for_selector("#live-map")
    before = page.evaluate(MAP.format("#live-map"))
    ask(page, "What is 123 + 456?")
    until(page, lambda: page.evaluate(MAP.format("#live-map")) != before)
    page.click("#tab-server")
    page.select_option("#span", "all")
    page.hover("#map", position={"x": 60, "y": 20})
    assert page.locator("#tip").text_content().startswith("Layer 0, expert 0")
    page.focus("#map")
    page.keyboard.press("ArrowDown")
    assert page.locator("#tip").text_content().startswith("Layer 1, expert 0")
    assert "8 experts in 6 layers" in page.get_attribute("#map", "aria-label")


def test_the_view_says_what_the_service_is(url, open_page):
    page = open_page(url)
    page.click("#tab-server")
    assert texts(page, "#server-model") == ["tiny-gpt-oss"]
    assert "context of 4,096 tokens" in texts(page, "#server-facts span")
    rows = page.locator("#layers tr")
    assert rows.count() == 6
    assert "mxfp4" in rows.first.text_content()
    assert "allowed" in rows.first.text_content()
    until(page, lambda: texts(page, "#card-kv")[0].endswith("%"))
    assert texts(page, "#card-requests")[0].endswith("running")


@pytest.mark.parametrize("width", [375, 768, 1920])
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_every_width_in_both_colours(width, colours, url, open_page):
    page = open_page(url, width=width, color_scheme=colours)
    ask(page, "Spell the word mountain")
    lightness = "Math.round(getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => a + +b, 0))"
    assert (page.evaluate(lightness) < 150) == (colours == "dark")
    parts = "[document.documentElement, document.body, ...document.querySelectorAll('main')]"
    for tab in ("#tab-chat", "#tab-server"):
        page.click(tab)
        fits = f"{parts}.every((each) => each.scrollWidth <= innerWidth)"
        assert page.evaluate(fits), tab
    page.click("#theme")
    page.click("#theme")
    assert page.evaluate(lightness) < 150, "dark, whatever the system says"
    if width < 1100:
        page.click("#tab-chat")
        page.click("#open-panel")
        page.fill("[name=seed]", "1")
        page.click("#close-panel")
        page.wait_for_selector("#settings", state="hidden")


def test_the_keyboard_reaches_everything(url, open_page):
    page = open_page(url)
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    assert page.locator("#server").is_visible()
    assert page.evaluate("document.activeElement.id") == "tab-server"
    page.keyboard.press("ArrowLeft")
    names = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        names.add(page.evaluate("document.activeElement.id || document.activeElement.name"))
    assert {"open-keys", "theme", "prompt", "send", "temperature", "logprobs", "system"} <= names


def test_a_restart_is_seen_and_survived(tmp_path, open_page):
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with start_bundled(tmp_path / "first") as first:
        page = open_page(first.url)
        ask(page, "What is the capital of France?")
        port = first.url.rpartition(":")[2]
        page.click("#tab-server")
        until(page, lambda: "Start it with --expert-load" in texts(page, "#experts-note")[0])
        page.click("#tab-chat")
        first.signal(signal.SIGKILL)
        first.process.wait(20)
        ask(page, "What is the capital of Spain?")
        assert "does not answer" in texts(page, "[data-kind=error]")[0]
        page.wait_for_selector("#status[data-state=down]")
    with start_bundled(tmp_path / "second", "--port", port) as second:
        assert second.url.endswith(port)
        page.wait_for_selector("#status[data-state=ready]")
        page.locator(".regenerate").last.click()
        page.wait_for_selector(".answer:last-child:not(.is-busy) .answer-text .line")
        assert texts(page, ".answer-text")[-1] == "The capital of Spain is Madrid."
