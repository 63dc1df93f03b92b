"""The page at `/`: its headers, that it opens nothing else, and rules about its files; tests/browser runs it."""

import http.client
import re
from html.parser import HTMLParser
from urllib.parse import urlsplit

import pytest
from starlette.routing import Route

from server.routes.page import FOLDER, page_routes
from tests.server.conftest import FakeEngine, serve
from tests.server.test_keys import paths_of
from tests.tables import rows

FILES = {path.name: path.read_text() for path in sorted(FOLDER.iterdir()) if path.suffix != ".py" and path.is_file()}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
PATHS = ["/", *(f"/page/{name}" for name in FILES if name != "index.html")]
TYPES = {"/": "text/html", "html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def ask(service, path, method="GET", **headers):
    """The answer and its body; the path goes out as it stands."""
    connection = http.client.HTTPConnection(urlsplit(service.url).netloc, timeout=20)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def test_every_file_is_served_and_nothing_else(service):
    assert {route.path for route in page_routes()} == set(PATHS)
    assert len(SCRIPTS) > 10
    for path in PATHS:
        answer, body = ask(service, path)
        assert (answer.status, body.decode()) == (200, FILES[path.rpartition("/")[2] or "index.html"])
        assert answer.headers["content-type"].startswith(TYPES[path.rpartition(".")[2]])


def test_headers_keep_the_page_to_itself(service):
    for path in PATHS:
        headers = ask(service, path)[0].headers
        policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
        assert policy.pop("default-src") == policy.pop("base-uri") == policy.pop("form-action") == "'none'"
        assert policy.pop("frame-ancestors") == policy.pop("trusted-types") == "'none'"
        assert policy.pop("require-trusted-types-for") == "'script'"
        assert set(policy) == {"script-src", "style-src", "img-src", "connect-src"}
        assert set(policy.values()) == {"'self'"}
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-cache"


def test_an_unchanged_file_is_not_sent_again(service):
    etag = ask(service, "/page/main.js")[0].headers["etag"]
    for given in (etag, f'"other", W/{etag}'):
        answer, body = ask(service, "/page/main.js", **{"If-None-Match": given})
        assert (answer.status, body, answer.headers["etag"]) == (304, b"", etag)
    assert ask(service, "/page/chat.js", **{"If-None-Match": etag})[0].status == 200


def test_head_is_get_without_a_body(service):
    for path in ("/", "/page/main.js"):
        answer, body = ask(service, path, "HEAD")
        assert (answer.status, body) == (200, b"")
        assert answer.headers["content-length"] == ask(service, path)[0].headers["content-length"]
    assert ask(service, "/", "POST")[0].status == 405


@rows(
    "path",
    "/page/",
    "/page",
    "/page/index.html",
    "/page/__init__.py",
    "/page/../page/main.js",
    "/page/%2e%2e/routes/page.py",
    "/page/..%2f..%2fpyproject.toml",
    "/page//etc/passwd",
    "/page/main.js/",
    "/page/main.js%00",
)
def test_no_other_path_leads_to_a_file(path, service):
    assert ask(service, path)[0].status == 404


def test_no_page(tokenizer):
    with serve(FakeEngine(), tokenizer, page=False) as service:
        assert {ask(service, path)[0].status for path in PATHS} == {404}
        assert ask(service, "/health")[0].status == 200


@pytest.mark.parametrize("settings", [{"api_key": "one", "admin_key": "root"}, {"api_key": "one", "page": False}])
def test_keys_hide_all_but_the_page(settings, tokenizer):
    with serve(FakeEngine(), tokenizer, **settings) as service:
        opened = {path for path in paths_of(service) if ask(service, path)[0].status not in (401, 403)}
        assert opened == {"/health", "/health/live", "/health/ready"} | (
            set(PATHS) if "admin_key" in settings else set()
        )
        assert ask(service, "/page/nothing.js")[0].status == 401


def test_no_file_names_another_place():
    for name, text in FILES.items():
        own = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert re.findall(r"https?:|[\"'(]//\w", own) == [], name


def test_model_text_can_only_become_text():
    markup = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|eval\(|Function\("
    )
    stored = r"localStorage|sessionStorage|indexedDB|document\.cookie"
    for name, text in SCRIPTS.items():
        assert re.findall(f"{markup}|{stored}", text) == [], name


def test_every_call_of_the_page_has_a_route(service):
    calls = re.search(r"export const PATHS = {(.*?)};", FILES["api.js"], re.DOTALL)
    paths = re.findall(r'"(.*?)"', calls[1])
    assert len(paths) >= 3
    routes = {path for path in paths_of(service)}
    assert {f"/{path}" for path in paths} <= routes
    others = "".join(text for name, text in SCRIPTS.items() if name != "api.js")
    assert re.findall(r"fetch\(|XMLHttpRequest|WebSocket|EventSource|sendBeacon", others) == []


class Document(HTMLParser):
    """Ids and addresses of the page, and what a strict policy would not run."""

    def __init__(self):
        super().__init__()
        self.ids, self.addresses, self.inline = [], [], []
        self.feed(FILES["index.html"])

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids += filter(None, [given.get("id")])
        self.addresses += [given[name] for name in ("src", "href") if name in given and not given[name].startswith("#")]
        self.inline += [name for name in given if name == "style" or name.startswith("on")]
        self.inline += [tag] * (tag == "style" or (tag == "script" and "src" not in given))


def test_files_fit_together():
    document = Document()
    assert len(set(document.ids)) == len(document.ids)
    assert document.inline == []
    assert {f"/{address}" for address in document.addresses} <= set(PATHS)
    used = {found for text in SCRIPTS.values() for found in re.findall(r'byId\("([\w-]+)"\)', text)}
    assert used <= set(document.ids)
    imported = {found for text in SCRIPTS.values() for found in re.findall(r'from "\./(.*?)"', text)}
    assert imported == set(SCRIPTS) - {"main.js"}, "a script that nothing imports, or that is missing"


def test_a_file_fits_one_review():
    for name, text in FILES.items():
        lines = text.splitlines()
        assert len(lines) <= 400, name
        assert max(map(len, lines)) <= 140, name
        assert name.endswith((".html", ".svg")) or lines[0].startswith(("//", "/*")), f"{name} says what it does"


def test_routes_are_exact():
    for route in page_routes():
        assert isinstance(route, Route)
        assert "{" not in route.path
