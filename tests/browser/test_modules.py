"""Scripts of the page that no click reaches in every case: streams cut anywhere, tokens that share a character, text
that looks like formatting, and tokens without text."""

import re

import pytest

from tests.tables import rows

pytestmark = pytest.mark.browser


@pytest.fixture
def page(service, open_page):
    """One for all rows of a table."""
    return open_page(service.url)


@rows(
    "stream, events",
    ("data: a\n\ndata: b\n\n", ["a", "b"]),
    ("data: a\r\n\r\ndata:b\r\n\r\n", ["a", "b"]),
    ("data: one\ndata: two\n\n", ["one\ntwo"]),
    (": comment\nevent: x\nid: 3\ndata: 日本 😀\n\n", ["日本 😀"]),
    ("data: unfinished", []),
)
def test_events_wherever_the_stream_is_cut(stream, events, page):
    script = """async ([stream, size]) => {
        const { eventsOf } = await import("./page/sse.js");
        const bytes = new TextEncoder().encode(stream), found = [];
        const body = new ReadableStream({ start(control) {
            for (let at = 0; at < bytes.length; at += size) control.enqueue(bytes.slice(at, at + size));
            control.close();
        } });
        for await (const event of eventsOf(body)) found.push(event);
        return found;
    }"""
    for size in (1, 2, 3, 7, 1000):
        assert page.evaluate(script, [stream, size]) == events, size


@rows(
    "pushes, pieces",
    ([["ab c", ["ab", " c"]]], [["ab", 0], [" c", 1]]),
    ([["a", ["ab"]], ["b c", [" c"]]], [["ab", 0], [" c", 1]]),  # text is held back until its token is complete
    ([["", ["ab"]], ["ab", []]], [["ab", 0]]),
    ([["é!", [[195], [169], "!"]]], [["é", 0], ["!", 1]]),  # two tokens are one character
    ([["xy", ["z"]], ["ab", ["ab"]]], [["xy", None], ["ab", 1]]),  # the service changed the text
    ([["plain", []]], [["plain", None]]),
)
def test_each_part_of_the_text_has_its_token(pushes, pieces, page):
    script = """async (pushes) => {
        const { TokenAligner } = await import("./page/tokens.js");
        const aligner = new TokenAligner(), bytes = (token) => [...new TextEncoder().encode(token)];
        const entry = (token) => Array.isArray(token) ? { token: "", bytes: token, logprob: 0 }
            : { token, bytes: bytes(token), logprob: 0 };
        const pieces = pushes.flatMap(([text, tokens]) => aligner.push(text, tokens.map(entry)));
        return [...pieces, ...aligner.end()].map(({ text, token }) => [text, token]);
    }"""
    assert page.evaluate(script, pushes) == pieces


DRAW = """async ([text, size]) => {
    const { TextView } = await import("./page/text_view.js");
    const root = document.createElement("div"), view = new TextView(root);
    for (let at = 0; at < text.length; at += size) {
        view.append([{ text: text.slice(at, at + size), token: null }]);
        view.draw();
    }
    view.end();
    const inside = (line) => [...line.childNodes].map((node) => {
        const tag = node.nodeName.toLowerCase();
        return node.nodeType === Node.TEXT_NODE ? node.data : `<${tag}>${node.textContent}</${tag}>`;
    }).join("");
    const lines = (block) => [...block.querySelectorAll(".line")].map((line) => line.textContent);
    return [...root.children].map((each) => each.className === "code-block"
        ? ["block", each.querySelector(".code-head span").textContent, lines(each)] : inside(each));
}"""

FENCED = ["block", "py", ["x = 1"]]


@rows(
    "text, drawn",
    ("```py\nx = 1\n```\nend", [FENCED, "end"]),
    ("```py\nx = 1\n```", [FENCED]),
    ("```py\nx = 1", [FENCED]),
    ("```py\nx = 1\n```\n", [FENCED]),
    ("a\n```py", ["a", ["block", "py", []]]),
    ("```print('hi')```", ["<code>print('hi')</code>"]),
    ('Here:\n```json {"a": 1}```\nend', ["Here:", '<code>json {"a": 1}</code>', "end"]),
    ("````md\n```py\nx = 1\n```\n````\nend", [["block", "md", ["```py", "x = 1", "```"]], "end"]),
    ("```\n```py\n`````\nend", [["block", "code", ["```py"]], "end"]),
    (
        "```" + "word " * 30 + "\nx = 1\n```\n**end**",
        [["block", ("word " * 30).strip(), ["x = 1"]], "<strong>end</strong>"],
    ),
    ("```" + "word " * 300 + "\nx = 1\n```\nend", [["block", ("word " * 300).strip(), ["x = 1"]], "end"]),
    ("```" + "word " * 30 + "`x`", ["```" + "word " * 30 + "<code>x</code>"]),
    ("```\nx\n```" + " " * 900 + "\nend", [["block", "code", ["x"]], "end"]),
)
def test_blocks_are_drawn_the_same_however_they_come(text, drawn, page):
    for size in (1, 7, 1000):
        assert page.evaluate(DRAW, [text, size]) == drawn, size


# What stands between angle brackets is bold, between braces italic, between backticks code.
MARKED = {
    "a `b` **c** *d* ***e***": "a `b` <c> {d} <e>",
    "``a ` b`` ```c```": "`a ` b` `c`",
    "**bold**: *em*, **First,** (*see (x)*)": "<bold>: {em}, <First,> ({see (x)})",
    "**A**/**B**, **10**x": "<A>/<B>, <10>x",
    "これは**重要**です、**「引用」**と**100%**の": "これは<重要>です、<「引用」>と<100%>の",
    "使用API**接口**说明，**重点**内容": "使用API<接口>说明，<重点>内容",
    "使用API*接口*说明，*重点*内容": "使用API{接口}说明，{重点}内容",
    "共有3**个重点**，**第一**是**“引号”**吧": "共有3<个重点>，<第一>是<“引号”>吧",
    "在Python**中**，用**列表**和**字典**。": "在Python<中>，用<列表>和<字典>。",
    "Python**3**版，v2**beta**版，**重点**": "Python<3>版，v2<beta>版，<重点>",
    "価格は100**円**で、**税込**です。": "価格は100<円>で、<税込>です。",
    "한국어**(Korean)**는 **중요**합니다": "한국어<(Korean)>는 <중요>합니다",
    "ใช้API**ตัวอย่าง**และ*อีก*นี้": "ใช้API<ตัวอย่าง>และ{อีก}นี้",
    "Type C**（必填）**、**D**": "Type C<（必填）>、<D>",
    "The**(big)**-**bad** x": "The**(big)**-<bad> x",
    "Das**wichtige**x und _**x**_": "Das<wichtige>x und _<x>_",
    "🔥**a**🔥 **🔥 b**": "🔥<a>🔥 <🔥 b>",
    "**`**kwargs`**: extra, *`x*y`*": "`**kwargs`: extra, `x*y`",
    "**a `b** c` d** e": "<a >`b** c`< d> e",
    "**a *b* c**, *d **e** f*": "<a ><b>< c>, {d }<e>{ f}",
    "**2*3 = 6** and **x*y": "<2*3 = 6> and **x*y",
}
PLAIN = """
    2 ** 3 + 4 ** 5 and 2*3*4, 2**3**4
    x**2 + y**2 = z**2, 2**n + 2**m, x**n + y**n
    2*π*r*h and (a + b)*(c + d)*(e + f)
    def f(*args, **kwargs): pass
    f(*a,*b), [*a,*b], {**a,**b}
    int *a, *b; char **c, **d; int *e = f*g;
    (*p) and (*q); x=*p/*q; char *a,*b;
    *.py,*.js and ["*.py","*.js"]
    ~/*.txt and /tmp/*.log, a/*,b/*, a.*, b.*
    src/**/*.py and tests/**/*.py, /usr/*/bin and /opt/*/bin
    COUNT(*) and SUM(*), ["*"] and ["*"], f(*, a) and g(*, b)
    ****a**** and ** b ** and *c** and `d
"""


def test_emphasis_and_other_asterisks(page, subtests):
    kept = {line: line for line in map(str.strip, PLAIN.strip().split("\n"))}
    for text, marked in {**MARKED, **kept}.items():
        for size in (1, 1000):
            with subtests.test(text=text, size=size):
                (drawn,) = page.evaluate(DRAW, [text, size])
                for tag, (start, end) in {"strong": "<>", "em": "{}", "code": "``"}.items():
                    drawn = drawn.replace(f"<{tag}>", start).replace(f"</{tag}>", end)
                assert drawn == marked


def test_a_long_line_keeps_all_its_text(page):
    """Work that grew faster than the line would take minutes here, and the test would be stopped."""
    script = """async (parts) => {
        const { inlineParts } = await import("./page/markdown.js");
        return parts.map((part) => {
            const text = part.repeat(100_000 / part.length);
            const shown = inlineParts(text).map(({ start, end }) => text.slice(start, end)).join("");
            return [shown.replace(/[`*]/g, ""), text.replace(/[`*]/g, "")];
        });
    }"""
    parts = ["`", "*", "*a", " *a", "**a ", "***a", ".*a ", "(**", "`a``", "中**文**", "`a``b```c````d", " *a **b ***c"]
    for shown, text in page.evaluate(script, parts):
        assert shown == text


def chunk(num, text=None, index=0):
    """Of a stream: `num` tokens so far, and the text that comes."""
    choices = [] if text is None else [{"index": index, "delta": {"content": text}, "finish_reason": None}]
    return {"choices": choices, "usage": {"completion_tokens": num}}


@rows(
    "chunks, text, stats",
    ([chunk(1, "a"), chunk(20, "b")], "ab", r"20 tokens  ·  [\d.]+ tokens/s  ·  first token .*"),
    ([chunk(1, "a"), chunk(20)], "a", r"20 tokens  ·  [\d.]+ tokens/s  ·  first token .*"),
    ([chunk(1, "a"), chunk(1)], "a", "1 token  ·  first token .*"),
    ([chunk(1, "```a```")], "a", "1 token  ·  first token .*"),
    ([chunk(0, ""), chunk(3)], "", "3 tokens  ·  first token .*"),
    ([chunk(0, ""), chunk(0)], "", "No tokens"),
    ([chunk(1, "a"), chunk(2, "z", index=1), chunk(3, "b")], "ab", r"3 tokens  ·  [\d.]+ tokens/s  ·  first token .*"),
)
def test_an_answer_counts_tokens_with_and_without_text(chunks, text, stats, page):
    script = """async (chunks) => {
        const { Answer } = await import("./page/answer.js");
        const answer = new Answer({}, () => []);
        for (const chunk of chunks) {
            answer.take(chunk);
            await new Promise((resolve) => setTimeout(resolve, 100));
        }
        answer.finish = "stop";
        answer.end();
        return [answer.text.textContent, answer.stats.textContent];
    }"""
    drawn, shown = page.evaluate(script, chunks)
    assert drawn == text
    assert re.fullmatch(stats, shown), shown
    rates = [float(rate) for rate in re.findall(r"([\d.]+) tokens/s", shown)]
    assert all(rate <= 10 * chunks[-1]["usage"]["completion_tokens"] for rate in rates), "no faster than they came"


def test_numbers_for_people(page):
    script = 'async (numbers) => numbers.map((await import("./page/dom.js")).shown)'
    numbers = {0: "0", 0.123: "0.12", 5: "5", 99.4: "99", 99.7: "100", 1234.5: "1,235", 1.5e-7: "0.00000015"}
    assert page.evaluate(script, list(numbers)) == list(numbers.values())
