"""Shared prefixes of token sequences."""

from collections.abc import Iterable, Iterator

import numpy as np

from megastep.types import Step


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """The number of leading entries that are equal: [5 6 7] and [5 6 8 9] share 2."""
    n = min(len(a), len(b))
    if n == 0:
        return 0
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else n


def shared_tokens(step: Step, ids: np.ndarray) -> int:
    """The number of leading tokens that `ids` and the step, prompt and response, share."""
    prompt_ids = step.prompt_ids
    shared = common_prefix(prompt_ids, ids)
    if shared < len(prompt_ids):
        return shared
    return shared + common_prefix(step.response_ids, ids[shared:])


def shared_prefixes(steps: Iterable[Step]) -> Iterator[tuple[Step, np.ndarray, int]]:
    """Each step of a trajectory, its prompt, and how many of the prompt's leading tokens are those
    of the previous step, prompt and response."""
    sequence = np.empty(0, np.int32)  # of the previous step
    for step in steps:
        prompt_ids = step.prompt_ids
        yield step, prompt_ids, common_prefix(sequence, prompt_ids)
        sequence = np.concatenate([prompt_ids, step.response_ids])


def share_prefixes(steps: list[Step]) -> None:
    """Store each token of a trajectory once, as far as its prompts extend one another."""
    for i, (step, _, shared) in enumerate(shared_prefixes(steps)):
        step.share_prefix(steps[i - 1], shared)
