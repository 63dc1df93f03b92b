"""Turns wire requests into engine requests: prompt ids, sampling, token budget, and how to read the answer."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import msgspec

from engine.grammar_spec import GrammarSpec
from engine.types import EngineInfo, EngineRequest, SamplingParams, ThinkingBudget
from loaders.markers import DeepSeek
from server.choice import Choice
from server.config import ServerConfig
from server.errors import BadRequest, ContextTooLong
from server.folding import fold
from server.messages import check_tool_results, plain_message, plain_tool
from server.parsers import PlainParser, choose_grammar, choose_parser, end_of_turn_ids
from server.parsers.thinking import thinking_budget
from server.prompt import ChatTemplate, Ending, PromptTokenizer
from server.rehearsal import Rehearsal
from server.sampling_defaults import SamplingDefaults
from server.schema.chat import ChatCompletionRequest, ChatMessage, Tool
from server.schema.common import GenerationRequest
from server.schema.completions import CompletionRequest, DetokenizeRequest, TokenizeRequest
from server.structured.request import answer_format, call_choice, offered_tools
from server.structured.rules import turn_rules
from server.structured.turn import TurnRules
from server.text_limit import NO_LIMIT, TextLimit
from server.token_texts import TokenTexts

MAX_CONTEXTS = 4
"""/tokenize and /detokenize accept this many times the model's context."""

_SWITCH = "thinking"
"""Variable by which templates such as DeepSeek-V3.1's turn reasoning on and off."""
_GIVEN = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
"""Variables that no request may set."""
_EFFORTS = ("low", "medium", "high")
_SWITCH_EFFORTS = ("none", "minimal", *_EFFORTS, "xhigh")


class Tokenizer(PromptTokenizer, Protocol):
    """What the server uses of `loaders.tokenizer.Tokenizer`."""

    adds_bos: bool

    @property
    def vocab_size(self) -> int:
        """Highest id plus one."""

    @property
    def max_token_bytes(self) -> int | None:
        """Most bytes of text that one token can stand for; None if there is no bound."""

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of one id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRequest:
    """One HTTP request, ready for the engine: `requests[i]` is read by `make_choice(i)`.

    The `num_choices` choices of a prompt are neighbours in `requests`.
    """

    requests: tuple[EngineRequest, ...]
    make_choice: Callable[[int], Choice]
    token_texts: TokenTexts
    num_prompt_tokens: int
    num_choices: int

    @property
    def answer_id(self) -> str:
        """Id of the answer, as the client sees it."""
        return self.requests[0].request_id.rpartition("-")[0]


class Converter:
    """Holds the tokenizer, the chat template and the defaults; every method is a pure function of its arguments."""

    def __init__(self, tokenizer: Tokenizer, config: ServerConfig, defaults: SamplingDefaults) -> None:
        self.tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._rehearsal = Rehearsal(self._template)
        self._make_parser = choose_parser(tokenizer)
        template = tokenizer.tool_template or tokenizer.chat_template
        self._grammar = choose_grammar(tokenizer, None if template is None else template.text)
        self._end_ids = end_of_turn_ids(tokenizer)
        self._token_texts = TokenTexts(tokenizer)
        self._control_ids = frozenset(tokenizer.special_tokens.values())
        self._temperature = defaults.temperature if config.default_temperature is None else config.default_temperature
        self._top_p = defaults.top_p if config.default_top_p is None else config.default_top_p
        self._defaults = defaults

    def chat(self, wire: ChatCompletionRequest, info: EngineInfo, request_id: str) -> PreparedRequest:
        """A chat request. Raises BadRequest naming the field."""
        check_tool_results(wire.messages)
        choice = call_choice(wire)
        rules = turn_rules(answer_format(wire), offered_tools(wire.tools or []), choice)
        tools = [] if choice.mode == "none" else wire.tools or []
        readable = self._template.variables(has_tools=bool(tools))
        if tools and "tools" not in readable:
            raise BadRequest("tools: this model's chat template does not read them", param="tools")
        variables = self._template_variables(wire, readable)
        prompt_ids = self._render(wire.messages, tools, variables, self._limit(info), _ending(wire))
        room = _room(len(prompt_ids), info)
        wanted = wire.max_completion_tokens or wire.max_tokens
        max_tokens = _budget(len(prompt_ids), wanted or room, info)
        num_logprobs = (wire.top_logprobs or 0) if wire.logprobs else None
        sampling = self._sampling(wire, max_tokens, logprobs=num_logprobs, end_ids=self._end_ids)
        if wire.thinking_token_budget is not None:
            sampling = msgspec.structs.replace(sampling, thinking=self._thinking(wire, prompt_ids))
        tool_names = frozenset(tool.function.name for tool in tools)
        grammar = None if rules is None else self.turn_grammar(rules, prompt_ids)
        stop_ids = frozenset(wire.stop_token_ids or ()) - self._control_ids

        def make_choice(_index: int) -> Choice:
            max_calls = None if choice.is_parallel else 1
            parser = self._make_parser(prompt_ids, tool_names)
            return Choice(
                parser,
                stops=wire.stop,
                stop_ids=stop_ids,
                max_calls=max_calls,
                keeps_tokens=bool(wire.logprobs),
                min_tokens=wire.min_tokens or 0,
                shows_stop=bool(wire.include_stop_str_in_output),
            )

        requests = _bound(_choices(request_id, [prompt_ids], [sampling], wire, info), grammar)
        return PreparedRequest(
            requests=requests,
            make_choice=make_choice,
            token_texts=self._token_texts,
            num_prompt_tokens=len(prompt_ids),
            num_choices=wire.n or 1,
        )

    def completion(self, wire: CompletionRequest, info: EngineInfo, request_id: str) -> PreparedRequest:
        """A raw completion, for each of its prompts. Raises BadRequest naming the field."""
        limit = self._limit(info)
        prompts = []
        for prompt in wire.prompt:  # a prompt that is too long is refused before the rest is tokenized
            prompts.append(self.raw_ids(prompt, limit))
            _room(len(prompts[-1]), info)
        if not all(prompts):
            raise BadRequest("prompt: it must have at least one token", param="prompt")
        samplings = []
        for prompt in prompts:
            wanted = wire.num_wanted if wire.names_budget else min(wire.num_wanted, _room(len(prompt), info))
            max_tokens = _budget(len(prompt), max(1, wanted), info)
            scored = max(filter(_is_number, (wire.logprobs if wire.echo else None, wire.prompt_logprobs)), default=None)
            samplings.append(
                self._sampling(wire, max_tokens, logprobs=wire.logprobs, prompt_logprobs=scored, end_ids=())
            )
        stop_ids = frozenset(wire.stop_token_ids or ()) - self._control_ids
        answer = answer_format(wire) if wire.num_wanted else None
        grammar = None if answer is None else GrammarSpec.of(answer.format, param=answer.param)

        def make_choice(_index: int) -> Choice:
            parser = PlainParser(self.tokenizer, show_special=wire.skip_special_tokens is False)
            return Choice(
                parser,
                stops=wire.stop,
                stop_ids=stop_ids,
                hides_all=wire.num_wanted == 0,
                keeps_tokens=wire.logprobs is not None,
                min_tokens=wire.min_tokens or 0,
                shows_stop=bool(wire.include_stop_str_in_output),
            )

        requests = _bound(_choices(request_id, prompts, samplings, wire, info), grammar)
        return PreparedRequest(
            requests=requests,
            make_choice=make_choice,
            token_texts=self._token_texts,
            num_prompt_tokens=sum(map(len, prompts)),
            num_choices=wire.n or 1,
        )

    def turn_grammar(self, rules: TurnRules, prompt_ids: Sequence[int]) -> GrammarSpec | None:
        """The rules in the model's syntax; None if they forbid calls only and the model has no syntax for calls.

        Raises:
            BadRequest: the model's syntax, or its chat template, does not allow such rules.
        """
        if not self._grammar.supports_calls():
            if rules.calls or rules.must_call:
                message = f"{rules.param}: calls of this model cannot be bound: its syntax for them is not known"
                raise BadRequest(message, param=rules.param)
            if rules.answer is None:
                return None
        turn = self._grammar.turn(rules, prompt_ids)
        if turn is None:
            raise BadRequest(
                f"{rules.param}: the prompt does not end where an answer begins, so the answer cannot be bound: "
                "leave out continue_final_message, add_generation_prompt and a last message of the assistant",
                param=rules.param,
            )
        return GrammarSpec.of(turn, param=rules.param)

    def tokenize(self, wire: TokenizeRequest, info: EngineInfo | None) -> list[int]:
        """Ids of a raw prompt or of rendered messages, if their bytes may fit `MAX_CONTEXTS` contexts."""
        limit = self._limit(info, MAX_CONTEXTS)
        if wire.prompt is not None:
            if wire.add_special_tokens is False:
                limit.check(wire.prompt)
                return self.tokenizer.encode(wire.prompt)
            return self.raw_ids(wire.prompt, limit)
        return self._render(wire.messages or [], wire.tools or [], {}, limit)

    def detokenize(self, wire: DetokenizeRequest, info: EngineInfo | None) -> str:
        """Text of ids, control tokens by name. Raises BadRequest for an id that the model does not have."""
        if info is not None and len(wire.tokens) > MAX_CONTEXTS * info.max_model_len:
            raise BadRequest(
                f"tokens: {len(wire.tokens)} ids, at most {MAX_CONTEXTS * info.max_model_len} are accepted: "
                f"{MAX_CONTEXTS} times the model's context",
                param="tokens",
            )
        vocab_size = self.tokenizer.vocab_size
        if max(wire.tokens, default=0) >= vocab_size:
            raise BadRequest(f"tokens: token ids of this model are below {vocab_size}", param="tokens")
        return b"".join(map(self.tokenizer.token_bytes, wire.tokens)).decode("utf-8", errors="replace")

    def _limit(self, info: EngineInfo | None, num_contexts: int = 1) -> TextLimit:
        """The limit for a text of `num_contexts` contexts; none before the engine is ready."""
        max_token_bytes = self.tokenizer.max_token_bytes
        if info is None or max_token_bytes is None:
            return NO_LIMIT
        return TextLimit(info.max_model_len, max_token_bytes, num_contexts)

    def raw_ids(self, prompt: str | list[int], limit: TextLimit = NO_LIMIT) -> list[int]:
        """Ids of a raw prompt, in which control tokens are control tokens. Raises ContextTooLong."""
        if not isinstance(prompt, str):
            return prompt
        limit.check(prompt)
        ids = self.tokenizer.encode(prompt)
        bos = self.tokenizer.special_tokens.get(self.tokenizer.named_tokens.get("bos_token", ""))
        return [bos, *ids] if self.tokenizer.adds_bos and bos is not None and ids[:1] != [bos] else ids

    def _render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        variables: Mapping[str, Any],
        limit: TextLimit,
        ending: Ending = Ending.ANSWER_BEGINS,
    ) -> list[int]:
        thinks = DeepSeek.THINK_END in self.tokenizer.special_tokens
        try:
            plain_messages = [plain_message(message, thinks=thinks) for message in messages]
            folding = self._rehearsal.folding_for(plain_messages, variables, has_tools=bool(tools))
            return self._template.render(
                fold(plain_messages, folding), [plain_tool(t) for t in tools], variables, limit, ending
            )
        except RecursionError:
            raise BadRequest(
                "messages: objects in messages, tools or template variables are nested too deeply", param="messages"
            ) from None

    def _template_variables(self, wire: ChatCompletionRequest, readable: Set[str]) -> dict[str, Any]:
        """Variables for the template; one that is not `readable` to it would be ignored, so it is refused."""
        variables = dict(wire.chat_template_kwargs or {})
        has_switch = _SWITCH in readable
        if wire.reasoning_effort is not None:
            efforts = _SWITCH_EFFORTS if has_switch else _EFFORTS
            if wire.reasoning_effort not in efforts:
                known = f"{', '.join(efforts[:-1])} or {efforts[-1]}"
                raise BadRequest(f"reasoning_effort: it must be {known}", param="reasoning_effort")
            if not has_switch:
                variables["reasoning_effort"] = wire.reasoning_effort
        thinks = _thinks(wire)
        if has_switch and thinks is not None:
            variables.setdefault(_SWITCH, thinks)
        reserved = {*_GIVEN, *self.tokenizer.named_tokens}
        for name in variables:
            if name not in readable or name in reserved:
                param = "reasoning_effort" if name == "reasoning_effort" else "chat_template_kwargs"
                raise BadRequest(f"{param}: this model's chat template does not read '{name[:64]}'", param=param)
        return variables

    def _thinking(self, wire: ChatCompletionRequest, prompt_ids: Sequence[int]) -> ThinkingBudget | None:
        budget = thinking_budget(self.tokenizer, prompt_ids, wire.thinking_token_budget or 0)
        if budget is None and wire.thinking_token_budget:
            reason = "this model marks no reasoning that could be limited"
            raise BadRequest(f"thinking_token_budget: {reason}", param="thinking_token_budget")
        return budget

    def _sampling(
        self,
        wire: GenerationRequest,
        max_tokens: int,
        *,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
        end_ids: Sequence[int],
    ) -> SamplingParams:
        """`end_ids` end a turn of this model. The engine checks ids and ranges that depend on the model."""
        defaults = self._defaults
        turn_ends = () if wire.ignore_eos else end_ids
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=wire.min_tokens or 0,
            temperature=_given(wire.temperature, self._temperature),
            top_p=_given(wire.top_p, self._top_p),
            top_k=max(0, _given(wire.top_k, defaults.top_k)),
            min_p=_given(wire.min_p, defaults.min_p),
            seed=wire.seed,
            presence_penalty=wire.presence_penalty or 0.0,
            frequency_penalty=wire.frequency_penalty or 0.0,
            repetition_penalty=_given(wire.repetition_penalty, defaults.repetition_penalty),
            logit_bias=wire.logit_bias,
            stop_token_ids=tuple(dict.fromkeys([*turn_ends, *(wire.stop_token_ids or ())])),
            ignore_eos=bool(wire.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logprob_token_ids=tuple(wire.logprob_token_ids or ()),
        )


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def _is_number(value: int | None) -> TypeGuard[int]:
    return value is not None


def _thinks(wire: ChatCompletionRequest) -> bool | None:
    """Whether the answer shall begin with reasoning; None leaves it to the template."""
    if wire.reasoning_effort == "none" or wire.thinking_token_budget == 0:
        return False
    return True if wire.reasoning_effort or wire.thinking_token_budget else None


def _ending(wire: ChatCompletionRequest) -> Ending:
    if wire.continue_final_message:
        return Ending.IN_LAST_MESSAGE
    return Ending.LAST_MESSAGE if wire.add_generation_prompt is False else Ending.ANSWER_BEGINS


def _room(num_prompt: int, info: EngineInfo) -> int:
    """Tokens left for the answer. Raises ContextTooLong when there is none."""
    if num_prompt >= info.max_model_len:
        raise ContextTooLong(
            f"the prompt has {num_prompt} tokens and this model's maximum context length is {info.max_model_len} "
            "tokens, answer included: shorten the messages or the prompt"
        )
    return info.max_model_len - num_prompt


def _budget(num_prompt: int, wanted: int, info: EngineInfo) -> int:
    """`wanted`, if prompt and answer fit together. Raises ContextTooLong."""
    room = _room(num_prompt, info)
    if wanted > room:
        raise ContextTooLong(
            f"the prompt has {num_prompt} tokens and {wanted} are asked for, together {num_prompt + wanted}: "
            f"this model's maximum context length is {info.max_model_len} tokens; ask for at most {room}",
            param="max_tokens",
        )
    return wanted


def _choices(
    request_id: str,
    prompts: Sequence[list[int]],
    samplings: Sequence[SamplingParams],
    wire: GenerationRequest,
    info: EngineInfo,
) -> tuple[EngineRequest, ...]:
    """`wire.n` requests for each prompt; each has its own seed, so that seeded choices differ and repeat."""
    num_choices = wire.n or 1
    if len(prompts) * num_choices > info.max_requests:  # else the queue would always be too full for it
        raise BadRequest(
            f"n: {len(prompts) * num_choices} answers are asked for, n for each prompt, and this service holds at most "
            f"{info.max_requests} at once, running and queued",
            param="n",
        )
    requests: list[EngineRequest] = []
    for prompt_ids, sampling in zip(prompts, samplings, strict=True):
        for choice in range(num_choices):
            seed = None if sampling.seed is None else (sampling.seed + choice + 2**63) % 2**64 - 2**63
            own = sampling if choice == 0 else msgspec.structs.replace(sampling, seed=seed)
            requests.append(
                EngineRequest(
                    request_id=f"{request_id}-{len(requests)}",
                    prompt_ids=prompt_ids,
                    sampling=own,
                    priority=wire.priority or 0,
                    cache_salt=wire.cache_salt or "",
                )
            )
    return tuple(requests)


def _bound(requests: tuple[EngineRequest, ...], grammar: GrammarSpec | None) -> tuple[EngineRequest, ...]:
    """The requests with the format that their answers must have."""
    return tuple(msgspec.structs.replace(request, grammar=grammar) for request in requests) if grammar else requests
