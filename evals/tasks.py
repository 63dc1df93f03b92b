"""Which lm-eval task stands for a well-known name, in which form of request."""

from __future__ import annotations

from dataclasses import dataclass

FORMS = ("chat", "completions")


@dataclass(frozen=True, kw_only=True)
class Task:
    """Tasks of lm-eval by form of request; `scored_by`: (filter, metric) of the score that we compare.

    An empty filter stands for the task's first one.
    """

    chat: tuple[str, ...]
    completions: tuple[str, ...]
    scored_by: tuple[str, str] = ("", "exact_match")

    def of(self, form: str) -> tuple[str, ...]:
        """The tasks for a form of request."""
        return self.chat if form == "chat" else self.completions


def _both(*names: str, scored_by: tuple[str, str] = ("", "exact_match")) -> Task:
    return Task(chat=names, completions=names, scored_by=scored_by)


def _gpqa(subset: str) -> Task:
    """Reasons step by step in a chat; the choices' log-likelihoods are scored in completions."""
    return Task(
        chat=(f"gpqa_{subset}_cot_zeroshot",), completions=(f"gpqa_{subset}_zeroshot",),
        scored_by=("flexible-extract", "exact_match"),
    )  # fmt: skip


TASKS = {
    "gsm8k": _both("gsm8k", scored_by=("flexible-extract", "exact_match")),
    "mmlu": Task(chat=("mmlu_generative",), completions=("mmlu",)),
    "gpqa": _gpqa("diamond"),
    "gpqa-main": _gpqa("main"),
    "gpqa-extended": _gpqa("extended"),
    "ifeval": _both("ifeval", scored_by=("", "prompt_level_strict_acc")),
    "aime": _both("aime24", "aime25"),
    "aime24": _both("aime24"),
    "aime25": _both("aime25"),
}
