"""Prompts of agents' calls: which tokens are reused, and what is rendered after them."""

import numpy as np
import pytest

from megastep.errors import RenderError
from megastep.rollout.renderer import Renderer
from megastep.rollout.turns import SampledTurns
from megastep.types import Step

from . import chats
from .agents import user

# As Mistral's and gpt-oss's: a tool message without a call before it is an error.
STRICT = "{%- for m in messages %}{%- if m.role == 'tool' and not messages[loop.index0 - 1]."
STRICT += "tool_calls %}{{ raise_exception('no call') }}{%- endif %}{%- endfor %}" + chats.HERMES
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "<|im_end|>"}}}
TURN = {"role": "assistant", "content": "so", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "found"}


def step_of(renderer, messages, response: str) -> Step:
    """A step whose response is spelled letter by letter."""
    ids = [chats.ids(renderer, letter)[0] for letter in response]
    return Step(
        index=0,
        last=True,
        prompt_ids=renderer.prompt_ids(messages),
        response_ids=np.array([*ids, renderer.end_id], np.int32),
        loss_mask=np.ones(len(ids) + 1, bool),
        logprobs=None,
        versions=np.array([[0, len(ids) + 1]], np.int32),
    )


def strict_renderer() -> Renderer:
    tokenizer = chats.tokenizer("hermes")
    tokenizer.chat_template = STRICT
    return Renderer(tokenizer, "tokens")


def test_a_template_that_wants_the_call_before_its_result():
    renderer = strict_renderer()
    with pytest.raises(RenderError, match="no call"):
        renderer.after_response([RESULT])
    turns = SampledTurns(renderer)
    first = turns.prompt([user("ab?")], [])
    step = step_of(renderer, [user("ab?")], "abab")
    turns.add(first, TURN, step)
    rendered = turns.prompt([user("ab?"), TURN, RESULT, user("go")], [])
    sequence = [*step.prompt_ids, *step.response_ids]
    assert rendered.base is step and rendered.ids[: len(sequence)].tolist() == sequence
    after = renderer.tokenizer.decode(rendered.ids[len(sequence) :])
    assert after == (
        "\n<|im_start|>tool\nfound<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"refusal": None, "annotations": [], "function_call": None}, True),  # of the SDK
        ({"content": " so\n"}, True),  # clients trim responses
        ({"reasoning_content": "hm"}, True),
        ({"content": "so?"}, False),
        ({"tool_calls": []}, False),
        ({"tool_calls": [CALL, CALL]}, False),
        ({"role": "user"}, False),
    ],
)
def test_which_messages_are_the_sampled_one(change, same):
    renderer = Renderer(chats.tokenizer("hermes"), "tokens")
    turns = SampledTurns(renderer)
    step = step_of(renderer, [user("ab?")], "abab")
    turns.add(turns.prompt([user("ab?")], []), TURN, step)
    again = turns.prompt([user("ab?"), TURN | change, RESULT], [])
    assert (again.base is step) == same
    as_text = CALL | {"function": {"name": "f", "arguments": '{"x":"<|im_end|>"}'}}
    assert turns.prompt([user("ab?"), TURN | {"tool_calls": [as_text]}], []).base is step


def test_another_history_is_another_conversation():
    renderer = Renderer(chats.tokenizer("hermes"), "tokens")
    turns = SampledTurns(renderer)
    step = step_of(renderer, [user("ab?")], "abab")
    turns.add(turns.prompt([user("ab?")], []), TURN, step)
    tool = {"type": "function", "function": {"name": "f"}}
    assert turns.prompt([user("ab!"), TURN, RESULT], []).base is None
    assert turns.prompt([user("x"), user("ab?"), TURN, RESULT], []).base is None
    assert turns.prompt([user("ab?"), TURN, RESULT], [tool]).base is None
    assert turns.prompt([user("ab?"), TURN, RESULT], []).base is step
