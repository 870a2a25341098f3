"""The recording of one episode of an agent program: every answered call is a Step.

    endpoint ── ModelCall ──► Recording.answer ── prompt ids ──► generate
             ◄── Answer ────  a Step: exact ids, logprobs, routing, version

Calls may run in parallel and belong to sub-agents; histories may be rewritten. Steps are in the
order in which their calls reached the engine, and nothing is linearized: the trie shares what their
prompts share. A call takes its prompt's routing from any step that was complete when it began.

A call is context, with a loss mask of False, where its tokens are no samples of the policy that is
trained, or where nobody read them (`untrained` counts the calls by these words):

    temperature, top_p, top_k   differ from the run's
    sampling                    a penalty, logit bias or another parameter of vLLM
    forced_tool                 the response had to begin with the call of a tool
    role                        agent.roles leaves it out
    aborted                     the client went away, or the call failed after the sampling
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megastep.errors import RenderError
from megastep.rollout.agent import Limits, Recorded, call_seed, make_step
from megastep.rollout.calls import Answer, CallError, Choice, ModelCall, ToolCall, bad_request
from megastep.rollout.encoding import LONG_CHARS, encoding_thread
from megastep.rollout.env import Message
from megastep.rollout.generation import Generate, Generation, Sampling, Session
from megastep.rollout.parsers import Parsers
from megastep.rollout.renderer import Renderer
from megastep.rollout.turns import Rendered, SampledTurns
from megastep.samples.prefix import shared_tokens
from megastep.text import describe
from megastep.types import FinishReason, Step, StopReason

_END_OF_PROMPT = 16  # tokens: enough for the mark that opens the reasoning
_COMPARED = 16  # steps, the latest, whose tokens a prompt may share by reference


@dataclass(frozen=True)
class Model:
    """What answers the calls of all episodes of a pool."""

    generate: Generate
    renderer: Renderer
    parsers: Parsers
    limits: Limits
    sampling: Sampling  # of the run
    seed: int | str
    vocab: int
    max_tokens: int | None = None  # sampled tokens per episode
    roles: tuple[str, ...] = ()  # trained ones; empty: all


@dataclass(eq=False)
class _Call:
    """A step and where it belongs; `step` is None until the engine has answered."""

    id: str
    role: str | None
    step: Step | None = None


class Recording:
    def __init__(self, model: Model, group_id: int, index: int, session: Session):
        self.model = model
        self.group_id = group_id
        self.index = index
        self.session = session
        self.untrained: Counter[str] = Counter()  # calls by reason
        self.exceeded: StopReason | None = None  # a limit that a call ran into
        self.engine_error: str | None = None
        self._turns = SampledTurns(model.renderer)
        self._recorded = Recorded()
        self._calls: list[_Call] = []
        self._complete: list[Step] = []  # in the order of completion
        self._begun = 0
        self._sampled_tokens = 0

    # ------------------------------------------------------------ calls

    async def answer(self, call: ModelCall) -> Answer:
        """Raises CallError for a call that cannot be answered."""
        self._check_id(max(call.extra.get("logit_bias", [0])), "logit_bias")
        self._check_limits(call)
        rendered = await self._rendered(call)
        self._check_prompt(rendered.ids)
        self._check_limits(call)  # other calls may have begun in the meantime
        self._begun += call.choices
        answer_id = secrets.token_hex(12)
        try:
            return await self._answer(answer_id, call, rendered)
        except BaseException:
            self.drop(answer_id)  # some choices may have been sampled
            raise

    async def _answer(self, answer_id: str, call: ModelCall, rendered: Rendered) -> Answer:
        names = [answer_id, *(f"{answer_id}/{i}" for i in range(1, call.choices))]
        samples = [asyncio.ensure_future(self._sample(call, rendered, name)) for name in names]
        try:
            generations = await asyncio.gather(*samples)
        finally:
            for sample in samples:
                sample.cancel()
        choices = [await self._choice(call, rendered, *found) for found in generations]
        self.exceeded = None
        self.engine_error = None
        cached = generations[0][1].cached_tokens
        return Answer(answer_id, len(rendered.ids), cached, choices)

    async def prompt_tokens(self, call: ModelCall) -> int:
        """Of a call that is not made."""
        return len((await self._rendered(call)).ids)

    def _check_limits(self, call: ModelCall) -> None:
        most = self.model.limits.max_turns
        if self._begun + call.choices > most:
            self.exceeded = StopReason.MAX_TURNS
            raise CallError(
                429, f"the episode has made rollout.max_turns = {most} calls", "max_turns"
            )
        if self._tokens_left() < 1:
            self.exceeded = StopReason.MAX_TURNS
            raise CallError(
                429,
                f"the episode has sampled agent.max_tokens = {self.model.max_tokens} tokens",
                "max_tokens",
            )

    def _tokens_left(self) -> int:
        most = self.model.max_tokens
        return 2**31 if most is None else most - self._sampled_tokens

    async def _rendered(self, call: ModelCall) -> Rendered:
        """In a thread if it takes long: every other episode shares the event loop."""
        try:
            if call.chars < LONG_CHARS:
                return self._prompt(call)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(encoding_thread(), self._prompt, call)
        except RenderError as error:
            raise bad_request(str(error)) from None

    def _prompt(self, call: ModelCall) -> Rendered:
        if call.messages is not None:
            return self._turns.prompt(call.messages, call.tools, call.forced_tool)
        if isinstance(call.prompt, str):
            rendered = self._turns.text_prompt(call.prompt)
        else:
            assert call.prompt is not None
            self._check_id(int(call.prompt.max(initial=0)), "prompt")
            rendered = Rendered(call.prompt, call.prompt.tobytes(), None)
        if not len(rendered.ids):
            raise bad_request("prompt is empty; at least one token is needed")
        return rendered

    def _check_id(self, highest: int, where: str) -> None:
        if highest >= self.model.vocab:
            raise bad_request(
                f"{where} has the token id {highest}; the vocabulary ends at {self.model.vocab - 1}"
            )

    def _check_prompt(self, prompt_ids: np.ndarray) -> None:
        most = self.model.limits.max_prompt_tokens
        if len(prompt_ids) > most:
            self.exceeded = StopReason.CONTEXT if self._calls else StopReason.FIRST_PROMPT
            raise CallError(
                400,
                f"This model's maximum context length is {most} prompt tokens; the messages have "
                f"{len(prompt_ids)} (context length exceeded)",
                "context_length_exceeded",
            )

    async def _sample(
        self, call: ModelCall, rendered: Rendered, name: str
    ) -> tuple[Step, Generation, str | None]:
        """The step, the engine's answer, and the stop text that ended it."""
        model = self.model
        prompt_ids = rendered.ids
        recorded = _Call(name, call.role)
        self._calls.append(recorded)
        # From here to the engine without an await: a later call finds fewer complete steps.
        sampling = self._sampling(call, len(self._calls) - 1)
        try:
            generation = await model.generate(
                prompt_ids,
                sampling,
                session=self.session,
                routing_start=self._recorded.tokens(prompt_ids),
                routing_version=self._recorded.version,
            )
        except asyncio.CancelledError:
            self.untrained["aborted"] += 1
            raise
        except Exception as error:
            self.engine_error = describe(error)
            raise CallError(500, f"the engine failed: {describe(error)}") from None
        generation, stop = cut_at_stop(generation, call.stop, len(prompt_ids), model.renderer)
        step = make_step(0, prompt_ids, generation, model.renderer)
        self._keep(recorded, call, step, generation, rendered.base)
        if generation.finish == FinishReason.ABORT:
            self.engine_error = "the engine aborted the call"
            raise CallError(500, "the engine aborted the call")
        return step, generation, stop

    def _keep(
        self,
        recorded: _Call,
        call: ModelCall,
        step: Step,
        generation: Generation,
        base: Step | None,
    ) -> None:
        reason = self._untrained_reason(call)
        if reason is not None:
            self._leave_out(step, reason)
        self._recorded.add(step, generation)
        self._share_prefix(step, base)
        self._sampled_tokens += len(generation.ids)
        self._complete.append(step)
        recorded.step = step

    def _sampling(self, call: ModelCall, number: int) -> Sampling:
        model = self.model
        # One token less: a truncated response gets an end-of-turn token appended.
        most = min(model.limits.max_response_tokens - 1, self._tokens_left())
        wanted = most if call.max_tokens is None else call.max_tokens
        given = {
            name: getattr(call, name)
            for name in ("temperature", "top_p", "top_k", "seed")
            if getattr(call, name) is not None
        }
        sampling = replace(
            model.sampling,
            max_tokens=max(1, min(wanted, most)),
            stop_token_ids=model.renderer.stop_ids,
            seed=call_seed(model.seed, self.group_id, self.index, number),
            extra=call.extra,
        )
        return replace(sampling, **given)

    def _untrained_reason(self, call: ModelCall) -> str | None:
        for name in ("temperature", "top_p", "top_k"):
            given = getattr(call, name)
            if given is not None and given != getattr(self.model.sampling, name):
                return name
        if call.extra:
            return "sampling"
        if call.forced_tool is not None:
            return "forced_tool"
        if self.model.roles and call.role not in self.model.roles:
            return "role"
        return None

    def _leave_out(self, step: Step, reason: str) -> None:
        """Make a step context."""
        step.loss_mask = np.zeros(len(step.response_ids), bool)
        self.untrained[reason] += 1

    def _share_prefix(self, step: Step, base: Step | None) -> None:
        """Store the prompt's beginning as a reference to the step that shares the most of it."""
        candidates = [base] if base is not None else self._complete[-_COMPARED:]
        shared = [(shared_tokens(other, step.prompt_ids), other) for other in candidates]
        if shared:
            count, other = max(shared, key=lambda found: found[0])
            step.share_prefix(other, count)

    # ------------------------------------------------------------ responses

    async def _choice(
        self,
        call: ModelCall,
        rendered: Rendered,
        step: Step,
        generation: Generation,
        stop: str | None,
    ) -> Choice:
        renderer = self.model.renderer
        text = renderer.text(generation.ids)
        if stop is not None:
            text = text[: text.find(stop)]
        if call.messages is None:
            if isinstance(call.prompt, str) and stop is None:
                self._turns.add_text(call.prompt, text, step)
            return _plain_choice(text, call, generation, stop, renderer)
        before = renderer.tokenizer.decode(
            rendered.ids[-_END_OF_PROMPT:], skip_special_tokens=False
        )
        parsed = await self.model.parsers.parse(rendered.opening + text, before, call.tools)
        choice = _plain_choice(parsed.text, call, generation, stop, renderer)
        choice.reasoning = parsed.reasoning
        choice.tool_calls = parsed.tool_calls
        if parsed.tool_calls and choice.finish == "stop":
            choice.finish = "tool_calls"
        if call.forced_tool is None:
            self._turns.add(rendered, _as_message(choice), step)
        return choice

    def drop(self, answer_id: str) -> None:
        """Nobody read the answer to the end: its steps are context."""
        for call in self._calls:
            name, _, _ = call.id.partition("/")
            if name == answer_id and call.step is not None and call.step.loss_mask.any():
                self._leave_out(call.step, "aborted")

    # ------------------------------------------------------------ the trajectory

    @property
    def calls(self) -> list[tuple[str, str | None, Step]]:
        """Id, role and step of each answered call, in the order of arrival."""
        return [(call.id, call.role, call.step) for call in self._calls if call.step is not None]

    def steps(self) -> list[Step]:
        """Numbered; the last one is marked."""
        steps = [step for _, _, step in self.calls]
        for index, step in enumerate(steps):
            step.index = index
        if steps:
            steps[-1].last = True
        return steps

    def metrics(self) -> dict[str, Any]:
        """Roles per step, and the number of calls that are not trained by reason."""
        metrics: dict[str, Any] = {}
        roles = [role for _, role, _ in self.calls]
        if any(roles):
            metrics["roles"] = roles
        if self.untrained:
            metrics["untrained"] = dict(self.untrained)
        return metrics


def _plain_choice(
    text: str, call: ModelCall, generation: Generation, stop: str | None, renderer: Renderer
) -> Choice:
    ids = generation.ids.tolist()
    tokens = []
    if call.logprobs:
        tokens = [renderer.tokenizer.decode([id], skip_special_tokens=False) for id in ids]
    is_stop = stop is not None or generation.finish == FinishReason.STOP
    return Choice(
        text=text,
        reasoning="",
        tool_calls=[],
        finish="stop" if is_stop else "length",
        stop=stop,
        tokens=tokens,
        ids=ids,
        logprobs=generation.logprobs.tolist(),
    )


def _as_message(choice: Choice) -> Message:
    """The response as a client repeats it."""
    message: Message = {"role": "assistant", "content": choice.text}
    if choice.tool_calls:
        message["tool_calls"] = [as_openai(call) for call in choice.tool_calls]
    return message


def as_openai(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


# ---------------------------------------------------------------- stop texts


def cut_at_stop(
    generation: Generation, stops: Sequence[str], prompt_tokens: int, renderer: Renderer
) -> tuple[Generation, str | None]:
    """The generation up to the token that completes the first stop text, and that text.

    The engine knows no texts: it samples to the end, and what follows the stop text is dropped.
    """
    text = renderer.text(generation.ids) if stops else ""
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return generation, None
    _, stop = min(found)
    ids = generation.ids
    low, high = 1, len(ids)  # the fewest tokens whose text has the stop text
    while low < high:
        middle = (low + high) // 2
        if stop in renderer.tokenizer.decode(ids[:middle], skip_special_tokens=False):
            high = middle
        else:
            low = middle + 1
    return _first_tokens(generation, low, prompt_tokens), stop


def _first_tokens(generation: Generation, count: int, prompt_tokens: int) -> Generation:
    runs = []
    left = count
    for version, tokens in generation.versions.tolist():
        if left > 0:
            runs.append((version, min(tokens, left)))
        left -= tokens
    routing = generation.routing
    if routing is not None:
        # The engine never forwards the last token it samples.
        routing = routing[: max(prompt_tokens + count - 1 - generation.routing_start, 0)]
    return replace(
        generation,
        ids=generation.ids[:count],
        logprobs=generation.logprobs[:count],
        versions=np.array(runs, np.int32).reshape(-1, 2),
        finish=FinishReason.STOP,
        routing=routing,
    )
