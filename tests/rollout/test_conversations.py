"""Conversations as demonstrations: warm_start.data."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megastep.config import load
from megastep.errors import DataError, RenderError
from megastep.rollout.conversations import demonstration, read_conversations
from megastep.rollout.renderer import Renderer
from megastep.rollout.task import Task
from tests.rollout.chats import tokenizer

USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "good day"}
MORE = {"role": "user", "content": "and now"}
LAST = {"role": "assistant", "content": "good night"}
CALL = {"function": {"name": "add", "arguments": {"a": 1, "b": None}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def renderer_of(kind: str, mode: str) -> Renderer:
    return Renderer(tokenizer(kind), mode)


def texts(group, renderer) -> list[tuple[str, str]]:
    """(prompt, response) of every step."""
    decode = renderer.tokenizer.decode
    return [(decode(s.prompt_ids), decode(s.response_ids)) for s in group.trajectories[0].steps]


@pytest.mark.parametrize("mode", ["tokens", "chat"])
def test_every_assistant_turn_is_a_trained_step(mode):
    renderer = renderer_of("qwen3", mode)
    group = demonstration(7, [USER, ANSWER, MORE, LAST], renderer)
    steps = group.trajectories[0].steps
    (_, first), (second_prompt, second) = texts(group, renderer)
    end = renderer.tokenizer.decode([renderer.end_id])
    assert (first, second) == (f"good day{end}", f"good night{end}")
    assert "good day" in second_prompt and "and now" in second_prompt
    assert [step.last for step in steps] == [False, True]
    assert all(step.loss_mask.all() and step.logprobs is None for step in steps)
    assert steps[0].prompt_ids.tolist() == renderer.prompt_ids([USER]).tolist()
    if mode == "tokens":  # the next prompt extends prompt and response
        before = np.concatenate([steps[0].prompt_ids, steps[0].response_ids])
        assert steps[1].prompt_ids[: len(before)].tolist() == before.tolist()


def test_messages_after_the_last_turn_are_left_out_and_weight_0_is_context():
    renderer = renderer_of("qwen3", "tokens")
    group = demonstration(0, [USER, ANSWER | {"weight": 0}, MORE, LAST, MORE], renderer)
    masks = [step.loss_mask for step in group.trajectories[0].steps]
    assert [mask.all() for mask in masks] == [False, True] and not masks[0].any()


def test_control_tokens_of_prompts_stay_text():
    renderer = renderer_of("qwen3", "tokens")
    end = renderer.tokenizer.decode([renderer.end_id])
    plain = demonstration(0, [USER, ANSWER], renderer)
    group = demonstration(0, [{"role": "user", "content": f"hello{end}"}, ANSWER], renderer)
    counts = [
        np.count_nonzero(g.trajectories[0].steps[0].prompt_ids == renderer.end_id)
        for g in (plain, group)
    ]
    assert counts[0] == counts[1]


def test_tool_calls_are_written_by_the_template():
    renderer = renderer_of("hermes", "tokens")
    group = demonstration(0, [USER, CALLING], renderer.with_options(tools=TOOLS))
    ((prompt, response),) = texts(group, renderer)
    assert "add" in prompt and '"name": "add"' in response and '"a": 1' in response
    assert response.endswith(renderer.tokenizer.decode([renderer.end_id]))
    assert "add" not in renderer.tokenizer.decode(renderer.prompt_ids([USER]))


def test_a_control_token_in_an_argument_does_not_end_the_turn():
    renderer = renderer_of("hermes", "tokens")
    call = {"function": {"name": "add", "arguments": {"a": "so <|im_end|> it is"}}}
    group = demonstration(0, [USER, CALLING | {"tool_calls": [call]}], renderer)
    response_ids = group.trajectories[0].steps[0].response_ids
    assert "it is" in renderer.tokenizer.decode(response_ids)
    assert np.count_nonzero(response_ids == renderer.end_id) == 1


def test_the_tokenizers_eos_must_end_a_turn():
    """As of base models: the model would learn to end its turns with another token."""
    base = tokenizer("hermes")
    base.eos_token = "<|endoftext|>"
    renderer = Renderer(base, "tokens")
    with pytest.raises(RenderError, match=r"ends a turn with <\|im_end\|>.*is <\|endoftext\|>"):
        demonstration(0, [USER, ANSWER], renderer)


# ---------------------------------------------------------------- files


IN_USER_MESSAGE = """\
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if tools and m.role == 'user' %}{{- tools | tojson }}{% endif %}
    {{- m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


def test_tools_may_be_shown_after_the_system_message(tmp_path):
    like_llama = tokenizer("hermes")
    like_llama.chat_template = IN_USER_MESSAGE
    renderer = Renderer(like_llama, "tokens")
    system = {"role": "system", "content": "be brief"}
    row = {"messages": [system, USER, ANSWER], "tools": TOOLS}
    (tmp_path / "chats.jsonl").write_text(json.dumps(row))
    (group,) = read_conversations(str(tmp_path / "chats.jsonl"), renderer)
    ((prompt, _),) = texts(group, renderer)
    assert "add" in prompt


def test_json_lines_and_parquet_give_the_same_steps(tmp_path):
    renderer = renderer_of("qwen3", "tokens")
    rows = [{"messages": [USER, ANSWER | {"weight": 1}]}, {"messages": [USER, LAST, MORE, ANSWER]}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chats.parquet")
    from_lines, from_parquet = (
        read_conversations(str(tmp_path / f"chats.{kind}"), renderer)
        for kind in ("jsonl", "parquet")
    )
    assert [texts(g, renderer) for g in from_lines] == [texts(g, renderer) for g in from_parquet]
    assert [len(g.trajectories[0].steps) for g in from_lines] == [1, 2]
    assert len(read_conversations(str(tmp_path / "chats.jsonl"), renderer, limit=1)) == 1


def test_arguments_of_calls_in_files(tmp_path):
    """JSON text is parsed, as OpenAI writes it; Parquet's nulls are not arguments."""
    renderer = renderer_of("hermes", "tokens")

    def calling(arguments) -> dict:
        call = {"function": {"name": "add", "arguments": arguments}}
        return {"messages": [USER, CALLING | {"tool_calls": [call]}], "tools": TOOLS}

    rows = [calling('{"a": 1}'), calling({"a": 1}), calling({"a": None})]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    as_text, as_object, with_null = (
        texts(group, renderer)[0][1]
        for group in read_conversations(str(tmp_path / "chats.jsonl"), renderer)
    )
    assert as_text == as_object and '"arguments": {"a": 1}' in as_object
    assert '"arguments": {"a": null}' in with_null
    table = pa.Table.from_pylist([calling({"a": 1}), calling({"b": 2})])
    pq.write_table(table, tmp_path / "chats.parquet")
    first, second = read_conversations(str(tmp_path / "chats.parquet"), renderer)
    assert texts(first, renderer)[0][1] == as_object
    assert '"arguments": {"b": 2}' in texts(second, renderer)[0][1]


def test_a_file_that_trains_nothing_is_an_error(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [USER, ANSWER | {"weight": 0}]}))
    with pytest.raises(DataError, match="every assistant message has weight 0"):
        read_conversations(str(path), renderer_of("qwen3", "tokens"))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({}, "column messages"),
        ({"messages": "hello"}, "column messages"),
        ({"messages": []}, "column messages"),
        ({"messages": [ANSWER]}, "message 1: is the assistant's"),
        ({"messages": [USER]}, "no message is the assistant's"),
        ({"messages": ["hello"]}, "message 1: needs the form"),
        ({"messages": [{"content": "x"}]}, "message 1: needs the form"),
        ({"messages": [USER, {"role": "assistant"}]}, "message 2: its content is not text"),
        ({"messages": [USER, {"role": "assistant", "content": 3}]}, "its content is not text"),
        ({"messages": [USER, ANSWER | {"weight": 0.5}]}, "weight = 0.5"),
        ({"messages": [USER, ANSWER], "tools": "add"}, "column tools: a list"),
        ({"messages": [USER, ANSWER], "tools": [{}]}, "column tools: the chat template does not"),
        ({"messages": [USER, ANSWER | {"thinking": "hm"}]}, "message 2: thinking: not trained"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [3]}]}, "tool_calls needs"),
        ({"messages": [USER, CALLING]}, "the chat template does not write tool calls"),
        ({"messages": [{"role": "user", "content": "\ud800"}, ANSWER]}, "lone surrogate"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, problem):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [USER, ANSWER]}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError, match="jsonl:2: .*" + problem):
        read_conversations(str(path), renderer_of("qwen3", "tokens"))


def test_warm_start_data_takes_the_place_of_the_environments_demonstrations(tmp_path):
    user = {"role": "user", "content": "hops 1 from 2"}
    rows = [{"messages": [user, {"role": "assistant", "content": f"answer {i}"}]} for i in (3, 4)]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [f"warm_start.data={path}", "warm_start.trajectories=0"]
    task = Task.load(load("configs/chase.yaml", given))
    first_only = load("configs/chase.yaml", [given[0], "warm_start.trajectories=1"])
    assert len(Task.load(first_only).demonstrations()) == 1
    assert [text for g in task.demonstrations() for _, text in texts(g, task.renderer)] == [
        "answer 3 <eot>",
        "answer 4 <eot>",
    ]
