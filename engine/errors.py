"""Errors of the engine, as a tree.

ValueError
└── EngineError
    ├── EngineConfigError   a setting that is out of range or contradicts another
    ├── GrammarError        a grammar that cannot be compiled; the message ends a sentence about it
    │   └── GrammarTooSlow  it takes too long, or the machine was busy
    ├── MachineError        the machine lacks what the settings need, maybe only for now: a GPU, memory, an address
    ├── OrderError          an order of the operator that the engine cannot carry out
    └── RequestError        a request that cannot be served; `param` is the request field to change

CompilerFailure stands beside it: no caller causes it.
"""

import time


class EngineError(ValueError):
    """Base of the errors that a caller of `engine` can cause."""


class EngineConfigError(EngineError):
    """A setting is out of range or contradicts another one."""


class MachineError(EngineError):
    """The machine lacks what the settings need: a GPU, memory that others hold, an address. The next start may work."""


class GrammarError(EngineError):
    """A grammar cannot be compiled; the message says why, in words for the client who sent it."""


class GrammarTooSlow(GrammarError):
    """A grammar takes too long to compile or to follow. On a machine that is less busy it may not."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.raised_s = time.monotonic()


class CompilerFailure(Exception):
    """The compiler of grammars failed, which is our fault and no grammar's. The next try may work."""

    def __init__(self) -> None:
        super().__init__("the compiler of grammars failed; the log of the service says why")
        self.raised_s = time.monotonic()


class OrderError(EngineError):
    """The engine cannot carry out an order of its operator; the message says why."""


class RequestError(EngineError):
    """A request breaks a rule; the message is safe to show to its client."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param
