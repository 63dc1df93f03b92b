"""Whatever a model writes: no text is lost, no markup is shown, streamed equals whole (G27, G28)."""

import itertools

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.types import EngineOutput
from loaders.tokenizer import load_tokenizer
from server.choice import Choice
from server.parsers import DeepSeekParser, HarmonyParser, Kind
from server.token_texts import TokenTexts
from tests.server.conftest import ASSETS
from tests.server.test_deepseek_parser import MARKERS, PieceTokenizer
from tests.tables import rows

TOKENIZER = load_tokenizer(ASSETS)
TOOLS = frozenset({"f", "get_weather"})
HARMONY_MARKERS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"]
HEADER_WORDS = ["assistant", "analysis", "commentary", "final", " to=functions.f", " to=functions.g", " to=f", " json"]


FOREIGN = ("<｜User｜>", "<｜tool▁output", "<｜end▁of▁sentence｜>")  # what follows these is not shown
DEEPSEEK_MARKERS = [name for name in MARKERS if not name.startswith(FOREIGN)]


def answer_of(parser, ids, cuts=()):
    """Reasoning, content and calls as a client gets them, from outputs cut at these places."""
    return counted_answer_of(parser, ids, cuts)[:3]


def counted_answer_of(parser, ids, cuts, tokenizer=None):
    """The same, with the numbers of all tokens and of reasoning tokens; a tokenizer takes the short cut for text."""
    choice = Choice(parser, keeps_tokens=tokenizer is None)
    token_texts = None if tokenizer is None else TokenTexts(tokenizer)
    texts, calls = {Kind.REASONING: "", Kind.CONTENT: ""}, []
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    for number, (start, end) in enumerate(itertools.pairwise(edges)):
        reason = "stop" if number == len(edges) - 2 else None
        output = EngineOutput(request_id="r", token_ids=ids[start:end], finish_reason=reason)
        kind = choice.text_kind
        is_one = end - start == 1 and reason is None and token_texts is not None
        if is_one and kind is not None and (text := token_texts[ids[start]]):
            choice.begin_text(kind)
            choice.token_ids.append(ids[start])
            texts[kind] += orjson.loads(b'"%b"' % text)
            continue
        for piece in choice.push(output):
            if piece.kind is not Kind.TOOL_CALL:
                texts[piece.kind] += piece.text
            elif piece.name is not None:
                calls.append([piece.name, ""])
            else:
                calls[piece.call][1] += piece.text
    return texts[Kind.REASONING], texts[Kind.CONTENT], calls, choice.num_tokens, choice.num_reasoning_tokens


ADDED = {b"\n", b" ", b"{}"}


def check_sources(parser, ids, tokenizer):
    """Content comes from the tokens it names, in their order. Returns the pieces of content that name none."""
    events = [event for token_id in ids for event in parser.feed(token_id)] + parser.finish()
    content = [event for event in events if event.kind is Kind.CONTENT]
    positions = [event.position for event in content if event.position >= 0]
    assert positions == sorted(positions)
    assert all(event.data in tokenizer.token_bytes(ids[event.position]) for event in content if event.position >= 0)
    return {event.data for event in content if event.position < 0}


def check_positions(parser, ids, tokenizer, added=ADDED):
    """The same, and only what parsers add names no token."""
    assert check_sources(parser, ids, tokenizer) <= added


def check(make_parser, ids, cuts, texts, markers, tokenizer=TOKENIZER):
    """The three properties. Each text is two words, because a single word in a header may be a channel's name."""
    whole = answer_of(make_parser(), ids)
    counted = counted_answer_of(make_parser(), ids, cuts)
    assert counted[:3] == whole
    assert counted_answer_of(make_parser(), ids, range(1, len(ids)), tokenizer) == counted
    shown = str(whole)
    assert [text for text in texts if text not in shown] == []
    assert [name for name in markers if name in shown] == []
    return shown


def sequences(*others):
    """Lists of markers and words, with numbered texts between."""
    return st.lists(st.one_of(st.none(), st.sampled_from(others)), max_size=20)


def numbered(parts):
    """The parts with a text in place of None, and the texts."""
    texts = [f"word{number}a word{number}b." for number in range(len(parts))]
    filled = [f" {text}" if part is None else part for part, text in zip(parts, texts, strict=True)]
    return filled, [text for part, text in zip(parts, texts, strict=True) if part is None]


@settings(max_examples=250, deadline=None)
@given(sequences(*HARMONY_MARKERS, *HEADER_WORDS), st.lists(st.integers(0, 60), max_size=5))
def test_harmony_text_is_never_lost_g27(parts, cuts):
    filled, texts = numbered(parts)
    ids = TOKENIZER.encode("".join(filled))
    for prompt in ([], TOKENIZER.encode("<|start|>assistant")):
        check(lambda prompt=prompt: HarmonyParser(TOKENIZER, prompt, TOOLS), ids, cuts, texts, TOKENIZER.special_tokens)
        check_sources(HarmonyParser(TOKENIZER, prompt, TOOLS), ids, TOKENIZER)


@st.composite
def harmony_messages(draw):
    """Messages with header words in headers only, with markers missing here and there."""
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.sampled_from(["<|start|>assistant", "<|start|>", ""]))
        marker = draw(st.sampled_from(["<|channel|>", ""])) if start else "<|channel|>"
        message = draw(st.sampled_from(["<|message|>", ""]))
        channels = ["analysis", "commentary", "final", *(["answer"] if message and marker else [])]
        recipient = draw(st.sampled_from(["", " to=functions.f", " to=user"]))
        constrain = draw(st.sampled_from(["", "<|constrain|>json"]))
        header = f"{start}{marker}{draw(st.sampled_from(channels))}{recipient}{constrain}{message}"
        parts += [header, None, draw(st.sampled_from(["<|end|>", ""]))]
    return parts


@settings(max_examples=150, deadline=None)
@given(harmony_messages(), st.lists(st.integers(0, 60), max_size=5), st.sampled_from(["<|return|>", "<|call|>", ""]))
def test_harmony_headers_are_never_shown_g27(parts, cuts, ending):
    filled, texts = numbered(parts)
    ids = TOKENIZER.encode("".join(filled) + ending)
    words = ["assistant", "analysis", "commentary", "final", "answer", "to=", "json"]
    check(lambda: HarmonyParser(TOKENIZER, [], TOOLS), ids, cuts, texts, [*TOKENIZER.special_tokens, *words])


@settings(max_examples=150, deadline=None)
@given(
    sequences(*DEEPSEEK_MARKERS, "function", "f", "\n", "{", "```json\n"),
    st.lists(st.integers(0, 60), max_size=5),
    st.sampled_from(["<｜Assistant｜>", "<｜Assistant｜><think>\n"]),
)
def test_deepseek_text_is_never_lost_g28(parts, cuts, prompt):
    filled, texts = numbered(parts)
    tokenizer = PieceTokenizer()
    ids, prompt_ids = tokenizer.cut("".join(filled)), tokenizer.cut(prompt)
    check(lambda: DeepSeekParser(tokenizer, prompt_ids, TOOLS), ids, cuts, texts, MARKERS, tokenizer)
    check_positions(DeepSeekParser(tokenizer, prompt_ids, TOOLS), ids, tokenizer)


V3_CALL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


@rows(
    "text, content",
    ('Hi.<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>', 'Hi.\nadd {"a": 1}'),
    ("<｜tool▁call▁begin｜> add <｜tool▁sep｜><｜tool▁call▁end｜>", "add {}"),
    ("<｜tool▁call▁begin｜> add it <｜tool▁call▁end｜>", "add it"),
    (V3_CALL.format('add\n```json\n{"a": 1}\n```'), 'add {"a": 1}'),
    (V3_CALL.format("add it"), "add it"),
)
def test_every_token_of_an_undeclared_call_of_deepseek_is_told_apart(text, content):
    """Without their positions, tokens of the content had no log-probabilities."""
    tokenizer = PieceTokenizer()
    ids = tokenizer.cut(text)
    assert answer_of(DeepSeekParser(tokenizer, (), TOOLS), ids) == ("", content, [])
    check_positions(DeepSeekParser(tokenizer, (), TOOLS), ids, tokenizer)


@rows(
    "prompt, header",
    ("<|start|>assistant", "<|channel|>commentary to=functions.add"),
    ("<|start|>assistant", "<|channel|>analysis to=add"),
    ("<|start|>assistant", " to=functions.add<|channel|>commentary"),
    ("<|start|>assistant to=functions.a", "dd<|channel|>commentary"),
)
def test_every_token_of_an_undeclared_call_of_harmony_is_told_apart(prompt, header):
    ids, prompt_ids = TOKENIZER.encode(header + '<|message|>{"a": 1}<|call|>'), TOKENIZER.encode(prompt)
    assert answer_of(HarmonyParser(TOKENIZER, prompt_ids, TOOLS), ids) == ("", 'add {"a": 1}', [])
    added = ADDED | ({b"a"} if prompt.endswith(".a") else set())  # what stands in the prompt was not generated
    check_positions(HarmonyParser(TOKENIZER, prompt_ids, TOOLS), ids, TOKENIZER, added)


@rows("made_up", "user", "tool", "system", "developer", "functions.f to=assistant")
def test_words_of_other_roles_are_not_the_answer_g27(made_up):
    """Reports of the second list, section G: an invented tool result must not become content or reasoning."""
    call = '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|end|>'
    foreign = f"<|start|>{made_up}<|channel|>commentary<|message|>invented words<|end|>"
    final = "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    ids = TOKENIZER.encode(call + foreign + final)
    assert answer_of(HarmonyParser(TOKENIZER, [], TOOLS), ids) == ("", "Done.", [["f", '{"a": 1}']])
    without_message = TOKENIZER.encode(call + foreign.replace("<|message|>", " ") + final)
    assert answer_of(HarmonyParser(TOKENIZER, [], TOOLS), without_message) == ("", "Done.", [["f", '{"a": 1}']])
