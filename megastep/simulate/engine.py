"""An engine in simulated time: vLLM's continuous batching, without tokens.

    call ──► waiting ── max_sequences and KV cache have room ──► prefill ──► decode ──► answer

Prefills run first, one after the other, and no sequence decodes meanwhile: vLLM computes them in
the same iterations, which take about as long as both. Between two events the batch is constant, so
an iteration takes a + b × (tokens in the KV cache), which grow by one per sequence: the time of n
iterations has a closed form, and a call costs three events, whatever its length.

A call is admitted if its final length fits next to those of the running ones: nothing is preempted.
What they leave is the prefix cache: contexts of earlier turns and prompts of groups, the least
recently used evicted first. A weight sync drops the cache; running calls are prefilled again.
"""

import asyncio
import heapq
import itertools
import math
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field

import numpy as np

from megastep.rollout.engine import run_lengths
from megastep.rollout.generation import Generation, Sampling, Session
from megastep.simulate.roofline import Iteration, Times
from megastep.types import FinishReason


@dataclass(frozen=True)
class SimulatedSampling(Sampling):
    """What an engine must know of a call, since there are no tokens."""

    response_tokens: int = 0
    shared_tokens: int = 0  # leading prompt tokens that the session's last call had
    session: Session = Session("", 0)
    first_prompt_tokens: int = 0  # of the group


@dataclass(eq=False)
class Call:
    sampling: SimulatedSampling
    prompt_tokens: int
    answer: asyncio.Future
    runs: list[list[int]] = field(default_factory=list)  # weight version, tokens before it
    sampled: float = 0.0  # tokens, when it last joined the batch
    joined: float = 0.0  # iteration in which it last joined
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.sampling.response_tokens

    def tokens_at(self, iteration: float) -> float:
        return min(self.sampled + iteration - self.joined, self.sampling.response_tokens)


@dataclass(eq=False)
class SimulatedEngine:
    times: Times
    max_sequences: int
    kv_tokens: int
    version: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # busy, by cause
    prefilled_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    sampled_tokens: int = 0

    def __post_init__(self) -> None:
        self.generate = self  # as a Ray actor: engine.generate.remote(...)
        self._waiting: deque[Call] = deque()
        self._prefills: deque[list] = deque()  # [call, seconds left]
        self._running: list[tuple[float, int, Call]] = []  # a heap by the last iteration
        self._order = itertools.count()
        self._iteration = 0.0
        self._kv_in_use = 0.0  # tokens that decoding reads
        self._reserved = 0  # final lengths of admitted calls
        self._cache: OrderedDict[object, int] = OrderedDict()
        self._cache_tokens = 0
        self._held: deque[Call] = deque()  # came during a pause
        self._accepts_calls = True
        self._paused = False
        self._settled_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._changed: asyncio.Future | None = None  # for a pause that lets calls finish
        self._phase: Iteration | None = None  # of the batch that decodes
        self._batch = 0

    # ------------------------------------------------------------ calls

    def remote(
        self,
        prompt_ids: np.ndarray,
        sampling: SimulatedSampling,
        name: str,
        routing_start: int,
        routing_version: int | None,
    ) -> asyncio.Future:
        loop = asyncio.get_running_loop()
        call = Call(sampling, len(prompt_ids), loop.create_future())
        call.answer.add_done_callback(lambda answer: self._abort(call) if answer.cancelled() else 0)
        loop.call_later(self.times.call_s, self._add, call)
        return call.answer

    def _add(self, call: Call) -> None:
        if call.answer.cancelled():
            return
        if not self._accepts_calls:
            self._held.append(call)
            return
        self._settle()
        self._accept(call)
        self._schedule()

    def _accept(self, call: Call) -> None:
        call.runs = [[self.version, 0]]
        self._waiting.append(call)

    def _abort(self, call: Call) -> None:
        self._settle()
        queues = [queue for queue in (self._waiting, self._held) if call in queue]
        if queues:
            queues[0].remove(call)
        else:
            self._leave(call)
        self._schedule()

    def _leave(self, call: Call) -> None:
        """Remove an admitted call."""
        before = len(self._prefills) + len(self._running)
        self._prefills = deque(entry for entry in self._prefills if entry[0] is not call)
        kept = [entry for entry in self._running if entry[2] is not call]
        if len(kept) < len(self._running):
            self._kv_in_use -= call.prompt_tokens + call.tokens_at(self._iteration)
            self._running = kept
            heapq.heapify(self._running)
        if len(self._prefills) + len(self._running) < before:
            self._reserved -= call.total_tokens

    # ------------------------------------------------------------ weights

    async def pause(self, finish_calls: bool) -> None:
        """Calls in flight freeze, or finish first; new ones wait."""
        self._accepts_calls = False
        while finish_calls and (self._waiting or self._prefills or self._running):
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed
        self._settle()
        self._paused = True
        self._schedule()

    def update_weights(self, version: int) -> None:
        """While paused. The KV cache is of the weights before: everything is prefilled again."""
        self.version = version
        self._cache.clear()
        self._cache_tokens = 0
        running = [call for _, _, call in sorted(self._running)]
        for call in running:
            call.sampled = call.tokens_at(self._iteration)
        interrupted = [entry[0] for entry in self._prefills] + running
        for call in [*interrupted, *self._waiting]:
            if call.runs[-1][0] != version:
                call.runs.append([version, round(call.sampled)])
        self._running = []
        self._kv_in_use = 0.0
        self._prefills = deque([call, self._prefill_s(call, 0)] for call in interrupted)

    def resume(self) -> None:
        self._settle()
        self._paused = False
        self._accepts_calls = True
        while self._held:
            self._accept(self._held.popleft())
        self._schedule()

    # ------------------------------------------------------------ progress

    def _settle(self) -> None:
        """Account for the time since the last event."""
        now_s = asyncio.get_running_loop().time()
        elapsed_s = now_s - self._settled_s
        self._settled_s = now_s
        if self._paused or elapsed_s <= 0:
            return
        if self._prefills:
            self._prefills[0][1] -= elapsed_s
            self.seconds["prefill"] += elapsed_s
        elif self._running:
            self._decode(elapsed_s)

    def _decode(self, elapsed_s: float) -> None:
        assert self._phase is not None
        phase = self._phase
        first_s = phase.base + phase.per_kv_token * self._kv_in_use
        count = _iterations(elapsed_s, first_s, phase.per_kv_token * self._batch)
        kv_s = elapsed_s - count * phase.base
        self.seconds["weights"] += count * phase.weights
        self.seconds["compute"] += count * phase.compute
        self.seconds["links"] += count * phase.links
        self.seconds["fixed"] += count * phase.fixed
        self.seconds["KV cache"] += kv_s
        self._iteration += count
        self._kv_in_use += count * self._batch

    def _schedule(self) -> None:
        """Finish and admit what is due, and set the timer of the next event."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._paused:
            return
        self._answer_finished()
        self._admit()
        self._join()
        wait_s = self._next_event_s()
        if wait_s is not None:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._on_timer)
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def _on_timer(self) -> None:
        self._timer = None
        self._settle()
        self._schedule()

    def _next_event_s(self) -> float | None:
        if self._prefills:
            return max(self._prefills[0][1], 0.0)
        if not self._running:
            return None
        self._batch = len(self._running)
        self._phase = self.times.iteration(self._batch)
        count = max(self._running[0][0] - self._iteration, 0.0)
        first_s = self._phase.base + self._phase.per_kv_token * self._kv_in_use
        return count * first_s + self._phase.per_kv_token * self._batch * count**2 / 2

    def _answer_finished(self) -> None:
        while self._running and self._running[0][0] <= self._iteration + 1e-6:
            _, _, call = heapq.heappop(self._running)
            self._kv_in_use -= call.total_tokens
            self._reserved -= call.total_tokens
            self.sampled_tokens += call.sampling.response_tokens
            self._remember(call.sampling.session, call.total_tokens)
            call.answer.set_result(self._generation(call))
        if not self._running:
            self._kv_in_use = 0.0  # without the rounding of many events

    def _admit(self) -> None:
        while self._waiting:
            call = self._waiting[0]
            admitted = len(self._running) + len(self._prefills)
            fits = self._reserved + call.total_tokens <= self.kv_tokens
            if admitted >= self.max_sequences or not (fits or admitted == 0):
                return
            self._waiting.popleft()
            self._reserved += call.total_tokens
            cached = self._cached(call)
            self.cached_tokens += cached
            call.cached_tokens = cached
            self._prefills.append([call, self._prefill_s(call, cached)])
            self._remember(call.sampling.session.group, call.sampling.first_prompt_tokens)

    def _join(self) -> None:
        """Calls whose prefill is done decode from now on."""
        while self._prefills and self._prefills[0][1] <= 1e-9:
            call, _ = self._prefills.popleft()
            call.joined = self._iteration
            left = call.sampling.response_tokens - call.sampled
            last = self._iteration + left
            heapq.heappush(self._running, (last, next(self._order), call))
            self._kv_in_use += call.prompt_tokens + call.sampled

    def _prefill_s(self, call: Call, cached: int) -> float:
        tokens = call.prompt_tokens + round(call.sampled) - cached
        self.prefilled_tokens += tokens
        return self.times.prefill(tokens, cached)

    # ------------------------------------------------------------ prefix cache

    def _cached(self, call: Call) -> int:
        """Prompt tokens in the cache; the last one is always computed."""
        sampling = call.sampling
        of_session = min(self._cache.get(sampling.session, 0), sampling.shared_tokens)
        of_group = min(self._cache.get(sampling.session.group, 0), sampling.first_prompt_tokens)
        return min(max(of_session, of_group), call.prompt_tokens - 1)

    def _remember(self, key: object, tokens: int) -> None:
        self._cache_tokens += tokens - self._cache.pop(key, 0)
        self._cache[key] = tokens
        while self._cache and self._cache_tokens + self._reserved > self.kv_tokens:
            _, evicted = self._cache.popitem(last=False)
            self._cache_tokens -= evicted

    def _generation(self, call: Call) -> Generation:
        tokens = call.sampling.response_tokens
        return Generation(
            ids=zeros(tokens),
            logprobs=np.broadcast_to(np.float32(0), (tokens,)),
            versions=run_lengths(call.runs, tokens),
            finish=FinishReason.STOP,
            cached_tokens=call.cached_tokens,
        )


def zeros(tokens: int) -> np.ndarray:
    """[tokens] i32 that take no memory."""
    return np.broadcast_to(np.int32(0), (tokens,))


def _iterations(elapsed_s: float, first_s: float, growth_s: float) -> float:
    """n with n × first_s + growth_s × n²/2 = elapsed_s."""
    if growth_s <= 0:
        return elapsed_s / first_s
    return 2 * elapsed_s / (first_s + math.sqrt(first_s**2 + 2 * growth_s * elapsed_s))
