"""A whole answer says what the streamed one says: a client that joins the chunks of a stream gets the same."""

import orjson

from engine.types import EngineOutput, TokenLogprobs
from server.choice import Choice
from server.parsers import choose_parser
from server.renderers import Event
from tests.server.test_answer import TRANSCRIPTS, chat_renderer, completion_renderer, outputs_of
from tests.server.test_deepseek_parser import PieceTokenizer
from tests.tables import rows


def with_logprobs(output):
    logprobs = [TokenLogprobs(token_id, -token_id / 1000, [(7, -0.5)]) for token_id in output.token_ids]
    prompt = [None, TokenLogprobs(9, -1.0, [])]
    return type(output)(
        request_id="r",
        token_ids=output.token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt,
        finish_reason=output.finish_reason,
    )


def without_ids(answer):
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            del call["id"]
    return answer | {"created": 0}


@rows(
    "make, fields",
    (chat_renderer, {}),
    (chat_renderer, {"logprobs": True}),
    (chat_renderer, {"stop": ["quot", "aris"]}),
    (chat_renderer, {"parallel_tool_calls": False}),
    (completion_renderer, {}),
    (completion_renderer, {"echo": True}),
    (completion_renderer, {"echo": True, "logprobs": 2, "prompt": [300, 301]}),
)
@rows("transcript", *TRANSCRIPTS)
def test_a_streamed_answer_says_what_the_whole_one_says(make, fields, transcript):
    whole = make(2, **fields)
    for index, output in outputs_of(whole, transcript):
        whole.take(index, with_logprobs(output))
    streamed = make(2, stream=True, stream_options={"include_usage": True}, **fields)
    data = b"".join(streamed.stream(index, with_logprobs(output)) for index, output in outputs_of(streamed, transcript))
    events = [Event(orjson.loads(event.removeprefix(b"data: "))) for event in data.split(b"\n\n")[:-1]]
    assert len(events) > 4
    body = whole.body()
    assert body["usage"]["completion_tokens"] > 0
    assert without_ids(streamed.fold([*streamed.begin(), *events, *streamed.end()])) == without_ids(body)


def test_an_error_before_the_first_event_has_its_own_status(service, tokenizer):
    """The first token is a part of a character, so nothing has been sent when the engine fails."""
    half = tokenizer.encode("😀")[0]
    service.engine.script = lambda _request: [half, half]
    service.engine.last = lambda _request, _num_tokens: {"finish_reason": "error", "error": "broken"}
    with service.http() as http:
        answer = http.post("/v1/completions", json={"prompt": "a", "stream": True})
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "broken")


def test_no_piece_of_a_call_comes_after_the_next_call_has_opened():
    """The first call's arguments end within a character, which becomes visible only when nothing follows it."""
    tokenizer = PieceTokenizer()
    call = "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{"
    ids = [*tokenizer.cut(call), *tokenizer.cut("😀")[:2], *tokenizer.cut(f"<｜tool▁call▁end｜>{call}}}")]
    choice = Choice(choose_parser(tokenizer)([], frozenset({"get_time"})))
    pieces = choice.push(EngineOutput(request_id="r", token_ids=ids, finish_reason="stop"))
    assert [(piece.call, piece.name, piece.text) for piece in pieces] == [
        (0, "get_time", ""),
        (0, None, "{\ufffd"),
        (1, "get_time", ""),
        (1, None, "{}"),
    ]
