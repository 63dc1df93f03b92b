"""`EngineCore`: the body of the step loop, in the caller's process. Requests and tokens; no sockets, no processes."""

import logging
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import torch

from engine.compile_queue import CompileQueue
from engine.config import EngineConfig
from engine.errors import GrammarError, GrammarTooSlow, RequestError
from engine.executor import ChunkResult, LaunchedStep
from engine.grammar_compiler import GrammarCompiler
from engine.load import LoadedEngine, load_engine
from engine.pages import PageAllocator
from engine.prefix_cache import PrefixCache
from engine.ranked_executor import make_executor
from engine.runner import Model, RowResult
from engine.scheduler import Scheduler
from engine.sequence import Chunk, LogitMask, Sequence
from engine.step_sizes import StepSizes
from engine.thinking import ThinkingLimit, both
from engine.token_masks import has_no_token
from engine.types import EngineInfo, EngineOutput, EngineRequest, EngineStats, ExpertLoad, FinishReason, TokenLogprobs
from engine.validate import RequestLimits, check_request, overloaded_output, refusal_output
from loaders.phases import StartPhases

if TYPE_CHECKING:
    from engine.rank_links import RankLinks

logger = logging.getLogger(__name__)

_INTERNAL_ERROR = "the engine failed on this request; its log says why"
_NOT_FINITE = "the model's output for this request was not a number"
_NO_TOKEN = "the answer cannot go on: the rules of this request forbid every token"


class EngineCore:
    """One model, its KV cache and its requests. Not thread-safe; `stats` and `expert_load` alone may be called from
    another thread.

    Every added request ends in exactly one output with a finish reason, even if it is refused or aborted.
    After an exception in a step, the requests run one at a time: those that fail again end, the others go on. `step`
    raises errors of the device, after which the engine cannot be used any more.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        ranks: "RankLinks | None" = None,
        phases: StartPhases | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """Load the model of the config, or take the one given, and allocate the KV cache.

        `clock` returns seconds and times the steps. `ranks` links this rank, which schedules, to the others. `phases`
        is the record of this start. `grammars` compiles for the model's vocabulary; by default it is made here.

        Raises:
            ValueError: (of this package, the model's, the loaders') a setting or a file is wrong.
        """
        start_s = time.monotonic()
        self.config = config
        loaded: LoadedEngine = load_engine(config, model, ranks, phases)
        self._runner = loaded.runner
        self._executor = make_executor(config, loaded, clock=clock, ranks=ranks)
        self._in_flight: LaunchedStep | None = None  # sampled and not collected; only with overlap
        self._pace = loaded.pace
        self._clock = clock
        self._last_end_s = float("-inf")  # when the last step was collected
        pages = PageAllocator(loaded.num_pages)
        self._scheduler = Scheduler(
            pages,
            PrefixCache(pages) if config.enable_prefix_caching else None,
            page_size=config.page_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=loaded.max_num_batched_tokens,
            window=loaded.needs.window,
        )
        self._limits = RequestLimits(
            vocab_size=loaded.runner.model.vocab_size,
            max_model_len=loaded.max_model_len,
            num_kv_tokens=loaded.num_kv_tokens,
            max_grammar_bytes=config.max_grammar_bytes,
        )
        self._eos_ids = frozenset(loaded.runner.model.eos_token_ids)
        self._compiling = CompileQueue(grammars or loaded.make_grammar_compiler(config))
        self._seeds = random.Random(config.seed)
        self._early_outputs: list[EngineOutput] = []  # refusals and aborts, handed out by the next step
        self._num_steps = 0
        self._num_generated = 0
        self._num_not_finite = 0
        self._step_sizes = StepSizes()
        self.info: EngineInfo = loaded.make_info(config, load_seconds=time.monotonic() - start_s)

    @property
    def has_work(self) -> bool:
        """True when the next `step` has something to do."""
        return bool(
            self._scheduler.sequences
            or self._compiling
            or self._early_outputs
            or self._in_flight
            or self._executor.others_may_have_work
        )

    def stats(self) -> EngineStats:
        """Counters of this moment."""
        scheduler = self._scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(self._compiling),
            num_pages_used=scheduler.pages.num_used,
            num_pages_total=scheduler.pages.num_pages,
            num_steps=self._num_steps,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_generated_tokens=self._num_generated,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_not_finite=self._num_not_finite,
            num_step_tokens=self._step_sizes.num_tokens,
            step_sizes=self._step_sizes.counts.copy(),
        )

    def describe(self) -> str:
        """The state of this moment in words. May be called from another thread."""
        return f"{self._num_steps} steps begun; {self._scheduler.describe()}"

    def expert_load(self) -> ExpertLoad | None:
        """Tokens by expert of all ranks, if they are counted. As `stats`, another thread may call it."""
        return self._executor.rounds.report()

    def add(self, request: EngineRequest, logit_mask: LogitMask | None = None) -> None:
        """Queue a request; a refusal is an output of the next step. Raises ValueError if its id is in use.

        `logit_mask` says which tokens may come next, given those before.
        """
        scheduler = self._scheduler
        if request.request_id in self._compiling or request.request_id in scheduler.sequences:
            raise ValueError(
                f"request id {request.request_id!r} is in use: ids must be unique among unfinished requests"
            )
        if len(scheduler.sequences) + len(self._compiling) >= self.config.max_requests:
            self._early_outputs.append(overloaded_output(request.request_id, self.config.max_requests))
            return
        try:
            check_request(request, self._limits)
        except RequestError as error:
            self._early_outputs.append(refusal_output(request.request_id, error))
            return
        sampling = request.sampling
        stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos_ids)
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        if sampling.thinking is not None:
            logit_mask = both(logit_mask, ThinkingLimit(sampling.thinking, self._limits.vocab_size))
        seq = Sequence(request, stop_ids=stop_ids, seed=seed, logit_mask=logit_mask)
        seq.added_s = self._clock()
        if request.grammar is None:
            scheduler.add(seq)
        else:
            self._compiling.add(seq, request.grammar)

    def abort(self, request_id: str) -> None:
        """End a request early; its last output comes with the next step. Does nothing if it is over already."""
        seq = self._scheduler.remove(request_id) or self._compiling.remove(request_id)
        if seq is not None:
            self._early_outputs.append(_make_output(seq, finish_reason="abort"))

    def reset_prefix_cache(self) -> None:
        """Forget the prompts so far: no request from now on reuses pages of those before it, which keep their own."""
        self._scheduler.reset_prefix_cache()

    def step(self) -> list[EngineOutput]:
        """Launch the next step and collect the previous one. Returns all new outputs since the last call.

        With overlap, the next call collects the step launched here, so the device always has work:

            host      schedule, launch n+1 | collect, apply n | sample n+1 | send | schedule, launch n+2 | ...
            device    ... sample n | forward n+1 ......................... | sample n+1 | forward n+2 ...

        Without overlap it is collected at once, and the host waits while the device computes.
        """
        if self._compiling:
            self._take_compiled()
        outputs, self._early_outputs = self._early_outputs, []
        launched = self._launch()
        before, self._in_flight = self._in_flight, None
        if before is not None:
            outputs += self._collect(before, after=launched)
        if launched is not None:
            outputs += self._sample(launched)
        return outputs

    def _take_compiled(self) -> None:
        """Queue the requests whose grammars are compiled. Wait a little for them if there is nothing else to do."""
        if not (self._scheduler.sequences or self._early_outputs or self._executor.others_may_have_work):
            self._compiling.wait()
        ready, refused = self._compiling.take()
        for seq in ready:
            self._scheduler.add(seq)
        self._early_outputs += [refusal_output(seq.request_id, error) for seq, error in refused]

    def _launch(self) -> LaunchedStep | None:
        """Schedule a step and start its forward pass; None if there is nothing to compute."""
        chunks = self._schedule(None if self._pace is None else self._pace.max_prompt_tokens)
        if not chunks and not self._executor.others_may_have_work:
            self._executor.rest()
            return None
        launched = self._executor.launch(chunks)
        if launched is not None:
            self._num_steps += 1
            self._step_sizes.note(sum([chunk.num_tokens for chunk in chunks]))
        return launched

    def _schedule(self, max_prompt_tokens: int | None = None) -> list[Chunk]:
        chunks = self._scheduler.schedule(max_prompt_tokens)
        for chunk in chunks:
            self._scheduler.begin(chunk)
        if self._scheduler.newly_started:
            now_s = self._clock()
            for seq in self._scheduler.newly_started:
                seq.started_s = now_s
            self._scheduler.newly_started.clear()
        return chunks

    def _sample(self, launched: LaunchedStep) -> list[EngineOutput]:
        """Choose the tokens of a launched step, now that those before it are known. Without overlap, collect it too.

        For a request that has ended meanwhile, one token was computed for nothing.
        """
        if not any(map(self._is_wanted, launched.chunks)):
            return []
        error = self._executor.sample(launched, self._is_wanted)
        if error is not None:
            return self._apply(self._recover(launched.chunks, error))
        if not self._executor.overlaps:
            return self._collect(launched)
        self._in_flight = launched
        return []

    def _collect(self, launched: LaunchedStep, after: LaunchedStep | None = None) -> list[EngineOutput]:
        """Wait for a sampled step and apply it. `after` is the step that was launched on its tokens, if one was."""
        results = self._executor.collect(launched)
        if isinstance(results, Exception):
            if after is not None:
                self._take_back(after.chunks)
                after.chunks = []
            results = self._recover(launched.chunks, results)
        else:
            self._observe(launched, results)
        return self._apply(results)

    def _is_wanted(self, chunk: Chunk) -> bool:
        """False if the request has ended since the chunk was scheduled."""
        return self._scheduler.sequences.get(chunk.seq.request_id) is chunk.seq

    def _take_back(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self._scheduler.take_back(chunk)

    def _recover(self, chunks: list[Chunk], error: Exception) -> list[ChunkResult]:
        """Run a failed step again, with nothing else in flight, and return its results.

        A step that ran out of memory is retried with half of its tokens until it fits. For any other error, and if
        that does not help, the requests run one at a time.
        """
        self._take_back([chunk for chunk in chunks if chunk.seq.row < 0])  # preempted or ended: their pages are gone
        chunks = [chunk for chunk in chunks if chunk.seq.row >= 0]
        if not self._executor.can_retry:
            return self._executor.give_up(chunks, error)
        results: list[ChunkResult] | Exception = error
        while isinstance(results, torch.OutOfMemoryError):
            num_tokens = sum(chunk.num_tokens for chunk in chunks)
            if num_tokens <= 1:
                break
            logger.warning("out of memory in a step of %d tokens: trying again with half of them", num_tokens)
            results.__traceback__ = None  # its frames hold the tensors of the failed step
            torch.cuda.empty_cache()
            self._take_back(chunks)
            self._scheduler.lower_budget(num_tokens // 2)
            chunks = self._schedule()
            results = self._executor.run(chunks)
        return self._executor.run_singly(chunks, results) if isinstance(results, Exception) else results

    def _apply(self, results: list[ChunkResult]) -> list[EngineOutput]:
        """Give every request what its chunk computed."""
        wanted = [result for result in results if self._is_wanted(result.chunk)]
        outputs = [self._apply_one(result.chunk, result.row) for result in wanted]
        return [output for output in outputs if output is not None]

    def _observe(self, launched: LaunchedStep, results: list[ChunkResult]) -> None:
        """Tell the pace how long a step took, from its launch or the end of the previous step, whichever is later."""
        end_s = self._clock()
        step_s = end_s - max(launched.start_s, self._last_end_s)
        self._last_end_s = end_s
        if self._pace is not None and any(result.row and result.row.token is not None for result in results):
            self._pace.observe(
                num_decodes=launched.num_decodes, num_prompt_tokens=launched.num_prompt_tokens, step_s=step_s
            )

    def _apply_one(self, chunk: Chunk, row: RowResult | None) -> EngineOutput | None:
        seq = chunk.seq
        if row is None or not row.is_finite:
            self._scheduler.remove(seq.request_id)
            return _make_output(seq, finish_reason="error", error=self._why_no_token(seq, row))
        self._scheduler.commit(chunk)
        if row.prompt_logprobs is not None:
            seq.prompt_logprobs[chunk.start + 1 :] = row.prompt_logprobs
        if row.token is None:
            return None
        return self._accept(seq, row.token, row.logprobs)

    def _why_no_token(self, seq: Sequence, row: RowResult | None) -> str:
        """The error of a request for which a step brought nothing. Counts it if the model is to blame."""
        if row is None:
            return _INTERNAL_ERROR
        if has_no_token(seq, self._limits.vocab_size):
            return _NO_TOKEN
        self._num_not_finite += 1
        return _NOT_FINITE

    def _accept(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None) -> EngineOutput:
        with_prompt = seq.wants_prompt_logprobs
        is_first = seq.num_output == 0
        try:
            reason = _append(seq, token)
        except GrammarError as error:
            self._scheduler.remove(seq.request_id)
            return _grammar_failure(seq, error)
        self._num_generated += 1
        if reason is not None:
            self._scheduler.remove(seq.request_id)
        output = EngineOutput(
            request_id=seq.request_id,
            token_ids=[token],
            logprobs=None if logprobs is None else [logprobs],
            prompt_logprobs=seq.prompt_logprobs if with_prompt else None,
            finish_reason=reason,
            stop_reason=token if reason == "stop" else None,
            num_cached_tokens=seq.num_cached if is_first or reason is not None else 0,
        )
        if not is_first:
            return output
        prefill_s = self._clock() - seq.started_s
        return msgspec.structs.replace(output, queue_s=seq.started_s - seq.added_s, prefill_s=prefill_s)


def _append(seq: Sequence, token: int) -> FinishReason | None:
    """Continue an answer. Returns why it ends here, if it does. Raises GrammarError if its grammar cannot go on."""
    seq.token_ids.append(token)
    if token in seq.stop_ids:
        return "stop"
    if seq.grammar is not None:
        seq.grammar.accept(token)
        if seq.grammar.is_over:
            return "stop"
    return "length" if seq.num_output >= seq.sampling.max_tokens else None


def _grammar_failure(seq: Sequence, error: GrammarError) -> EngineOutput:
    """The last output of an answer that its grammar ends: the client's fault if the grammar is too slow, else ours."""
    output = _make_output(seq, finish_reason="error", error=f"the answer's grammar was given up: {error}")
    if seq.grammar is None or seq.grammar.param is None or not isinstance(error, GrammarTooSlow):
        return output
    param = seq.grammar.param
    return msgspec.structs.replace(output, error=f"{param} cannot be used: {error}", error_param=param)


def _make_output(seq: Sequence, *, finish_reason: FinishReason, error: str | None = None) -> EngineOutput:
    return EngineOutput(
        request_id=seq.request_id, finish_reason=finish_reason, error=error, num_cached_tokens=seq.num_cached
    )
