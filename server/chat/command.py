"""`moe-serve chat`: reads questions, writes answers as they come, reasoning dimmed. Ctrl-C stops an answer."""

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from server import streams
from server.errors import SettingError
from server.settings import Parser

if TYPE_CHECKING:
    from server.chat.conversation import Conversation

_DESCRIPTION = (
    "Talk to a running OpenAI-compatible server. Ctrl-C stops an answer, Ctrl-D leaves; /help lists the commands. "
    "Without a terminal, every line of the standard input is a question."
)
_HELP = """\
/reset          forget the conversation
/system TEXT    set the system prompt and forget the conversation; without TEXT there is none
/help           this list
/quit           leave, as does Ctrl-D
"""
_DIM, _PLAIN = "\033[2m", "\033[0m"
_PROMPT = "> "
FAILED = 1


def make_parser(program: str) -> Parser:
    """The flags of `moe-serve chat`."""
    parser = Parser(prog=f"{program} chat", description=_DESCRIPTION, allow_abbrev=False)
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="address of the server, with or without /v1 [%(default)s]")
    add("--model", help="model to ask for [the first one that the server lists]")
    add("--api-key", help="key of the server [the variable OPENAI_API_KEY]")
    add("--system", help="system prompt [none]")
    add("--temperature", type=float, help="0 always takes the likeliest token [the server's]")
    add("--max-tokens", type=int, help="tokens of an answer, reasoning included [the rest of the context]")
    add("--reasoning-effort", help="low, medium or high, if the model's template reads it [the template's]")
    return parser


def chat(argv: Sequence[str], program: str, environ: Mapping[str, str]) -> int:
    """Talk until the input ends; returns the exit status: 1 without a server, or if a script's question got no answer.

    Raises:
        SettingError: a wrong flag.
    """
    flags = make_parser(program).parse_args(argv)
    from server.chat.conversation import ChatError, Conversation, served_models  # imports an HTTP client

    signal.signal(signal.SIGINT, _ignore)  # else Ctrl-C would end the program, as it ends a start
    base_url = flags.base_url.rstrip("/")
    if not base_url.startswith(("http://", "https://")):
        raise SettingError(f"--base-url: {flags.base_url!r} must begin with http:// or https://")
    base_url = base_url if base_url.endswith("/v1") else f"{base_url}/v1"
    api_key = flags.api_key or environ.get("OPENAI_API_KEY") or None
    try:
        served = served_models(base_url, api_key)
    except ChatError as error:
        streams.write(sys.stderr, f"{program}: {error}\n")
        return FAILED
    if not served and flags.model is None:
        raise SettingError(f"{base_url} lists no model: name one by --model")
    names = ("temperature", "max_tokens", "reasoning_effort")
    conversation = Conversation(
        base_url=base_url,
        model=flags.model or served[0],
        api_key=api_key,
        system=flags.system,
        fields={name: value for name in names if (value := getattr(flags, name)) is not None},
    )
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    shows_style = sys.stdout.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
    screen = Screen(streams.say, shows_style=shows_style)
    if is_terminal:
        screen.note(f"{conversation.model} at {base_url}; /help lists commands, Ctrl-D leaves\n")
    num_failed = 0
    for line in _lines(sys.stdin, screen, is_terminal=is_terminal):
        if line == "/quit":
            break
        if line.startswith("/"):
            _obey(line, conversation, screen)
        elif line:
            num_failed += not _ask(line, conversation, screen, shows_speed=is_terminal)
    return FAILED if num_failed and not is_terminal else 0


class Screen:
    """Writes pieces of answers. Takes from them what a terminal would obey: escape sequences of a model stay text."""

    def __init__(self, write: Callable[[str], None], *, shows_style: bool) -> None:
        self._write = write
        self._shows_style = shows_style
        self._kind = "content"

    def show(self, kind: str, text: str) -> None:
        """A piece of reasoning or content. A line's end stands between the two."""
        if kind != self._kind:
            text = "\n\n" + text if kind == "content" else text
            self._kind = kind
        text = printable(text)
        self._write(f"{_DIM}{text}{_PLAIN}" if kind == "reasoning" and self._shows_style else text)

    def note(self, text: str) -> None:
        """What is not the model's."""
        self._write(f"{_DIM}{text}{_PLAIN}" if self._shows_style else text)

    def end(self) -> None:
        """The answer is over."""
        self._kind = "content"
        self._write("\n")


def printable(text: str) -> str:
    """Without control characters, but with line ends and tabs."""
    return "".join(char for char in text if char in "\n\t" or not (ord(char) < 32 or 127 <= ord(char) < 160))


def _lines(stdin: TextIO, screen: Screen, *, is_terminal: bool) -> Iterator[str]:
    """Lines as they are typed, without the blanks around; Ctrl-C empties one, the end of the input ends them."""
    if not is_terminal:
        if isinstance(stdin, TextIOWrapper):
            stdin.reconfigure(errors="surrogateescape")  # a line that is no text fails alone, when it is asked
        yield from (line.strip() for line in stdin)
        return
    import readline  # noqa: F401  gives `input` a history and editing

    while True:
        try:
            with _interruptible():
                line = input(_PROMPT)
        except EOFError:
            screen.end()
            return
        except KeyboardInterrupt:
            screen.note("\nCtrl-D leaves\n")
        else:
            yield line.strip()


def _ignore(_sig: int, _frame: FrameType | None) -> None:
    """Ctrl-C while nothing waits that it could stop."""


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt inside, and nowhere else."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _obey(line: str, conversation: "Conversation", screen: Screen) -> None:
    command, _, rest = line.partition(" ")
    if command in ("/reset", "/system"):
        conversation.turns.clear()
        if command == "/system":
            conversation.system = rest.strip() or None
        prompt = "no system prompt" if conversation.system is None else f"system prompt: {conversation.system}"
        screen.note(f"a new conversation, {prompt}\n")
    elif command == "/help":
        screen.note(_HELP)
    else:
        screen.note(f"there is no command {command}:\n{_HELP}")


def _ask(question: str, conversation: "Conversation", screen: Screen, *, shows_speed: bool) -> bool:
    """Show the answer; returns whether it ended well, or was stopped by the user."""
    from server.chat.conversation import ChatError

    start_s = time.monotonic()
    first_s = None
    pieces = conversation.answer(question)
    try:
        with _interruptible():
            for piece in pieces:
                if piece.kind != "end":
                    first_s = first_s or time.monotonic()
                    screen.show(piece.kind, piece.text)
                    continue
                screen.end()
                if piece.text == "length":
                    screen.note("(cut: the tokens of an answer, or the context, were used up)\n")
                if shows_speed and first_s is not None and piece.num_tokens:
                    screen.note(_speed(piece.num_tokens, start_s, first_s, time.monotonic()))
    except KeyboardInterrupt:
        screen.end()
        screen.note("(stopped)\n")
    except ChatError as error:
        screen.end()
        streams.write(sys.stderr, f"{error}\n")
        return False
    finally:
        pieces.close()  # type: ignore[attr-defined]
    return True


def _speed(num_tokens: int, start_s: float, first_s: float, end_s: float) -> str:
    rate = f", {(num_tokens - 1) / (end_s - first_s):.0f} a second" if num_tokens > 1 and end_s > first_s else ""
    return f"{num_tokens} tokens{rate}, the first after {first_s - start_s:.2f} s\n"
