"""S6: token in, token out; and history rendered as the template has it, thinking dropped where it drops it."""

import numpy as np
import pytest

from megastep.rollout.renderer import Renderer, RenderError, load_tokenizer

from . import chats

QUESTION = [{"role": "user", "content": "ab?"}]
OBSERVED = [{"role": "user", "content": "abab, yes"}]
THOUGHT = "<think>\nall hell\n</think>\n\nab"
SPOKEN = {
    "qwen3": THOUGHT + "<|im_end|>",
    "gpt_oss": "<|channel|>analysis<|message|>all hell<|end|>"
    "<|start|>assistant<|channel|>final<|message|>ab<|return|>",
}
QWEN3_START = "<|im_start|>user\nab?<|im_end|>\n<|im_start|>assistant\n"


def renderer(kind, mode, **more) -> Renderer:
    return Renderer(chats.tokenizer(kind), mode, **more)


def shown(r: Renderer, prompt_ids) -> str:
    return r.tokenizer.decode(prompt_ids.tolist())


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_s6_tokens_mode_appends_to_what_was_sampled(kind):
    r = renderer(kind, "tokens")
    history = r.history(QUESTION)
    for turn in range(3):
        before = history.prompt_ids
        sampled = chats.ids(r, SPOKEN[kind])
        history.extend(sampled, OBSERVED)
        assert history.prompt_ids.dtype == np.int32
        assert history.prompt_ids[: len(before)].tolist() == before.tolist()
        assert history.prompt_ids[len(before) :][: len(sampled)].tolist() == sampled.tolist()
    after = history.prompt_ids[len(before) + len(sampled) :]
    expected = {
        "qwen3": "\n<|im_start|>user\nabab, yes<|im_end|>\n<|im_start|>assistant\n",
        "gpt_oss": "<|start|>user<|message|>abab, yes<|end|><|start|>assistant",
    }
    assert shown(r, after) == expected[kind]


def test_s6_tokens_mode_never_tokenizes_again_what_the_model_said():
    """`a`, `b` sampled one by one would come back as the one token `ab`, if they went through text."""
    r = renderer("qwen3", "tokens")
    apart = np.array([*chats.ids(r, "a"), *chats.ids(r, "b"), r.end_id], np.int32)
    assert chats.ids(r, r.text(apart)).tolist() != apart[:-1].tolist()
    history = r.history(QUESTION)
    begin = len(history.prompt_ids)
    history.extend(apart, OBSERVED)
    assert history.prompt_ids[begin : begin + 3].tolist() == apart.tolist()


def test_s6_tokens_mode_equals_rendering_everything_where_nothing_is_dropped():
    """With tokens as the tokenizer would choose them and no thinking, both ways give the same prompt."""
    prompts = []
    for mode in ("tokens", "chat"):
        r = renderer("qwen3", mode)
        history = r.history([{"role": "system", "content": "hello"}, *QUESTION])
        history.extend(chats.ids(r, "abab<|im_end|>"), OBSERVED)
        history.extend(chats.ids(r, "all<|im_end|>"), OBSERVED)
        prompts.append(shown(r, history.prompt_ids))
    assert prompts[0] == prompts[1]


def test_s6_chat_mode_drops_thinking_as_qwen3_does():
    r = renderer("qwen3", "chat")
    history = r.history(QUESTION)
    assert shown(r, history.prompt_ids) == QWEN3_START
    history.extend(chats.ids(r, SPOKEN["qwen3"]), OBSERVED)
    assert shown(r, history.prompt_ids) == (
        QWEN3_START + "ab<|im_end|>\n<|im_start|>user\nabab, yes<|im_end|>\n<|im_start|>assistant\n"
    )


def test_s6_chat_mode_keeps_thinking_until_the_next_question():
    """A tool's answer is no question: the template keeps the thinking, and drops it once the user speaks again."""
    r = renderer("qwen3", "chat")
    history = r.history(QUESTION)
    history.extend(chats.ids(r, SPOKEN["qwen3"]), [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}])
    tools = "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    assert shown(r, history.prompt_ids) == (
        QWEN3_START + THOUGHT + "<|im_end|>\n" + tools + "<|im_start|>assistant\n"
    )
    history.extend(chats.ids(r, SPOKEN["qwen3"]), OBSERVED)
    assert "all hell" not in shown(r, history.prompt_ids)


def test_s6_chat_mode_drops_thinking_as_gpt_oss_does():
    r = renderer("gpt_oss", "chat")
    assert r.message(chats.ids(r, SPOKEN["gpt_oss"])) == {"role": "assistant", "content": "ab", "thinking": "all hell"}
    history = r.history(QUESTION)
    history.extend(chats.ids(r, SPOKEN["gpt_oss"]), OBSERVED)
    assert shown(r, history.prompt_ids) == (
        "<|start|>system<|message|>You are helpful.<|end|><|start|>user<|message|>ab?<|end|>"
        "<|start|>assistant<|channel|>final<|message|>ab<|end|>"
        "<|start|>user<|message|>abab, yes<|end|><|start|>assistant"
    )


def test_gpt_oss_thinking_that_never_reached_an_answer():
    r = renderer("gpt_oss", "chat")
    cut_off = chats.ids(r, "<|channel|>analysis<|message|>all hell")
    assert r.message(cut_off) == {"role": "assistant", "content": "", "thinking": "all hell"}


def test_text_is_without_the_token_that_ended_it():
    r = renderer("qwen3", "tokens")
    assert r.text(chats.ids(r, SPOKEN["qwen3"])) == THOUGHT
    assert r.text(np.array([], np.int32)) == ""


def test_no_observation_still_calls_for_the_next_turn():
    r = renderer("qwen3", "tokens")
    assert shown(r, r.after_response([])) == "\n<|im_start|>assistant\n"


def test_options_reach_the_template():
    r = renderer("qwen3", "tokens", options={"enable_thinking": False})
    assert shown(r, r.prompt_ids(QUESTION)).endswith("assistant\n<think>\n\n</think>\n\n")
    assert shown(r, r.after_response(OBSERVED)).endswith("assistant\n<think>\n\n</think>\n\n")


def test_template_that_cannot_be_appended_to():
    with pytest.raises(RenderError, match="template does not close the model's turn.*; write rollout.mode: chat"):
        renderer("open_ended", "tokens")
    assert len(renderer("open_ended", "chat").prompt_ids(QUESTION))


def test_messages_that_the_template_refuses():
    r = renderer("gpt_oss", "tokens")
    with pytest.raises(RenderError, match="refuses messages of user, assistant, tool: a tool message needs"):
        r.after_response([{"role": "tool", "content": "1"}])


def test_loading(tmp_path):
    with pytest.raises(RenderError, match="has no tokenizer; one of tokenizer.json"):
        load_tokenizer("configs/models/tiny-qwen3-moe")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(RenderError, match="its tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)
    made = chats.tokenizer("gpt_oss")
    made.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 260]}')
    r = Renderer.for_model(tmp_path, "chat")
    assert r.stop_ids == tuple(sorted({5, 260, made.eos_token_id})) and r.end_id == made.eos_token_id
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(RenderError, match="has no chat template"):
        load_tokenizer(tmp_path)
