"""The chat view in a browser, with an engine that says what a test wrote for it."""

import json
import subprocess
import sys

import pytest

from engine.types import TokenLogprobs
from tests.browser.conftest import ask, texts, until
from tests.server import conftest as fakes
from tests.server.conftest import ANSWER, CALL, WEATHER, FakeEngine, serve
from tests.tables import rows

pytestmark = pytest.mark.browser

PARIS = "The capital of France is Paris."
HEAD = "<|channel|>final<|message|>"


@pytest.fixture
def say(service, harmony):
    """Let the engine answer with these transcripts, one after another; a token a step."""

    def say(*transcripts, delay_s=0.0):
        answers = [harmony(text) for text in transcripts]
        service.engine.script = lambda _request: answers[min(len(service.engine.requests), len(answers)) - 1]
        service.engine.delay_s = delay_s

    return say


def test_an_answer_streams_with_its_reasoning_and_times(service, say, open_page):
    say(ANSWER, delay_s=0.03)
    page = open_page(service.url)
    page.evaluate(
        "() => { window.seen = new Set(); new MutationObserver(() => seen.add(document.querySelector('.answer-text')"
        "?.textContent.length)).observe(document.body, {subtree: true, childList: true, characterData: true}) }"
    )
    ask(page, "What is the capital of France?")
    assert texts(page, ".question-text") == ["What is the capital of France?"]
    assert texts(page, ".answer-text") == [PARIS]
    assert texts(page, ".reasoning-text") == ["The user asks for a capital."]
    assert page.evaluate("seen.size") > 4, "the answer came in pieces"
    assert not page.locator(".reasoning-text").is_visible()
    page.click(".reasoning summary")
    assert page.locator(".reasoning-text").is_visible()
    stats = texts(page, ".stats")[0]
    assert "tokens/s" in stats
    assert "first token" in stats


def test_stop_and_regenerate(service, say, open_page):
    say(HEAD + "word " * 2000, ANSWER, delay_s=0.02)
    page = open_page(service.url)
    ask(page, "Go on for long", waits=False)
    until(page, lambda: len(texts(page, ".answer-text")[0]) > 20)
    page.click("#stop")
    page.wait_for_selector(".answer:not(.is-busy)")
    fakes.wait_until(lambda: not service.engine.running)
    assert len(service.engine.aborted) == 1
    assert texts(page, ".answer-note") == ["Stopped."]
    assert page.locator("#send").is_visible()
    page.click(".regenerate")
    until(page, lambda: texts(page, ".answer-text") == [PARIS])
    assert len(texts(page, ".answer")) == 1
    ask(page, "Once more", waits=False)
    page.keyboard.press("Escape")
    page.wait_for_selector(".answer:last-child:not(.is-busy)")
    assert texts(page, ".answer-note")[-1] == "Stopped."
    page.locator(".regenerate").last.press("Enter")
    page.wait_for_selector("#stop:focus").press("Enter")
    page.wait_for_selector("#send:focus")


def test_esc_ends_only_what_lies_on_top(service, say, open_page):
    say(HEAD + "word " * 2000, delay_s=0.02)
    page = open_page(service.url, width=800)
    ask(page, "Go on for long", waits=False)
    page.wait_for_selector(".answer-text .line")
    for opens, focus, closed in (
        ("#open-keys", "#client-key", "#keys:not([open])"),
        ("#open-panel", "[name=seed]", "#open-panel[aria-expanded=false]"),
    ):
        page.click(opens)
        page.press(focus, "Escape")
        page.wait_for_selector(closed, state="attached")
    page.focus("#prompt")
    page.evaluate(
        "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', "
        "{key: 'Escape', isComposing: true, bubbles: true}))"
    )
    page.wait_for_timeout(100)
    assert page.locator(".is-busy").count() == 1
    page.keyboard.press("Escape")
    page.wait_for_selector(".answer:not(.is-busy)")


def test_the_end_of_long_reasoning_stays_in_view(service, say, open_page):
    say("<|channel|>analysis<|message|>" + "thought\n" * 2000, delay_s=0.002)
    page = open_page(service.url)
    ask(page, "Think", waits=False)
    box = "(({scrollTop, clientHeight, scrollHeight}) => [scrollTop, scrollHeight - scrollTop - clientHeight])"
    place = f"{box}(document.querySelector('.reasoning-text'))"
    page.wait_for_selector(".reasoning-text .line")
    until(page, lambda: page.evaluate(place)[0] > 100)
    assert page.evaluate(place)[1] < 40
    page.hover(".reasoning-text")
    page.mouse.wheel(0, -300)
    page.wait_for_timeout(300)
    assert page.evaluate(place)[1] > 100, "a reader who scrolls up stays there"


def test_probabilities_on_hover_and_by_keyboard(service, say, open_page, monkeypatch):
    def half(token_id, _request):
        return TokenLogprobs(token_id, -0.6931472, [(token_id, -0.6931472), (token_id + 1, -1.3862944)])

    monkeypatch.setattr(fakes, "fake_logprobs", half)
    say(ANSWER)
    page = open_page(service.url)
    ask(page, "What is the capital of France?")
    page.locator(".token", has_text="Paris").hover()
    tip = page.locator("#tip")
    assert tip.is_visible()
    assert "Paris" in tip.text_content()
    assert [row.split(" %")[0][-4:] for row in texts(page, ".tip-row .number")] == ["50.0", "25.0"]
    page.mouse.move(5, 5)
    page.wait_for_selector("#tip", state="hidden")
    page.focus(".answer-text")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert texts(page, ".token.is-current") == texts(page, ".token")[1:2]
    page.check("[name=shade]")
    colour = "getComputedStyle(document.querySelector('.token.shade-2')).backgroundColor"
    assert page.evaluate(colour) != "rgba(0, 0, 0, 0)"


def test_a_tap_shows_the_card_of_a_word(service, say, open_page):
    say(ANSWER)
    page = open_page(service.url, width=375, has_touch=True, is_mobile=True)
    ask(page, "What is the capital of France?")
    ask(page, "And again?")
    for word in (page.locator(".token", has_text="Paris").first, page.locator(".token", has_text="capital").last):
        word.tap()
        assert word.text_content().strip() in page.wait_for_selector("#tip:not([hidden]) .tip-head").text_content()
    page.evaluate("document.querySelector('#new-chat').click()")
    page.wait_for_selector("#tip", state="hidden")


def test_what_a_model_writes_is_text(service, say, open_page):
    lines = [
        "# <b>Title</b>", "<img src=x onerror=document.title='bad'>", "- a **bold** and `code<script>` *slanted*", "",
        "```html", "<script>document.title='bad'</script>", "  kept", "```", "[link](javascript:x) 😀 naïve 日本",
    ]  # fmt: skip
    say(HEAD + "\n".join(lines) + "<|return|>")
    page = open_page(service.url)
    ask(page, "<i>Hi</i>")
    assert texts(page, ".question-text") == ["<i>Hi</i>"]
    assert texts(page, ".line.heading") == ["<b>Title</b>"]
    assert texts(page, ".answer-text strong") == ["bold"]
    assert texts(page, ".item-text code") == ["code<script>"]
    assert texts(page, ".code-line") == ["<script>document.title='bad'</script>", "  kept"]
    assert texts(page, ".answer-text > .line:last-child") == ["[link](javascript:x) 😀 naïve 日本"]
    assert page.locator(".answer-text").locator("img, script, a, b").count() == 0
    assert page.title() == "moe-serve"


def test_a_tool_call_takes_its_result_and_goes_on(service, say, tokenizer, open_page):
    say(CALL, HEAD + "It rains.<|return|>")
    page = open_page(service.url)
    page.click("details[data-fold=tools] summary")
    page.fill("[name=tools]", json.dumps([WEATHER]))
    ask(page, "How is the weather in Paris?")
    assert texts(page, ".call-name") == ["get_weather"]
    assert json.loads(texts(page, ".call pre")[0]) == {"city": "Paris"}
    page.fill(".call textarea", '{"sky": "rain"}')
    page.click(".calls .primary")
    until(page, lambda: texts(page, ".answer-text")[-1] == "It rains.")
    assert '{"sky": "rain"}' in tokenizer.decode(service.engine.requests[-1].prompt_ids)


def test_settings_reach_the_engine_and_wrong_ones_are_shown(service, say, open_page):
    say(ANSWER)
    page = open_page(service.url)
    page.fill("[name=system]", "Be brief.")
    for name, value in {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "max_tokens": 5}.items():
        page.fill(f"[name={name}]", str(value))
    ask(page, "Hi")
    sampling = service.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.min_p, sampling.seed, sampling.max_tokens, sampling.logprobs) == (0.1, 3, 5, 5)
    assert "max_tokens" in texts(page, ".answer-note")[0], "the answer was cut, and says so"
    page.click("details[data-fold=schema] summary")
    page.fill("[name=schema]", '{"type": ')
    ask(page, "Hi again", waits=False)
    assert "not JSON" in page.wait_for_selector("#schema-error:not([hidden])").text_content()
    assert len(service.engine.requests) == 1
    page.fill("[name=schema]", "")
    for name, value, words in (
        ("temperature", "3", "Temperature: "),
        ("top_k", "-2", "Top k: "),
        ("presence_penalty", "-3", "Presence: "),
        ("more", '{"n": 2}', "leave out n;"),
        ("more", '{"stream": false}', "leave out stream;"),
        ("more", '{"stream_options": null}', "leave out stream_options;"),
        ("more", "[]", "give a JSON object"),
    ):
        fill_setting(page, name, value)
        page.press("#prompt", "Enter")
        assert words in page.wait_for_selector(f"#{name}-error:not([hidden])").text_content()
        assert page.evaluate("document.activeElement.name") == name
        fill_setting(page, name, "")
        assert page.locator(f"#{name}-error").is_hidden()
    assert len(service.engine.requests) == 1
    page.fill("[name=top_k]", "-1")
    page.fill("[name=schema]", '{"type": "object", "properties": {"x": {"not": {}}}}')
    page.press("#prompt", "Enter")
    error = page.wait_for_selector(".answer:last-child [data-kind=error]").text_content()
    assert error.startswith("400")
    assert "response_format" in error


def fill_setting(page, name, value):
    """Fill a box of the panel, also one that is folded away."""
    page.evaluate(f"document.getElementsByName('{name}')[0].closest('details')?.setAttribute('open', '')")
    page.fill(f"[name={name}]", value)


def test_a_wrong_setting_opens_the_panel_that_holds_it(service, open_page):
    page = open_page(service.url, width=800)
    page.click("#open-panel")
    page.fill("[name=temperature]", "3")
    page.click("#close-panel")
    ask(page, "Hi", waits=False)
    page.wait_for_selector("#temperature-error:not([hidden])")
    assert page.get_attribute("#open-panel", "aria-expanded") == "true"
    assert page.evaluate("document.activeElement.name") == "temperature"


@pytest.fixture
def page(service, open_page):
    """One for all rows of a table."""
    return open_page(service.url)


@rows(
    "status, headers, body, words",
    (502, {}, '{"error": "Bad gateway"}', "502 Bad gateway"),
    (502, {}, "<h1>Bad gateway</h1>", "502 <h1>Bad gateway</h1>"),
    (500, {}, '{"error": {"message": null}}', '500 {"error": {"message": null}}'),
    (429, {"Retry-After": "7"}, '{"error": {"message": "slow down"}}', "429 slow down Try again in 7 s."),
    (429, {"Retry-After": "7"}, '{"error": {"message": "full; try again in 7 s"}}', "429 full; try again in 7 s"),
    (200, {}, 'data: {"error": "boom"}\n\n', "boom"),
    (200, {}, 'data: {"error": {"message": "the engine ended"}}\n\n', "the engine ended"),
    (200, {}, 'data: {"error": {}}\n\n', "The service gave no reason."),
)
def test_errors_of_others_are_shown_in_their_words(status, headers, body, words, page):
    page.unroute_all()
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=status, headers=headers, body=body))
    page.click("#new-chat")
    ask(page, "Hi")
    assert texts(page, "[data-kind=error]") == [words]


def test_refusals_are_shown_in_the_words_of_the_service(service, say, open_page):
    say(ANSWER)
    page = open_page(service.url)
    service.engine.ready = False
    ask(page, "Hi")
    error = page.locator("[data-kind=error]")
    assert error.text_content() == "503 the model is still loading Try again in 5 s."
    page.wait_for_selector("#status[data-state=down]")
    service.engine.ready = True
    page.wait_for_selector("#status[data-state=ready]")
    page.click(".regenerate")
    until(page, lambda: texts(page, ".answer-text") == [PARIS])
    service.engine.last = lambda _request, _num: {
        "finish_reason": "error",
        "error": "too <b>much</b>",
        "overloaded": True,
    }
    ask(page, "And again")
    assert "too <b>much</b>" in error.last.text_content()


def test_keys_are_asked_for_and_kept_in_memory_only(tokenizer, harmony, open_page):
    engine = FakeEngine(lambda _request: harmony(ANSWER))
    with serve(engine, tokenizer, api_key="one", admin_key="root", max_requests_per_key=1) as service:
        page = open_page(service.url)
        page.click("#tab-server")
        page.wait_for_selector("#experts-note button")
        assert (
            "admin key" in page.locator("#experts-note").text_content()
            or "key is needed" in texts(page, "#experts-note")[0]
        )
        page.click("#tab-chat")
        ask(page, "Hi")
        page.wait_for_selector("#keys[open]")
        page.fill("#client-key", "schlüssel")
        page.press("#client-key", "Enter")
        assert page.locator("#keys[open]").count() == 1, "a header cannot carry such a key"
        assert "ASCII" in page.get_attribute("#client-key:invalid", "title")
        page.fill("#client-key", "one")
        page.press("#client-key", "Enter")
        until(page, lambda: texts(page, ".answer-text") == [PARIS])
        page.click("#tab-server")
        until(page, lambda: "needs the admin key" in texts(page, "#experts-note")[0])
        page.click("#experts-note button")
        page.fill("#admin-key", "root")
        page.press("#admin-key", "Enter")
        until(page, lambda: "--expert-load" in texts(page, "#experts-note")[0])
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        engine.delay_s = 0.5
        with (
            service.http() as http,
            http.stream(
                "POST",
                "/v1/completions",
                json={"prompt": "a", "stream": True, "max_tokens": 50},
                headers={"x-api-key": "one"},
            ),
        ):
            page.click("#tab-chat")
            ask(page, "Two at once")
            assert page.locator("[data-kind=error]").text_content().startswith("429 ")
        page.reload()
        assert page.input_value("#client-key") == ""


def test_copies_run_as_they_are(service, say, open_page):
    say(ANSWER)
    page = open_page(service.url)
    page.fill("[name=top_k]", "5")
    ask(page, 'It\'s "quoted" $HOME \\ `here`\nand 日本')
    asked = service.engine.requests[-1]
    for name, command in {"as-curl": ["bash", "-c"], "as-python": [sys.executable, "-W", "ignore", "-c"]}.items():
        page.click(f".{name}")
        page.wait_for_selector("#toast:not([hidden])")
        program = page.evaluate("navigator.clipboard.readText()")
        done = subprocess.run([*command, program], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        assert "Paris" in done.stdout
        again = service.engine.requests[-1]
        assert again.request_id != asked.request_id
        assert (again.prompt_ids, again.sampling) == (asked.prompt_ids, asked.sampling)


def test_an_earlier_question_can_be_changed(service, say, open_page):
    say(ANSWER)
    page = open_page(service.url)
    ask(page, "First")
    ask(page, "Second")
    page.locator(".question").first.hover()
    page.locator(".question").first.get_by_text("Edit").click()
    assert page.input_value("#prompt") == "First"
    assert page.locator(".answer").count() == 0
    ask(page, "Third")
    assert texts(page, ".question-text") == ["Third"]
    page.fill("#prompt", "A draft")
    page.once("dialog", lambda dialog: dialog.dismiss())
    page.locator(".question").hover()
    page.get_by_text("Edit").click()
    assert page.input_value("#prompt") == "A draft"
    assert texts(page, ".question-text") == ["Third"]
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_text("Edit").click()
    assert page.input_value("#prompt") == "Third"
    page.click("#new-chat")
    assert page.locator("#welcome").is_visible()
    page.locator(".example").first.click()
    page.wait_for_selector(".answer:not(.is-busy)")
    assert page.input_value("#prompt") == "Third", "an example leaves a draft alone"


def test_long_answers_cost_no_more_per_token(service, say, open_page):
    """Work in the document: nodes added while one long line and many lines are shown."""
    say(HEAD + "word " * 800 + "\nline" * 300 + "<|return|>")
    page = open_page(service.url)
    page.uncheck("[name=logprobs]")
    page.evaluate(
        "() => { window.added = 0; new MutationObserver((changes) => changes.forEach((each) => "
        "added += each.addedNodes.length)).observe(document.body, {subtree: true, childList: true}) }"
    )
    ask(page, "Go on")
    assert texts(page, ".answer-text") == ["word " * 800 + "line" * 300]
    assert page.locator(".answer-text > .line").count() == 301
    assert page.evaluate("added") < 10 * 1100
