"""Rollouts for the tests, given or random, and a slow reference implementation of folding."""

from collections import Counter
from zlib import crc32

import numpy as np
from hypothesis import strategies as st

from megastep.samples.routing import Layout, store_rows
from megastep.samples.validation import validate
from megastep.types import Group, Sample, Step, StoredRouting, Trajectory, Trie

LAYERS, TOP_K = 2, 2
EOS = 9


def step(index, prompt, response, *, last=True, mask=None, logprobs="zeros", **more) -> Step:
    response = np.array(response, np.int32)
    return Step(
        index=index,
        last=last,
        prompt_ids=np.array(prompt, np.int32),
        response_ids=response,
        loss_mask=np.ones(len(response), bool) if mask is None else np.array(mask, bool),
        logprobs=np.zeros(len(response), np.float32) if isinstance(logprobs, str) else logprobs,
        versions=np.array([[0, len(response)]], np.int32),
        **more,
    )


def trajectory(*steps: tuple, index=0, group=0, rewards=None, **more) -> Trajectory:
    """From (prompt, response) or (prompt, response, mask) of each step."""
    made = [
        step(i, *s[:2], mask=s[2] if len(s) > 2 else None, last=i == len(steps) - 1)
        for i, s in enumerate(steps)
    ]
    for s, reward in zip(made, rewards or []):
        s.reward = reward
    return Trajectory(group, index, made, **more)


def group_of(*trajectories: Trajectory, id=0) -> Group:
    for i, t in enumerate(trajectories):
        t.group_id, t.index = id, i
    group = Group(id, list(trajectories))
    validate([group])
    return group


def samples_of(*groups: Group) -> list[Sample]:
    """Samples with advantages and weights that identify their step."""
    samples = []
    for g in groups:
        for t in g.trajectories:
            for s in t.steps:
                advantage = g.id + t.index / 8 + s.index / 64
                weight = 1 + s.index / 8 + t.index / 64
                samples.append(Sample(s, g.id, t.index, advantage, weight))
    return samples


# ---------------------------------------------------------------- routing by reference


def by_reference(group: Group, layout: Layout, references: dict) -> Group:
    """The group with its routing by reference; `references` gets the objects, by their names."""
    made = store_rows(group.trajectories, layout)
    if made is None:
        return group
    for stage in range(len(layout.stages)):
        made.table.references[stage] = f"{group.id}/{stage}"
        references[f"{group.id}/{stage}"] = {}
    for (stage, part), array in made.objects:
        name = f"{group.id}/{stage}/{part}"
        references[name] = array
        references[f"{group.id}/{stage}"][part] = name
    trajectories = []
    for t, trajectory in enumerate(group.trajectories):
        steps = []
        for s, old in enumerate(trajectory.steps):
            rows = made.rows.get((t, s))
            routing = None if rows is None else StoredRouting(made.table, rows)
            steps.append(old.replaced(routing=routing))
        trajectories.append(Trajectory(group.id, trajectory.index, steps))
    return Group(group.id, trajectories)


def resolver(references: dict):
    """The function that `fetch` needs."""
    return lambda names: [references[name] for name in names]


# ---------------------------------------------------------------- random rollouts


def true_experts(path) -> np.ndarray:
    """[L, K] experts that a router without noise chooses for the last token of a path."""
    checksum = crc32(np.array(path, np.int32).tobytes())
    per_layer = checksum >> np.arange(0, 8 * LAYERS, 8)[:, None] & 63
    return per_layer + np.arange(TOP_K)


@st.composite
def groups(draw, max_groups=2, routing=("none", "full", "delta"), noise=0.0):
    """Groups of any shape; noise: the probability that recorded experts are not true_experts."""
    random = draw(st.randoms(use_true_random=False))
    mode = draw(st.sampled_from(routing))
    count = draw(st.integers(1, max_groups))
    result = [random_group(random, id, mode, noise) for id in range(count)]
    validate(result)
    return result


def random_group(random, id: int, mode: str, noise: float) -> Group:
    first = _ids(random, 1, 5)
    trajectories = []
    for index in range(random.randint(1, 4)):
        if trajectories and random.random() < 0.2:  # a duplicate
            steps = [Step(**vars(s)) for s in trajectories[-1].steps]
        else:
            steps = _random_steps(random, first, mode, noise)
        trajectories.append(Trajectory(id, index, steps))
    return Group(id, trajectories)


def _random_steps(random, prompt: list[int], mode: str, noise: float) -> list[Step]:
    steps = []
    count = random.randint(0 if random.random() < 0.1 else 1, 5)
    for i in range(count):
        response = _ids(random, 0, 5)
        generated = len(response)
        if random.random() < 0.8:
            mask = [random.random() < 0.8 for _ in response]
        else:
            mask = [False] * len(response)
        if random.random() < 0.2:
            response = response + [EOS]
            mask = mask + [False]
        made = step(
            i,
            prompt,
            response,
            mask=mask,
            last=i == count - 1,
            reward=random.choice([0.0, 0.0, 0.5, 1.0]),
        )
        if random.random() < 0.1:
            made.logprobs = None
        else:
            made.logprobs = -np.arange(len(response), dtype=np.float32) - i
        if mode != "none" and random.random() < 0.9:
            previous = steps[-1] if steps and mode == "delta" else None
            _record(random, made, previous, generated, noise)
        steps.append(made)
        prompt = _next_prompt(random, prompt, response)
    return steps


def _record(random, made: Step, previous: Step | None, generated: int, noise: float) -> None:
    """Record routing as an engine does: of every token but the last one sampled.

    With `previous`, leave out the tokens that this step recorded.
    """
    ids = made.prompt_ids.tolist() + made.response_ids.tolist()
    stop = max(len(made.prompt_ids) + generated - 1, 0)
    start = 0
    if previous is not None and previous.routing is not None:
        previous_ids = previous.prompt_ids.tolist() + previous.response_ids.tolist()
        differing = (k for k, (a, b) in enumerate(zip(previous_ids, ids)) if a != b)
        shared = next(differing, min(len(previous_ids), len(ids)))
        start = min(shared, previous.routing_end, stop, len(made.prompt_ids))
    rows = []
    for k in range(start, stop):
        offset = 64 if random.random() < noise else 0
        rows.append(true_experts(ids[: k + 1]) + offset)
    made.routing = np.array(rows, np.uint8).reshape(-1, LAYERS, TOP_K)
    made.routing_start = start


def _next_prompt(random, prompt: list[int], response: list[int]) -> list[int]:
    kind = random.choice(["append", "append", "append", "nothing", "strip", "rewrite"])
    if kind == "append":
        return prompt + response + _ids(random, 1, 3)
    if kind == "nothing":  # the response contains the observation
        return prompt + response
    if kind == "strip":  # the history without thinking
        return prompt + response[random.randint(0, len(response)) :] + _ids(random, 1, 3)
    return _ids(random, 1, 6)


def _ids(random, low: int, high: int) -> list[int]:
    return [random.randint(1, 3) for _ in range(random.randint(low, high))]


# ---------------------------------------------------------------- reference implementation


def expected_rows(samples: list[Sample]) -> Counter:
    """Every loss row with the tokens that predict it, from the steps directly."""
    rows = Counter()
    for s in samples:
        ids = np.concatenate([s.step.prompt_ids, s.step.response_ids])
        for j in np.flatnonzero(s.step.loss_mask).tolist():
            at = len(s.step.prompt_ids) + j
            logprob = None if s.step.logprobs is None else float(s.step.logprobs[j])
            rows[
                (
                    s.group,
                    s.trajectory,
                    s.step.index,
                    int(ids[at]),
                    np.float32(s.advantage).item(),
                    np.float32(s.weight).item(),
                    logprob,
                    tuple(ids[:at].tolist()),
                )
            ] += 1
    return rows


def path_of(trie: Trie, token: int) -> np.ndarray:
    """The tokens visible to a token, by the predicate of types.py."""
    k = np.arange(len(trie))
    path = np.flatnonzero((k <= token) & (token < trie.end))
    assert trie.position[path].tolist() == list(range(len(path)))
    return path


def rows_of(tries: list[Trie]) -> Counter:
    """The loss rows of the tries, without padding rows."""
    rows = Counter()
    for trie in tries:
        loss = trie.loss
        for r in np.flatnonzero(loss.group >= 0).tolist():
            columns = (
                loss.group,
                loss.trajectory,
                loss.step,
                loss.target,
                loss.advantage,
                loss.weight,
            )
            logprob = None if np.isnan(loss.rollout_logprob[r]) else loss.rollout_logprob[r].item()
            path = tuple(trie.tokens[path_of(trie, loss.src[r])].tolist())
            rows[(*(column[r].item() for column in columns), logprob, path)] += 1
    return rows


def routing_of(tries: list[Trie]) -> dict:
    """(group, trajectory, step, position of the target) → routing along the path that predicts it.

    None without recorded routing: a trie then has no routing at all, or free tokens only.
    """
    found = {}
    for trie in tries:
        routing = trie.routing()
        loss = trie.loss
        for r in np.flatnonzero(loss.group >= 0).tolist():
            path = path_of(trie, loss.src[r])
            step_id = (loss.group[r].item(), loss.trajectory[r].item(), loss.step[r].item())
            recorded = routing is not None and (routing[path] >= 0).any()
            found[(*step_id, len(path))] = routing[path].tolist() if recorded else None
    return found
