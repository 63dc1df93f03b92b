"""`Finding`: one line of `moe-serve doctor`."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How much a finding matters. Only a problem keeps the service from serving with the given flags."""

    OK = "ok"
    NOTE = "note"  # something optional is not here
    WARNING = "warning"  # the service runs, but slower or not for long
    PROBLEM = "problem"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What was found about a topic, and what to do about it; `way_out` is empty where nothing needs to be done.

    `is_setting`: a problem of the flags or of the files that they name, whatever the machine is like.
    """

    topic: str
    level: Level
    text: str
    way_out: str = ""
    is_setting: bool = False


def ok(topic: str, text: str) -> Finding:
    """A finding that needs nothing done."""
    return Finding(topic=topic, level=Level.OK, text=text)


def is_well(findings: Iterable[Finding]) -> bool:
    """Whether nothing keeps the service from serving."""
    return all(each.level is not Level.PROBLEM for each in findings)


def verdict(findings: Iterable[Finding]) -> str:
    """The last line: whether the service can serve, and the topics that need attention."""
    topics: dict[Level, dict[str, None]] = {Level.PROBLEM: {}, Level.WARNING: {}}  # each once, in order
    for each in findings:
        topics.get(each.level, {})[each.topic] = None
    problems, warnings = (", ".join(topics[level]) for level in (Level.PROBLEM, Level.WARNING))
    first = f"the service cannot serve with these flags; problems: {problems}" if problems else "the service can serve"
    return f"{first}{f'; warnings: {warnings}' if warnings else ''}\n"


def render(findings: Iterable[Finding]) -> str:
    """One line for each finding: level, topic, text, way out."""
    rows = list(findings)
    width = max((len(each.topic) for each in rows), default=0)
    lines = [
        f"{each.level:<8} {each.topic:<{width}}  {each.text}{f'; {each.way_out}' if each.way_out else ''}"
        for each in rows
    ]
    return "\n".join(lines) + "\n"
