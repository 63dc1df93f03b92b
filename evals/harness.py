"""One lm-eval run, as a program of lm-eval's own environment: reads its order as JSON from standard input.

`ServedModel` is how lm-eval asks the server: by our client, which repeats only what the server has not begun to answer.
On failure the reason is all that standard output gets, and the exit status is 1.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import lm_eval
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from evals.client import Client, ServerError, in_parallel, reading
from evals.results import Item, Run

MAX_TOKENS = 256  # of a raw completion, where neither task nor user says it: lm-eval's own number
# Of lm-eval's aggregations, those that take a number for each item; the others take pairs of texts, counts and more.
_OF_NUMBERS = ("mean", "nanmean", "median")


class OrderError(ValueError):
    """The order cannot be carried out; the message says what to change."""


class ServedModel(TemplateLM):
    """A server behind lm-eval's interface. `answers` holds what each generated text came from, by prompt."""

    def __init__(self, client: Client, order: dict[str, Any]) -> None:
        super().__init__()
        self._client, self._order = client, order
        self.answers: dict[str, dict[str, Any]] = {}
        self._end: int | None = None

    @property
    def is_chat(self) -> bool:
        """Whether requests are chats."""
        return bool(self._order["form"] == "chat")

    @property
    def eot_token_id(self) -> int:
        """Stands before a continuation that has no context."""
        if self._end is None:
            with reading("/tokenizer_info"):
                text = self._client.get("//tokenizer_info")["eos_token"]
                self._end = int(self.tok_encode(text, add_special_tokens=False)[0])
        return self._end

    @property
    def tokenizer_name(self) -> str:
        """Part of lm-eval's cache keys."""
        return self._client.model

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The messages as JSON; the server renders them. lm-eval wants one string for a prompt."""
        del add_generation_prompt
        return json.dumps(chat_history)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The server's token ids."""
        body = {"model": self._client.model, "prompt": string}
        if add_special_tokens is not None:
            body["add_special_tokens"] = add_special_tokens
        with reading("/tokenize"):
            return list(self._client.get("//tokenize", body)["tokens"])

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The final text of each answer, up to the first of the task's stop strings."""
        return self._all(self._generate, requests, "answers", disable_tqdm)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Of a continuation after a context, each tokenized by the server."""
        if self.is_chat:
            task = requests[0].task_name
            raise OrderError(f"{task} scores log-likelihoods, which a chat does not give: use --form completions")
        pairs = self._all(self._encoded, requests, "tokenized", disable_tqdm)
        return self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        return self._all(self._likelihood, requests, "log-likelihoods", disable_tqdm)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Of a whole text that fits into the context."""
        ids = [[self.eot_token_id, *self.tok_encode(request.args[0], False)] for request in requests]
        pairs = [(("", ""), one[:1], one[1:]) for one in ids]
        return [total for total, _ in self._loglikelihood_tokens(pairs, disable_tqdm)]

    def _all(self, function: Any, items: Sequence[Any], what: str, disable_tqdm: bool) -> list[Any]:
        results = in_parallel(function, items, self._order["concurrency"])
        return list(tqdm(results, total=len(items), desc=what, disable=disable_tqdm, mininterval=1.0))

    def _encoded(self, request: Any) -> tuple[tuple[str, str], list[int], list[int]]:
        context, continuation = request.args
        if context:
            return (context, continuation), *self._encode_pair(context, continuation)
        return (context, continuation), [self.eot_token_id], self.tok_encode(continuation, add_special_tokens=False)

    def _likelihood(self, request: tuple[tuple[str, str], list[int], list[int]]) -> tuple[float, bool]:
        _, context, continuation = request
        ids = [*context, *continuation]
        body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        reply = self._client.get("/completions", {"model": self._client.model} | body)
        with reading("/completions"):
            logprobs = reply["choices"][0]["logprobs"]
            own = slice(len(context), len(ids))
            found, best = logprobs["token_logprobs"][own], logprobs["top_logprobs"][own]
            is_greedy = all(value >= max(top.values()) for value, top in zip(found, best, strict=True))
            return sum(found), is_greedy

    def _generate(self, request: Any) -> str:
        prompt, wanted = request.args
        stops = wanted.get("until") or []
        stops = [stops] if isinstance(stops, str) else list(stops)
        body = {"model": self._client.model, "temperature": self._order["temperature"]}
        if body["temperature"] > 0:
            body["seed"] = self._order["seed"] + request.idx
        if self._order["max_tokens"] is not None:
            body["max_tokens"] = self._order["max_tokens"]
        if self.is_chat:
            answer = self._client.ask(json.loads(prompt), **body | self._order["fields"])
            content, reasoning, reason = answer.content, answer.reasoning, answer.finish_reason
        else:
            body.setdefault("max_tokens", wanted.get("max_gen_toks", MAX_TOKENS))
            body |= {"prompt": prompt, "stop": stops[:4]}
            with reading("/completions"):
                choice = self._client.get("/completions", body | self._order["fields"])["choices"][0]
                content, reasoning, reason = choice["text"], "", choice["finish_reason"]
        # In a chat the task's stop strings end the final text alone: in the reasoning they may stand anywhere.
        for stop in stops:
            content = content.split(stop, 1)[0] if stop else content
        self.answers[prompt] = {"reasoning": reasoning, "finish_reason": reason}
        return content


def run(order: dict[str, Any]) -> Run:
    """Carry out an order of `evals.run`.

    Raises:
        OrderError: unknown tasks, data that cannot be had, a task that the form of request does not suit, that fails
            of itself, or that has no score for each item.
        ServerError: the server refused a request, or could not be reached.
    """
    manager = _manager(order)
    unknown = [name for name in order["tasks"] if not manager.match_tasks([name])]
    if unknown:
        raise OrderError(
            f"lm-eval {lm_eval.__version__} knows no task {', '.join(unknown)}: `python -m lm_eval ls tasks` lists "
            "them; for task files of your own give --tasks-folder"
        )
    client = Client(**order["client"])
    model = ServedModel(client, order)
    random.seed(order["seed"])  # some tasks shuffle their choices while they load
    _need_nltk(order)
    with _failures_of_tasks(order):
        try:
            loaded = manager.load(list(order["tasks"]))
        except (ConnectionError, FileNotFoundError, datasets.exceptions.DatasetsError, OSError) as error:
            raise OrderError(_no_data(order, error)) from error
        for name, task in loaded["tasks"].items():
            _need_scores(name, task)
        found = lm_eval.simple_evaluate(
            model=model, tasks=list(loaded["tasks"].values()), task_manager=manager, num_fewshot=order["num_fewshot"],
            limit=order["limit"], apply_chat_template=model.is_chat, fewshot_as_multiturn=model.is_chat,
            log_samples=True, bootstrap_iters=0, random_seed=order["seed"], fewshot_random_seed=order["seed"],
        )  # fmt: skip
    items = []
    for name, samples in found["samples"].items():
        chosen = _of_one_filter(samples, order["scored_by"][0])
        metric = _metric(name, chosen, order["scored_by"][1], found["results"])
        items += [_item(name, sample, metric, model) for sample in chosen]
    cut_off = sum(item.details.get("finish_reason") == "length" for item in items)
    versions = {name: str(version) for name, version in found["versions"].items()}
    same = ("form", "limit", "num_fewshot", "temperature", "max_tokens", "seed", "fields")
    return Run(
        eval=order["name"],
        settings={name: order[name] for name in same}
        | {"lm_eval": lm_eval.__version__, "tasks": versions},
        server={"base_url": client.base_url, "model": client.model}, items=items,
        notes={
            "cut_off": cut_off, "empty": sum(not item.answer for item in items if "finish_reason" in item.details),
            "lm_eval_results": found["results"],
        },
    )  # fmt: skip


@contextmanager
def _failures_of_tasks(order: dict[str, Any]) -> Iterator[None]:
    """Turn what a task's own template, filter or code raises into an OrderError; standard error gets its traceback."""
    try:
        yield
    except (OrderError, ServerError):
        raise
    except Exception as error:
        traceback.print_exc()
        reason = str(error).strip().partition("\n")[0]
        raise OrderError(
            f"lm-eval cannot run {', '.join(order['tasks'])}: {type(error).__name__}: {reason}; the traceback above "
            "says which part of the task is wrong: its template, its filters or its code"
        ) from error


def _need_scores(name: str, task: Any) -> None:
    """Refuse a task none of whose metrics has a number for each item."""
    aggregations = task.aggregation()
    if aggregations and all(
        function.__module__ == "lm_eval.api.metrics" and function.__name__ not in _OF_NUMBERS
        for function in aggregations.values()
    ):
        raise OrderError(_no_scores(name, list(aggregations)))


def _no_scores(name: str, metrics: list[str]) -> str:
    return (
        f"{name} has no score from 0 to 1 for each item, only {', '.join(metrics)} of them all, so that two runs could "
        "not be compared: choose a task with another metric, or run lm-eval itself; `evals perplexity --text FILE` "
        "measures a perplexity"
    )


def _metric(name: str, samples: list[dict[str, Any]], wanted: str, results: dict[str, Any]) -> str:
    """The metric that scores the items of a task: the wanted one if the task has it, else the first that can."""
    metrics = samples[0]["metrics"]
    for metric in [wanted] if wanted in metrics else metrics:
        if all(_is_score(sample.get(metric)) for sample in samples):
            return str(metric)
    raise OrderError(f"{_no_scores(name, metrics)}. lm-eval's own results: {json.dumps(results, default=str)}")


def _is_score(value: Any) -> bool:
    try:
        return 0 <= float(value) <= 1
    except (TypeError, ValueError):
        return False


def _manager(order: dict[str, Any]) -> TaskManager:
    """lm-eval's own tasks take a while to index, so the user's folder is tried alone first."""
    if order["tasks_folder"]:
        own = TaskManager(include_path=order["tasks_folder"], include_defaults=False)
        if all(own.match_tasks([name]) for name in order["tasks"]):
            return own
    return TaskManager(include_path=order["tasks_folder"])


def _of_one_filter(samples: list[dict[str, Any]], wanted: str) -> list[dict[str, Any]]:
    """lm-eval has one sample for each filter of an item: those of the wanted filter, or of the first."""
    filters = list(dict.fromkeys(sample["filter"] for sample in samples))
    chosen = wanted if wanted in filters else filters[0]
    return [sample for sample in samples if sample["filter"] == chosen]


def _item(task: str, sample: dict[str, Any], metric: str, model: ServedModel) -> Item:
    arguments = list(sample["arguments"].values()) if isinstance(sample["arguments"], dict) else sample["arguments"]
    first = list(arguments[0].values()) if isinstance(arguments[0], dict) else list(arguments[0])
    others = {name: sample[name] for name in sample["metrics"] if name != metric}
    if len(arguments) > 1 or not isinstance(sample["resps"][0][0], str):
        answer = json.dumps(sample["filtered_resps"], default=str)  # log-likelihoods of the choices
    else:
        answer = str(sample["resps"][0][0])
    return Item(
        id=f"{task}/{sample['doc_id']}", category=task, prompt=str(first[0]), answer=answer,
        score=float(sample[metric]), expected=str(sample["target"]),
        details={"metric": metric, **others, **model.answers.get(str(first[0]), {})},
    )  # fmt: skip


def _need_nltk(order: dict[str, Any]) -> None:
    """IFEval splits sentences by a table that it would download while it loads."""
    if not order["offline"] or "ifeval" not in order["tasks"]:
        return
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError as error:
        raise OrderError(
            "ifeval needs NLTK's table punkt_tab, which is not on this machine: put it under nltk_data/tokenizers of "
            "--data, or run once without --offline"
        ) from error


def _no_data(order: dict[str, Any], error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    remedy = (
        "fetch it with `hf download --repo-type dataset OWNER/NAME --local-dir DATA/OWNER/NAME` and give --data DATA, "
        "or run without --data and --offline"
        if order["offline"]
        else "is the hub reachable, and is the dataset open to your HF_TOKEN?"
    )
    return f"the data of {', '.join(order['tasks'])} cannot be had: {reason}; {remedy}"


def main() -> int:
    """Exit status 0, or 1 with the reason on standard output."""
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    order = json.load(sys.stdin)
    output, sys.stdout = sys.stdout, sys.stderr  # lm-eval prints, too
    try:
        run(order).write(Path(order["out"]))
    except (OrderError, ServerError) as error:
        print(error, file=output)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
