"""The step-wise data path: pure numpy, neither Ray, vLLM nor Megatron.

Group[Trajectory[Step]]
    filters    which trajectories are trained on, and why the others are not
    credit     one advantage per step
    weights    one weight per step, over the mini-batch
  Sample       a step with its identity and both numbers: from here on nothing of the objective changes
    trie       the steps of a prompt folded; every distinct token once
    packing    micro-batches per data-parallel rank
  MicroBatch

metrics        what to log about each of these
store          rollouts on disk

for groups in packing.mini_batches(batch, prompts=32):      # one optimizer step each
    samples = make_samples(groups, estimator="grpo", reduction="token")
    micro_batches, report = lay_out(samples, ranks=8, budget_tokens=32_768)
"""

from megastep.samples import packing, trie, weights
from megastep.samples.advantage import advantages
from megastep.types import Group, MicroBatch, Sample


def make_samples(
    groups: list[Group], estimator: str, reduction: str, gamma: float = 1.0, step_coef: float = 1.0
) -> list[Sample]:
    """The samples of a mini-batch, credited and weighed."""
    samples = []
    for group, group_weights in zip(groups, weights.token_weights(groups, reduction)):
        group_advantages = advantages(group, estimator, gamma, step_coef)
        for trajectory, of_steps, weight in zip(
            group.trajectories, group_advantages, group_weights
        ):
            samples += [
                Sample(step, group.id, trajectory.index, a, w)
                for step, a, w in zip(trajectory.steps, of_steps.tolist(), weight.tolist())
            ]
    return samples


def lay_out(
    samples: list[Sample],
    ranks: int,
    budget_tokens: int,
    align_tokens: int = 1,
    pack_layout: str = "trie",
    on_conflict: str = "owner",
    attention_tokens: int = 24_576,
    rounds_of: int = 1,
) -> tuple[list[list[MicroBatch]], trie.FoldReport]:
    """The micro-batches of each rank, and what folding found."""
    tries, report = trie.fold(samples, pack_layout, on_conflict)
    return packing.pack(
        tries, ranks, budget_tokens, align_tokens, attention_tokens, rounds_of
    ), report
