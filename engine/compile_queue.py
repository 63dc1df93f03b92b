"""`CompileQueue`: requests whose grammars are being compiled. They hold no page, no row and no turn meanwhile."""

from concurrent.futures import FIRST_COMPLETED, wait

import msgspec

from engine.errors import CompilerFailure, RequestError
from engine.grammar_compiler import Compiled, GrammarCompiler
from engine.grammar_spec import GrammarSpec
from engine.sequence import Sequence

_WAIT_S = 0.005


class _Entry(msgspec.Struct, frozen=True):
    seq: Sequence
    spec: GrammarSpec
    compiled: Compiled


class CompileQueue:
    """Requests between their arrival and the scheduler, oldest first. Belongs to the step loop."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def add(self, seq: Sequence, spec: GrammarSpec) -> None:
        """Begin to compile the grammar of a request, unless it is known."""
        self._entries[seq.request_id] = _Entry(seq, spec, self._compiler.compile(spec.format_json))

    def remove(self, request_id: str) -> Sequence | None:
        """Forget a request; None if it is not here. Its grammar is compiled all the same."""
        entry = self._entries.pop(request_id, None)
        return None if entry is None else entry.seq

    def take(self) -> tuple[list[Sequence], list[tuple[Sequence, RequestError | CompilerFailure]]]:
        """Requests that can be scheduled now, each with its matcher, and those that are over, each with its error."""
        ready: list[Sequence] = []
        refused: list[tuple[Sequence, RequestError | CompilerFailure]] = []
        for entry in [entry for entry in self._entries.values() if entry.compiled.done()]:
            seq = entry.seq
            del self._entries[seq.request_id]
            error = entry.compiled.exception()
            if error is None:
                seq.grammar = self._compiler.make_matcher(entry.compiled.result(), entry.spec.param)
                ready.append(seq)
            elif isinstance(error, CompilerFailure):
                refused.append((seq, error))
            else:
                refused.append((seq, RequestError(entry.spec.param, f"{entry.spec.param} cannot be used: {error}")))
        return ready, refused

    def wait(self) -> None:
        """Let a few milliseconds pass, or less if a grammar is ready before. For a loop that has nothing else to do."""
        wait([entry.compiled for entry in self._entries.values()], _WAIT_S, FIRST_COMPLETED)
