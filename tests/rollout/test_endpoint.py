"""Agent programs through the endpoint, with the real SDKs and a scripted engine."""

import numpy as np

from . import chats
from .agents import openai_client, run_agent, user

THINKING = "<think>\nall hell\n</think>\n\nab<|im_end|>"


async def talk(task, llm):
    """Three turns, each repeating what the model answered."""
    async with openai_client(llm) as client:
        messages = [user("ab?")]
        for text in ("one", "two", None):
            response = await client.chat.completions.create(model=llm.model, messages=messages)
            messages.append(response.choices[0].message.model_dump())
            if text:
                messages.append(user(text))
    return 1.0


def test_every_call_is_a_step_and_sampled_turns_keep_their_tokens():
    # Another tokenization than the tokenizer's own: "ab" as two tokens.
    letters = [chats.ids("qwen3", letter)[0] for letter in "ab"]
    reply = [*letters, *chats.ids("qwen3", "<|im_end|>")]
    trajectory, script, renderer = run_agent(talk, reply, routing=True)
    assert trajectory.stop_reason == "done" and trajectory.env_metrics == {}
    assert (trajectory.group_id, trajectory.index) == (4, 2)
    assert [s.reward for s in trajectory.steps] == [0.0, 0.0, 1.0]
    assert len(trajectory.steps) == len(script.calls) == 3
    for before, step in zip(trajectory.steps, trajectory.steps[1:]):
        sequence = np.concatenate([before.prompt_ids, before.response_ids])
        assert step.prompt_ids[: len(sequence)].tolist() == sequence.tolist()
        assert step.routing_start == len(sequence) - 1
    for step, (prompt, _, session, _) in zip(trajectory.steps, script.calls):
        assert step.prompt_ids.tolist() == prompt.tolist()
        assert step.response_ids.tolist() == reply and step.loss_mask.all()
        assert step.logprobs.tolist() == [-1, -2, -3] and step.versions.tolist() == [[3, 3]]
        assert tuple(session) == ("test/4", 2)
    whole = renderer.tokenizer.decode(trajectory.steps[2].prompt_ids)
    assert whole == "".join(
        f"<|im_start|>{role}\n{text}" + ("<|im_end|>\n" if text else "")
        for role, text in [
            ("user", "ab?"),
            ("assistant", "ab"),
            ("user", "one"),
            ("assistant", "ab"),
            ("user", "two"),
            ("assistant", ""),
        ]
    )
