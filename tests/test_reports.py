"""X19: silent bugs that users of other trainers reported, each with its scenario on this trainer.

Each docstring has what happened there, then what is checked here; docs/reports.md is the list, with
the reasons. Those of weight sync are in tests/sync/test_receiver.py.
"""

import asyncio
import re
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from megastep.checkpoint.loop_state import LoopState
from megastep.config import load, training_problems
from megastep.errors import CheckpointError, ConfigError, DataError, StoreError
from megastep.rollout.agent import Agent, Limits
from megastep.rollout.data import PromptStream
from megastep.rollout.env import Env, Outcome
from megastep.rollout.generation import Sampling
from megastep.rollout.pool import LocalPool
from megastep.rollout.renderer import Renderer
from megastep.rollout.stream import GroupStream
from megastep.samples import filters, lay_out, make_samples, store
from megastep.samples.trie import PACK_LAYOUTS, fold
from megastep.trainer.saved_rollouts import read_batches
from megastep.types import Group
from tests import cases
from tests.policy.updates import LAYERS, TOP_K, make_groups, plain_logprobs, steps_of
from tests.rollout import chats
from tests.runs import LOCAL
from tests.samples.rollouts import group_of, rows_of, samples_of, trajectory
from tests.trainer.test_loop import Versioned, make_loop
from tests.trainer.test_rundir import checkpoint, find

every_pack_layout = pytest.mark.parametrize("pack_layout", PACK_LAYOUTS)


# ---------------------------------------------------------------- advantages and weights


def fanned_out() -> Group:
    """A trajectory of three model calls, the first the longest, with reward 1; and one of a single
    call with reward 0. The second call follows the first, the third has a rewritten history."""
    many = trajectory(
        ([1, 2], [3, 4, 5, 6, 7, 8]),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 11]),
        ([1, 12], [13]),
        rewards=[0.0, 0.0, 1.0],
    )
    return group_of(many, trajectory(([1, 2], [14, 15, 16]), rewards=[0.0]))


def loss_tables(group: Group, estimator: str, reduction: str, pack_layout: str) -> list:
    samples = make_samples([group], estimator, reduction)
    micro_batches, _ = lay_out(samples, 1, budget_tokens=64, pack_layout=pack_layout)
    return [micro_batch.trie.loss for micro_batch in micro_batches[0]]


@every_pack_layout
def test_x19_skyrl_1492_every_step_has_its_advantage_at_its_own_tokens(pack_layout):
    """There, all steps of a trajectory got the last step's tensor, in which the advantage stood at
    the tokens of the last step only. Here every trained token of every step has the advantage."""
    group = fanned_out()
    found = Counter()
    for loss in loss_tables(group, "grpo_nostd", "token", pack_layout):
        columns = (loss.trajectory, loss.step, loss.advantage)
        found.update(zip(*(column.tolist() for column in columns)))
    assert found == {(0, 0, 0.5): 6, (0, 1, 0.5): 2, (0, 2, 0.5): 1, (1, 0, -0.5): 3}


@pytest.mark.parametrize("estimator, high", [("grpo_nostd", 0.5), ("rloo", 1.0), ("maxrl", 1.0)])
def test_x19_slime_2300_a_trajectory_counts_once_in_its_baseline(estimator, high):
    """There, the rewards of three samples of one trajectory and one of another were [1, 1, 1, 0],
    and their mean the baseline. Here the baseline is the mean of the two trajectories."""
    samples = make_samples([fanned_out()], estimator, "token")
    assert [s.advantage for s in samples] == pytest.approx([high, high, high, -high], abs=1e-5)


@every_pack_layout
def test_x19_verl_7580_the_weight_of_a_trajectory_does_not_grow_with_its_samples(pack_layout):
    """There, a trajectory that became n samples had n times the weight in the loss. Here the
    trajectories have equal weights under `trajectory`, and weights by trained tokens under
    `token`, however many samples and sequences they became."""

    def weight_of_trajectories(reduction: str) -> list[float]:
        weights = np.zeros(2)
        for loss in loss_tables(fanned_out(), "grpo", reduction, pack_layout):
            np.add.at(weights, loss.trajectory, loss.weight)
        return weights.tolist()

    assert weight_of_trajectories("trajectory") == pytest.approx([0.5, 0.5])
    assert weight_of_trajectories("token") == pytest.approx([9 / 12, 3 / 12])


class Counts(Env):
    """Two turns; the second reward is 1, or 0 for sample 1. `fails`: sample 2 raises in turn 2."""

    columns = {}

    def __init__(self, row, fails=False):
        self.fails = fails
        self.turn = 0

    async def start(self):
        return [{"role": "user", "content": "ab?"}]

    async def step(self, text, ids):
        self.turn += 1
        if self.turn == 1:
            return Outcome([{"role": "user", "content": "and?"}], reward=0.0)
        if text == "fail" and self.fails:
            raise ConnectionError("the tool is gone")
        return Outcome(reward=0.0 if text == "no" else 1.0, done=True)


@pytest.mark.parametrize("who", ["engine", "environment"])
def test_x19_nemo_rl_3470_skyrl_1986_failed_episodes_are_not_in_the_baseline(who):
    """There, a rollout that failed was kept with reward 0, and lowered the baseline of the others.
    Here it is dropped before advantages are computed: those of the others are as without it."""
    renderer = Renderer(chats.tokenizer("qwen3"), "tokens")
    scripted = chats.ScriptedEngine(renderer, ["<|im_end|>"])

    async def generate(prompt_ids, sampling, *, session, **routing):
        is_second = "and?" in renderer.text(prompt_ids)
        if is_second and session.sample == 2 and who == "engine":
            raise ConnectionError("the engine is gone")
        reply = {1: "no", 2: "fail"}.get(session.sample, "yes") if is_second else "ab"
        scripted.replies = [reply + "<|im_end|>"]
        return await scripted(prompt_ids, sampling, session=session, **routing)

    agent = Agent(generate, renderer, Limits(4, 200, 40, 5.0), Sampling(max_tokens=0), seed=0)
    pool = LocalPool(agent, Counts, 4, 1, options={"fails": who == "environment"})
    groups = asyncio.run(pool.run(PromptStream([{}], seed=0).take(1)))
    assert [t.reward for t in groups[0].trajectories] == [1.0, 0.0, 0.0, 1.0]
    kept, dropped = filters.apply(groups, load(LOCAL, []))
    assert [d.trajectory for d in dropped] == [2] and "is gone" in dropped[0].reason
    found = {s.trajectory: s.advantage for s in make_samples(kept, "rloo", "token")}
    assert found == pytest.approx({0: 0.5, 1: -1.0, 3: 0.5})


# ---------------------------------------------------------------- tokens and logprobs


class Asks(Env):
    columns = {}

    async def start(self):
        self.turn = 0
        return [{"role": "user", "content": "ab?"}]

    async def step(self, text, ids):
        self.turn += 1
        return Outcome([{"role": "user", "content": "abab"}], reward=1.0, done=self.turn == 3)


def episode(mode: str, routing: bool = False, **sampling):
    """Three turns with thinking, `a` and `b` sampled as two tokens where the tokenizer has one."""
    renderer = Renderer(chats.tokenizer("qwen3"), mode)
    thinking = chats.ids(renderer, "<think>\nall\n</think>\n\n")
    reply = [*thinking, *chats.ids(renderer, "a"), *chats.ids(renderer, "b"), renderer.end_id]
    assert chats.ids(renderer, renderer.text(np.array(reply))).tolist() != reply
    engine = chats.ScriptedEngine(renderer, [np.array(reply, np.int32)], routing)
    limits = Limits(4, 200, 40, 5.0)
    agent = Agent(engine, renderer, limits, Sampling(max_tokens=0, **sampling), seed=0)
    ran = asyncio.run(agent.run_episode(lambda: Asks({}), group_id=0, index=0, session="0/0"))
    return group_of(ran), engine, reply


@every_pack_layout
@pytest.mark.parametrize("mode", ["chat", "tokens"])
def test_x19_verl_6854_trl_6250_tokens_are_trained_in_the_context_that_sampled_them(
    mode, pack_layout
):
    """There, a trajectory was one sequence, and its history either kept the thinking that the chat
    template drops, or was tokenized again into tokens that nobody sampled. Here each sampled token
    is trained once, after the tokens that the engine had before it."""
    group, engine, reply = episode(mode)
    prompts = [prompt.tolist() for prompt, *_ in engine.calls]
    assert len(prompts) == 3
    extended = prompts[1][: len(prompts[0]) + len(reply)] == prompts[0] + reply
    assert extended == (mode == "tokens")  # chat mode drops the thinking
    found = Counter()
    for (_, _, step, target, _, _, logprob, path), count in rows_of(
        fold(samples_of(group), pack_layout)[0]
    ).items():
        found[step, target, logprob, path] += count
    expected = Counter(
        (step, token, -(i + 1.0), (*prompt, *reply[:i]))
        for step, prompt in enumerate(prompts)
        for i, token in enumerate(reply)
    )
    assert found == expected


@pytest.mark.parametrize("setting", ["top_p=0.9", "top_k=20", "temperature=0"])
def test_x19_verl_6240_training_rejects_truncated_sampling(setting):
    """There, engines returned logprobs of the truncated distribution, and the trainer compared them
    with those of the whole one: the ratio was below 1 on policy. Here training does not start."""
    (problem,) = training_problems(load(LOCAL, [f"rollout.{setting}"]))
    assert problem.startswith(f"rollout.{setting.partition('=')[0]} = ")
    assert "training needs logprobs of the whole distribution" in problem
    assert not training_problems(load(LOCAL, [f"eval.{setting}"]))  # is not trained on


@pytest.mark.parametrize(
    "sampling, message",
    [
        (dict(top_p=0.9), "sampled with top_p 0.9, which rollout.top_p = 1 does not allow"),
        (dict(top_k=20), "sampled with top_k 20, which rollout.top_k = 0 does not allow"),
        (dict(temperature=0.6), "sampled with temperature 0.6, which rollout.temperature = 1"),
    ],
)
def test_x19_verl_6240_saved_rollouts_keep_the_sampling_of_their_logprobs(
    sampling, message, tmp_path
):
    """As above, where the rollouts are in a file that another config may have written."""
    file = tmp_path / "rollouts.safetensors"
    given = ["model.path=configs/models/qwen3-8b", "policy.parallel.expert=1"]
    for settings in (sampling, {}):
        group, _, _ = episode("tokens", **settings)
        worse = episode("tokens", **settings)[0].trajectories[0]
        worse.steps[-1].reward = 0.0
        store.write(file, [group_of(group.trajectories[0], worse)])
        if settings:
            with pytest.raises(StoreError, match=re.escape(message)):
                read_batches(load(LOCAL, given), file)
            supervised = load(LOCAL, [*given, "loss.type=nll"])
            assert read_batches(supervised, file)  # compares no logprobs
        else:
            assert read_batches(load(LOCAL, given), file)


# ---------------------------------------------------------------- routing replay


@every_pack_layout
def test_x19_nemo_rl_3485_the_last_token_of_a_turn_has_the_route_of_the_next_call(pack_layout):
    """There, the last token of a response, which its call never forwards, kept a dummy route when
    the next call had forwarded it as part of its prompt. Here every token of the context has the
    route that an engine recorded for it."""
    group, engine, _ = episode("tokens", routing=True)
    starts = [start for *_, start in engine.calls]
    assert starts[1] == len(group.trajectories[0].steps[0]) - 1  # asked for from this token on
    tries, _ = fold(samples_of(group), pack_layout)
    assert len(tries) == (3 if pack_layout == "flat" else 1)
    for trie in tries:
        assert (trie.routing() == (trie.tokens % 64)[:, None, None]).all()


def test_x19_verl_7340_routing_replay_reaches_the_routers_that_run(ranks, models):
    """There, a model built its decoder twice; the routers of the first, discarded one stayed in a
    process-wide list and got the routing, so that replay changed nothing. Here the routers of the
    model itself get it: logprobs are those of transformers with the routing forced."""
    folder, model = models("qwen3_moe")
    groups = make_groups(replay=True, prompts=1)
    (found,) = ranks(1).run(cases.logprobs_after_a_discarded_decoder, folder=folder, groups=groups)
    checked = 0
    for t in groups[0].trajectories:
        for step in t.steps:
            with torch.no_grad():
                forced, _ = plain_logprobs(model, step, replay=True)
                live, _ = plain_logprobs(model, step, replay=False)
            logprobs = found[0, t.index, step.index]
            np.testing.assert_allclose(logprobs, forced.numpy()[step.loss_mask], atol=2e-5)
            assert np.abs(logprobs - live.numpy()[step.loss_mask]).max() > 1e-3
            checked += 1
    assert checked > 5


def test_x19_skyrl_1908_forward_passes_leave_no_routing_and_padding_counts_nowhere(ranks, models):
    """There, forward-only passes left routing in the queue from which recomputation takes it, and
    padding was counted in what balances the experts. Here an update after such passes, and with
    padding, is the same as without, and its replayed choices are those of the real tokens."""
    folder, _ = models("qwen3_moe")
    groups = make_groups(replay=True)

    def update(before: list, align: int) -> tuple:
        (found,) = ranks(1).run(
            cases.update_after_forward_passes,
            folder=folder,
            groups=groups,
            before=before,
            align=align,
        )
        return found

    others = make_groups(replay=True, seed=3)
    alone, _, choices = update([], align=1)
    after, unused, choices_after = update([others, groups], align=1)
    padded, _, choices_padded = update([], align=64)
    assert not unused and all(map(np.array_equal, alone, after))
    for a, b in zip(alone, padded):
        np.testing.assert_allclose(a, b, atol=2e-6)
    assert choices == choices_after == choices_padded
    assert len(choices) == LAYERS and len(set(choices)) == 1 and choices[0] % TOP_K == 0
    assert choices[0] < TOP_K * sum(map(len, steps_of(groups)))  # shared tokens once


def test_x19_skyrl_1908_no_expert_has_a_bias_that_padding_could_move():
    """As above: no supported model has the bias; Megatron's cannot be switched on."""
    with pytest.raises(ConfigError, match="moe_router_enable_expert_bias.*model folder decides"):
        load(LOCAL, ["policy.megatron.moe_router_enable_expert_bias=true"])


# ---------------------------------------------------------------- resume


def resumed(tmp_path, steps: int, stop_after: int, *given: str) -> tuple[list[int], list[int]]:
    """Prompts trained on by a run that was stopped and resumed, and those generated after it."""
    seen: list[int] = []
    settings = [f"train.steps={steps}", "filters.zero_variance=false", *given]

    def collect(loop, until: int) -> None:
        while loop.step < until:
            loop.step += 1
            seen.extend(group.id for group in loop.collect()[0])

    loop = make_loop(tmp_path, Versioned(), *settings)
    loop.cluster.policy.save = lambda root, state: state.write(root)
    loop.staleness.record_sync(0)
    with loop.stream:
        collect(loop, stop_after)
        time.sleep(0.05)  # episodes ahead of training
        loop.save(tmp_path)
    state = LoopState.read(tmp_path)
    assert len(state.ready) == (4 if given else 0)
    episodes = Versioned()
    loop = make_loop(tmp_path, episodes, *settings, state=state)
    with loop.stream:
        loop.restore()
        collect(loop, steps)
    return seen, sorted(episodes.began)


def test_x19_prime_rl_3164_a_resumed_run_continues_in_the_data(tmp_path):
    """There, the position in the data was in memory only, and a resumed run drew the first prompts
    again. Here each of the 50 prompts comes once before any comes again."""
    seen, generated = resumed(tmp_path, steps=14, stop_after=5)
    assert seen == list(range(14 * 4))  # the number of the draw; 50 rows are an epoch
    assert generated == list(range(5 * 4, 14 * 4))


def test_x19_prime_rl_3164_groups_ahead_of_training_are_neither_lost_nor_repeated(tmp_path):
    """As above, with rollouts ahead of training: a position alone would skip the groups that were
    generated and not trained on. They are in the checkpoint, and are not generated again."""
    seen, generated = resumed(tmp_path, 9, 3, "async.max_staleness=1")
    assert sorted(seen) == list(range(9 * 4))
    assert generated == list(range(4 * 4, 9 * 4))


def test_x19_slime_2236_step_and_position_are_those_of_the_checkpoint_that_was_given(tmp_path):
    """There, the first rollout that a command gave was replaced by that of the newest checkpoint,
    so that a resumed run repeated or skipped data. Here the step and the position have one source,
    the given checkpoint, and a newer one in the same run is an error."""
    prompts = PromptStream([{"n": n} for n in range(50)], seed=0)
    positions = {}
    for step in (4, 8):
        prompts.take(16)
        positions[step] = prompts.position()
        saved = checkpoint(tmp_path / "first" / "checkpoints", step, positions[step])
    earlier = saved.with_name("step_4")
    state = find(tmp_path, "second", earlier, kl=0).state
    assert (state.step, state.position) == (4, positions[4]) and positions[4] != positions[8]
    assert find(tmp_path, "first", kl=0).state.step == 8
    with pytest.raises(CheckpointError, match="step_8: is ahead of step 4"):
        find(tmp_path, "first", earlier, kl=0)


@pytest.mark.parametrize("rows", [4, 10, 50])
def test_x19_nemo_rl_2519_a_position_is_not_applied_to_other_data(rows):
    """There, a run resumed with another data set skipped as many of its rows as the first one had
    consumed. Here other data is an error, with as many rows or not."""
    first = GroupStream(Versioned(), PromptStream([{"n": n} for n in range(10)], seed=0), 4, 9)
    with first as stream:
        first.pool.stream = stream
        stream.take(0)
        state = stream.state()
    other = PromptStream([{"n": -n} for n in range(rows)], seed=0)
    with (
        GroupStream(Versioned(), other, 4, 9) as stream,
        pytest.raises(DataError, match="data.train: is not what the checkpoint was trained on"),
    ):
        stream.restore(1, state)


# ---------------------------------------------------------------- the page


def test_every_report_is_on_the_page_with_its_tests():
    """Each row has tests, each test of this requirement a row that names its report."""
    text = Path("docs/reports.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| [")]
    sources = [Path(__file__), Path("tests/sync/test_receiver.py")]
    named = {
        name for file in sources for name in re.findall(r"def (test_x19\w+)", file.read_text())
    }
    assert named == set(re.findall(r"`(test_x19\w+)`", text))
    for row in rows:
        for project, number in re.findall(r"\[[\w-]+/([\w-]+)#(\d+)\]", row):
            short = {"RL": "nemo_rl"}.get(project, project.lower().replace("-", "_"))
            tests = re.findall(r"`(test_x19\w+)`", row)
            assert any(f"{short}_{number}_" in test for test in tests), (project, number)
    assert len(rows) == 14
