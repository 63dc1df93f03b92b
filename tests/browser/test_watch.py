"""What the page knows of the service while /health and /expert_load answer oddly, late, or for another process."""

import json

import pytest

from tests.browser.conftest import texts, until
from tests.tables import rows

pytestmark = pytest.mark.browser

UNAVAILABLE = {"error": {"message": "this replica has ended", "type": "server_error", "param": None, "code": "x"}}
KNOWN = '(async () => (await import("/page/watch.js")).known)()'


@pytest.fixture
def page(service, open_page):
    """The server view, where 50 ms are a second to the page. One for all rows of a table."""
    page = open_page(service.url)
    page.evaluate(
        "() => { const later = setTimeout, within = AbortSignal.timeout; setTimeout = (run, ms) => later(run, ms / 20);"
        "AbortSignal.timeout = (ms) => within.call(AbortSignal, ms / 20) }"
    )
    page.click("#tab-server")
    return page


def health_of(service):
    """What /health says now."""
    with service.http() as http:
        return http.get("/health").json()


@rows(
    "path, status, body",
    ("health", 503, json.dumps(UNAVAILABLE)),
    ("health", 200, '{"error": "Bad gateway"}'),
    ("health", 200, "null"),
    ("health", 200, '{"models": ["tiny"'),
    ("expert_load", 200, '{"format": 1, "layers": [{"layer"'),
    ("expert_load", 200, "[]"),
    ("expert_load", 502, '{"error": "Bad gateway"}'),
)
def test_after_an_odd_answer_the_page_asks_again(path, status, body, page):
    until(page, lambda: "Nothing is counted yet" in texts(page, "#experts-note")[0])
    num_odd = 0

    def answer(route):
        nonlocal num_odd
        num_odd += 1
        route.fulfill(status=status, content_type="application/json", body=body)

    page.route(f"**/{path}", answer)
    until(page, lambda: num_odd >= 2)
    page.unroute(f"**/{path}")
    page.wait_for_selector("#status[data-state=ready]")
    until(page, lambda: texts(page, "#server-model") == ["tiny"])
    until(page, lambda: "Nothing is counted yet" in texts(page, "#experts-note")[0])


def test_a_service_that_hangs_is_no_green_one(page):
    page.route("**/health", lambda _route: None)
    page.wait_for_selector("#status[data-state=down]")
    page.unroute("**/health")
    page.wait_for_selector("#status[data-state=ready]")


def serve_states(page, service, states):
    """Answer /health and /expert_load with one state after another: load_seconds, tokens in all, tokens by expert.

    Returns a list that grows with each call of /health.
    """
    health = health_of(service)
    asked = []

    def answer_health(route):
        load_seconds, num_tokens, _ = states[min(len(asked), len(states) - 1)]
        asked.append(load_seconds)
        counts = {
            "num_steps": num_tokens,
            "num_generated_tokens": num_tokens,
            "num_pages_total": 8,
            "num_pages_used": 2,
        }
        engine = health["engine"] | {"load_seconds": load_seconds}
        route.fulfill(json=health | {"engine": engine, "stats": health["stats"] | counts})

    def answer_experts(route):
        tokens = states[max(0, min(len(asked), len(states)) - 1)][2]  # a turn may have begun before
        route.fulfill(json={"layers": [] if tokens is None else [{"layer": 0, "tokens": tokens}]})

    page.unroute_all()
    page.route("**/health", answer_health)
    page.route("**/expert_load", answer_experts)
    return asked


@rows(
    "states, num_rates, recent",
    ([(1.0, 100, [9000, 0]), (1.0, 200, [9000, 50])], 1, [0, 1]),
    ([(2.0, 100, [9000, 0])], 0, [0, 0]),
    ([(3.0, 100, None), (3.0, 200, [30, 30])], 1, [0.5, 0.5]),  # all of these came just now
    ([(4.0, 100, [10, 10]), (5.0, 10**7, [10**6, 10**6])], 0, [0, 0]),  # another process
)
def test_rates_and_recent_tokens_are_differences_within_one_process(states, num_rates, recent, service, page):
    asked = serve_states(page, service, states)
    last = states[-1][-1]
    until(page, lambda: len(asked) > len(states))
    until(page, lambda: (page.evaluate(KNOWN)["experts"] or [{}])[0].get("all") == last)
    known = page.evaluate(KNOWN)
    assert sum(sample["generated"] > 0 for sample in known["samples"]) == num_rates
    counts = known["experts"][0]["recent"]
    assert [count / max(1, sum(counts)) for count in counts] == recent


def test_a_service_that_is_gone_has_no_current_numbers(service, page):
    serve_states(page, service, [(1.0, 100, None), (1.0, 200, None)])
    until(page, lambda: not any(text.startswith("–") for text in texts(page, ".card-value")))
    assert texts(page, "#card-kv") == ["25.0 %"]
    page.route("**/health", lambda route: route.abort())
    page.wait_for_selector("#status[data-state=down]")
    until(page, lambda: texts(page, ".card-value") == ["–"] * 4)
