"""The step-wise data path, in numpy, without Ray, vLLM or Megatron.

Group[Trajectory[Step]]
    validation   the rollouts against the data model
    filters      drop trajectories, with a reason
    staleness    weight syncs since each trained token was sampled
    advantage    one advantage per step
    weights      one weight per step, over the mini-batch
  Sample         a step with its identity, advantage and weight: the objective is fixed here
    trie         the steps of a prompt, each distinct token once
    packing      micro-batches per data-parallel rank
  MicroBatch

metrics          of each of these
routing          recorded routing by reference: stored rows, and what a rank fetches of them
store            rollouts on disk

for groups in packing.mini_batches(batch, prompts=32):  # one optimizer step each
    samples = make_samples(groups, estimator="grpo", reduction="token")
    micro_batches, report = lay_out(samples, ranks=8, budget_tokens=32_768)
"""

from megastep.samples import packing, trie, weights
from megastep.samples.advantage import advantages
from megastep.types import Group, MicroBatch, Sample


def make_samples(
    groups: list[Group], estimator: str, reduction: str, gamma: float = 1.0, step_coef: float = 1.0
) -> list[Sample]:
    """The samples of a mini-batch, with advantages and weights."""
    samples = []
    for group, group_weights in zip(groups, weights.token_weights(groups, reduction)):
        group_advantages = advantages(group, estimator, gamma, step_coef)
        for trajectory, step_advantages, step_weights in zip(
            group.trajectories, group_advantages, group_weights
        ):
            for step, advantage, weight in zip(
                trajectory.steps, step_advantages.tolist(), step_weights.tolist()
            ):
                samples.append(Sample(step, group.id, trajectory.index, advantage, weight))
    return samples


def lay_out(
    samples: list[Sample],
    ranks: int,
    budget_tokens: int,
    align_tokens: int = 1,
    pack_layout: str = "trie",
    *,
    on_conflict: str = "owner",
    attention_tokens: int = 24_576,
    rounds_of: int = 1,
) -> tuple[list[list[MicroBatch]], trie.FoldReport]:
    """The micro-batches of each rank, and the counts of folding; see trie.fold, packing.pack."""
    tries, report = trie.fold(samples, pack_layout, on_conflict)
    micro_batches = packing.pack(
        tries, ranks, budget_tokens, align_tokens, attention_tokens, rounds_of
    )
    return micro_batches, report
