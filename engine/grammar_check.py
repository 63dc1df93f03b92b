"""Tries grammars in a process of its own, which can be killed: a few bytes of regex may take hours or all memory.

The engine's process compiles a grammar itself, in a thread, after this one has shown that it can be done in time. (To
hand the compiled grammar over would take longer than to compile it twice: xgrammar serializes megabytes of JSON.) The
process also reads tokenizer.json, which would hold up the engine's threads.
"""

import contextlib
import json
import logging
import os
import pickle
import random
import resource
import select
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from engine.errors import CompilerFailure, GrammarError, GrammarTooSlow
from engine.grammar_fault import find_fault
from engine.process import module_command

if TYPE_CHECKING:
    import xgrammar

_START_S = 60.0  # to import xgrammar and to read a vocabulary
_MAX_BYTES = 4 << 30  # of address space that grammars may take
_OK = b""
_SLOW = b"\0"
"""Begins the answer about a grammar that a machine less busy may not find too slow."""
_FAILED = b"\1"
"""Begins the answer if the check itself failed; a traceback follows."""
_TOO_COMPLEX = "it is too complex to be compiled; make it simpler"
_CONTROL = b"\xff"  # no character begins with it
_WALK_TOKENS = 50
_NUM_WALKS = 4
MAX_TOKEN_S = 0.003
"""CPU time that a grammar's work for one token may take on average in a trial."""

logger = logging.getLogger(__name__)


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that grammars are compiled for.

    `source` is the folder of a tokenizer.json, or the bytes of every token; control tokens have the ids `control_ids`
    then. `size` is the model's vocabulary, which may be padded beyond the tokenizer's.
    """

    source: Path | list[bytes]
    size: int
    eos_ids: frozenset[int]
    control_ids: frozenset[int] = frozenset()
    num_threads: int = 1


class GrammarChecker:
    """The process, from the parent's side. Belongs to one thread. It starts when it is needed."""

    def __init__(self, vocabulary: Vocabulary, timeout_s: float) -> None:
        """`timeout_s` is for one grammar."""
        self._vocabulary = vocabulary
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._tokenizer_info: str | None = None  # the first thing that the process says

    def start(self) -> None:
        """Start the process unless it runs; does not wait for it."""
        if self._process is not None:
            return
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(module_command(__name__), stdin=theirs.fileno(), start_new_session=True)
        theirs.close()

    def read_tokenizer_info(self) -> str:
        """xgrammar's `TokenizerInfo`, serialized. Raises CompilerFailure if the process does not start."""
        self.start()
        if self._tokenizer_info is None:
            try:
                self._tokenizer_info = self._ask(pickle.dumps(self._vocabulary), _START_S).decode()
            except (OSError, EOFError) as error:
                self.close()
                logger.error("the process that checks grammars did not start: %r", error)
                raise CompilerFailure from error
        return self._tokenizer_info

    def check(self, format_json: str) -> None:
        """Raise GrammarError if the format cannot be compiled within the limits of time and memory.

        Raises CompilerFailure if we failed to find that out.
        """
        self.read_tokenizer_info()
        try:
            reason = self._ask(format_json.encode(), self._timeout_s)
        except TimeoutError as error:
            self.close()
            raise GrammarTooSlow(f"compiling it takes longer than {self._timeout_s:g} s; make it simpler") from error
        except (OSError, EOFError) as error:
            self.close()
            raise GrammarTooSlow(_TOO_COMPLEX) from error
        if reason.startswith(_FAILED):
            logger.error("checking a grammar failed: %s", reason.removeprefix(_FAILED).decode())
            raise CompilerFailure
        if reason.startswith(_SLOW):
            raise GrammarTooSlow(reason.removeprefix(_SLOW).decode())
        if reason != _OK:
            raise GrammarError(reason.decode())

    def close(self) -> None:
        """End the process."""
        if self._connection is not None and self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.wait()
        self._process = self._connection = self._tokenizer_info = None

    def _ask(self, data: bytes, timeout_s: float) -> bytes:
        """Send a message and return the answer. Raises TimeoutError; OSError or EOFError if the process ends."""
        if self._connection is None or self._process is None:
            raise RuntimeError("the process that checks grammars is not started")
        deadline_s = time.monotonic() + timeout_s
        killer = threading.Timer(timeout_s, self._process.kill)  # a stopped process would block `send_bytes` for ever
        killer.start()
        try:
            self._connection.send_bytes(data)
            return self._connection.recv_bytes()
        except (OSError, EOFError) as error:
            if time.monotonic() >= deadline_s:
                raise TimeoutError from error
            raise
        finally:
            killer.cancel()


def token_bytes(vocabulary: Vocabulary) -> list[bytes]:
    """What each token of the model stands for in a grammar.

    Text never matches a control token, because no character begins with the byte 0xFF.
    """
    control_ids = vocabulary.control_ids
    if isinstance(vocabulary.source, Path):
        from loaders.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(vocabulary.source)
        control_ids = frozenset(tokenizer.special_tokens.values())
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocabulary.size)]
    else:
        tokens = vocabulary.source
    control_ids |= vocabulary.eos_ids
    return [_CONTROL + b"%d" % index if index in control_ids else token for index, token in enumerate(tokens)]


def _limit_memory() -> None:
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = num_pages * resource.getpagesize() + _MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _exit_with_parent(descriptor: int) -> None:
    """Thread body: a compilation that never ends must not outlive the engine."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def _try_out(
    compiler: "xgrammar.GrammarCompiler", format_json: str, vocabulary: Vocabulary, control_ids: np.ndarray
) -> None:
    """Raise GrammarError, which says where in a schema, if the format cannot be compiled or is slow to follow."""
    import xgrammar

    from engine.grammar_compiler import compile_format, reason_of

    def refusal_of(schema: dict[str, Any]) -> str | None:
        try:
            xgrammar.Grammar.from_json_schema(json.dumps(schema))
        except (RuntimeError, ValueError) as error:
            return reason_of(error)
        return None

    try:
        compiled = compile_format(compiler, format_json)
    except GrammarError as error:
        path = None
        with contextlib.suppress(ValueError, RecursionError):  # what is no JSON has no path
            path = find_fault(format_json, refusal_of)
        if path is None:
            raise
        raise GrammarError(f"{error} (at {path} of the schema)") from error
    follow(compiled, vocabulary, control_ids)


def follow(
    compiled: "xgrammar.CompiledGrammar",
    vocabulary: Vocabulary,
    control_ids: np.ndarray,
    clock: Callable[[], float] = time.thread_time,
) -> None:
    """Follow a random answer. Raises GrammarError if that is slow or leads nowhere: the step loop would do the same.

    A busy machine makes CPU time longer, too: other processes take the caches and half of the core. That comes and
    goes, so the same answer is followed up to `_NUM_WALKS` times, and one that is quick enough suffices. A walk ends
    as soon as its time is over. `clock` returns this thread's CPU time.
    """
    if not any(_walk(compiled, vocabulary, control_ids, clock) for _ in range(_NUM_WALKS)):
        raise GrammarTooSlow(f"following it takes longer than {1000 * MAX_TOKEN_S:g} ms a token; make it simpler")


def _walk(
    compiled: "xgrammar.CompiledGrammar", vocabulary: Vocabulary, control_ids: np.ndarray, clock: Callable[[], float]
) -> bool:
    """Follow the answer once, always the same one. False if that is too slow.

    Half of the time a control token is taken where one may come: it ends free reasoning, and behind that the grammar's
    own part begins.
    """
    import xgrammar

    matcher, rng = xgrammar.GrammarMatcher(compiled), random.Random(0)
    words_1N = np.empty((1, -(-vocabulary.size // 32)), dtype=np.int32)
    eos_ids = sorted(vocabulary.eos_ids)
    until_s = clock() + _WALK_TOKENS * MAX_TOKEN_S
    for _ in range(_WALK_TOKENS):
        matcher.fill_next_token_bitmask(words_1N)
        allowed = np.unpackbits(words_1N.view(np.uint8), count=vocabulary.size, bitorder="little")
        if not allowed.any() and not matcher.is_completed():
            raise GrammarError("it has a rule that can never end, so no answer satisfies it")
        allowed[eos_ids] = 0
        choices = np.flatnonzero(allowed)
        controls = control_ids[allowed[control_ids] > 0]
        if len(controls) and rng.random() < 0.5:
            choices = controls
        is_over = not len(choices) or not matcher.accept_token(int(rng.choice(choices)))
        if clock() > until_s:
            return False
        if is_over:
            break
    return True


def main() -> None:
    """Body of the process. Standard input is a socket: a vocabulary comes first, then formats; each gets an answer."""
    import xgrammar

    from engine.grammar_compiler import new_compiler

    connection = Connection(sys.stdin.fileno())
    threading.Thread(target=_exit_with_parent, args=(sys.stdin.fileno(),), daemon=True).start()
    vocabulary: Vocabulary = connection.recv()
    tokens = token_bytes(vocabulary)
    control_ids = np.flatnonzero([token.startswith(_CONTROL) for token in tokens])
    info = xgrammar.TokenizerInfo(
        tokens, xgrammar.VocabType.RAW, vocab_size=vocabulary.size,
        stop_token_ids=sorted(vocabulary.eos_ids),
    )  # fmt: skip
    connection.send_bytes(info.serialize_json().encode())
    compiler = new_compiler(info, vocabulary.num_threads)
    _limit_memory()
    while True:
        try:
            format_json = connection.recv_bytes().decode()
        except EOFError:
            return
        try:
            _try_out(compiler, format_json, vocabulary, control_ids)
        except GrammarError as error:
            connection.send_bytes((_SLOW if isinstance(error, GrammarTooSlow) else b"") + str(error).encode())
        except (MemoryError, RecursionError):
            connection.send_bytes(_SLOW + _TOO_COMPLEX.encode())
        except Exception:
            connection.send_bytes(_FAILED + traceback.format_exc().encode())
        else:
            connection.send_bytes(_OK)


if __name__ == "__main__":
    main()
