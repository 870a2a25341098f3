"""Packing: which rank computes what, in which micro-batch.

    mini_batches   prompts → optimizer steps: ceil(B / b) for B prompts, b per mini-batch
    cut            a trie over the token budget → parts under it, with the least repeated prefix
    pack           parts → bins under the budget → ranks, with balanced cost per rank and round
    join           a bin → one forest, padded to the alignment

Expert parallelism spans data-parallel ranks, so every rank must run the same number of
micro-batches. Padding micro-batches make up the difference: one padding sequence and one loss row
of weight 0, so that forward, backward and their collectives run and contribute 0.

Invariants, held by the tests, for every budget, alignment and number of ranks:

    every loss row is in exactly one micro-batch, unchanged; the rows of a step are in the same one
    no micro-batch exceeds the budget, padding included; its length is a multiple of the alignment
    every rank has the same number of micro-batches; padding micro-batches have weight 0
"""

import heapq
from bisect import bisect_left, insort
from collections import deque

import numpy as np

from megastep.samples.trie import restrict
from megastep.types import PADDING, Group, LossTable, MicroBatch, Routes, Routing, Trie


def mini_batches(groups: list[Group], prompts: int) -> list[list[Group]]:
    """Groups of each optimizer step: at most `prompts`, sizes differ by at most one."""
    if not groups:
        return []
    count = -(-len(groups) // prompts)
    bounds = [i * len(groups) // count for i in range(count + 1)]
    return [groups[start:stop] for start, stop in zip(bounds, bounds[1:])]


def pack(
    tries: list[Trie],
    ranks: int,
    budget_tokens: int,
    align_tokens: int = 1,
    attention_tokens: int = 24_576,
    rounds_of: int = 1,
) -> list[list[MicroBatch]]:
    """Micro-batches of each rank. Empties `tries`, to free each once it is in a micro-batch.

    rounds_of: the number of micro-batches per rank is a multiple of it; interleaved pipelines need
    a multiple of their depth.
    attention_tokens: the context length at which a token's attention costs as much as the rest of
    the model (dense: 6 × hidden).
    """
    budget = _aligned(budget_tokens, align_tokens)
    all_parts: list[Trie] = []
    while tries:
        all_parts += cut(tries.pop(), budget)
    all_parts.reverse()
    routing_shape = next((p.routes.shape for p in all_parts if p.routes is not None), None)
    tokens = [len(part) for part in all_parts]
    costs = [_cost(part, attention_tokens) for part in all_parts]
    dealt = deal(tokens, costs, budget, ranks, rounds_of)
    parts = dict(enumerate(all_parts))
    del all_parts  # `parts` frees each part once it is joined
    return [
        [join([parts.pop(i) for i in members], align_tokens, routing_shape) for members in of_rank]
        for of_rank in dealt
    ]


def deal(
    tokens: list[int], costs: list[float], budget: int, ranks: int, rounds_of: int = 1
) -> list[list[list[int]]]:
    """The parts in each micro-batch of each rank, from their tokens and costs alone."""
    return _deal(_fill_bins(tokens, costs, budget, ranks * rounds_of), costs, ranks)


def _aligned(budget_tokens: int, align_tokens: int) -> int:
    return budget_tokens - budget_tokens % align_tokens


def _cost(part: Trie, attention_tokens: int) -> float:
    return len(part) + float(part.position.sum(dtype=np.int64)) / attention_tokens


# ---------------------------------------------------------------- cutting


def cut(trie: Trie, budget_tokens: int) -> list[Trie]:
    """Parts of at most `budget_tokens`, with the rows of a step together and the least repetition.

    A part is a run of leaves in depth-first order. It repeats what its first leaf shares with the
    leaf before; its size is the path of its first leaf plus what each further leaf adds.
    """
    if len(trie) <= budget_tokens:
        return [trie]
    starts = trie.loss.step_starts()
    stops = np.append(starts[1:], len(trie.loss))
    step_leaf = trie.loss.src[stops - 1]  # [step] the deepest token it needs
    _check_paths(trie, step_leaf, starts, budget_tokens)
    leaves = np.unique(step_leaf)
    path = trie.position[leaves].astype(np.int64) + 1  # [leaf] tokens from the root
    # Between two leaves, the depth-first walk ascends exactly to their last common token.
    shared = np.append(0, np.minimum.reduceat(trie.position[: leaves[-1] + 1], leaves[:-1] + 1))
    cuts = best_cuts(path.tolist(), shared.tolist(), budget_tokens)
    leaf_of_step = np.searchsorted(leaves, step_leaf)
    part_of_step = np.searchsorted(cuts, leaf_of_step, side="right") - 1
    part_of_row = np.repeat(part_of_step, stops - starts)
    return [restrict(trie, np.flatnonzero(part_of_row == part)) for part in range(len(cuts))]


def _check_paths(trie: Trie, step_leaf: np.ndarray, starts: np.ndarray, budget: int) -> None:
    longest = int(trie.position[step_leaf].argmax())
    tokens = int(trie.position[step_leaf[longest]]) + 1
    if tokens > budget:
        loss = trie.loss
        row = starts[longest]
        raise _too_long(loss.group[row], loss.trajectory[row], loss.step[row], tokens, budget)


def check_lengths(groups: list[Group], budget_tokens: int, align_tokens: int) -> None:
    """Raise the error of `pack` for a step longer than a micro-batch, before any folding."""
    budget = _aligned(budget_tokens, align_tokens)
    for group in groups:
        for trajectory in group.trajectories:
            for step in trajectory.steps:
                trained = np.flatnonzero(step.loss_mask)
                tokens = step.prompt_tokens + int(trained[-1]) if len(trained) else 0
                if tokens > budget:
                    raise _too_long(group.id, trajectory.index, step.index, tokens, budget)


def _too_long(group: int, trajectory: int, step: int, tokens: int, budget: int) -> ValueError:
    return ValueError(
        f"group {group}, trajectory {trajectory}, step {step}: {tokens} tokens in one path "
        f"do not fit a micro-batch of {budget}; raise train.micro_batch_tokens"
    )


def best_cuts(path: list[int], shared: list[int], budget: int) -> list[int]:
    """The first leaf of each part: least repeated tokens, then fewest parts.

        A A A A ─┬─ B B            leaf      0  1  2
                 └─ C ─┬─ C C      path      6  7  7    tokens from the root to the leaf
                       └─ D D      shared    0  4  5    of these, on the path of the leaf before
                                   added     6  3  2    the others: 11 tokens in all

        budget 9   leaves {0} {1 2}    6 + 9 tokens, 4 repeated: best, the cuts are [0, 1]
                   leaves {0 1} {2}    9 + 7 tokens, 5 repeated

    A shortest path over the leaves, in one pass with a sliding minimum.
    """
    added = [p - s for p, s in zip(path, shared)]
    added_before = np.cumsum([0] + added).tolist()  # [leaf + 1]
    # [n] the best cuts of the first n leaves: (tokens repeated, parts), first leaf of the last part
    best_cost = [(0, 0)]
    last_part = [0]

    def part_tokens(first: int, last: int) -> int:
        return shared[first] + added_before[last + 1] - added_before[first]

    def cost_with_part_from(first: int) -> tuple[int, int]:
        repeated, parts = best_cost[first]
        return repeated + shared[first], parts + 1

    # Possible first leaves of the last part, with ascending cost. A part from a later leaf is never
    # larger: a later leaf of no higher cost replaces an earlier one, and one that no longer fits
    # never fits again.
    candidates: deque[int] = deque()
    for leaf in range(len(path)):
        cost = cost_with_part_from(leaf)
        while candidates and cost_with_part_from(candidates[-1]) >= cost:
            candidates.pop()
        candidates.append(leaf)
        while part_tokens(candidates[0], leaf) > budget:
            candidates.popleft()
        best_cost.append(cost_with_part_from(candidates[0]))
        last_part.append(candidates[0])

    cuts = [last_part[-1]]
    while cuts[-1] > 0:
        cuts.append(last_part[cuts[-1]])
    return cuts[::-1]


# ---------------------------------------------------------------- bins and ranks


def _fill_bins(
    tokens: list[int], costs: list[float], budget: int, multiple: int
) -> list[list[int]]:
    """Parts per bin: as few bins as best fit needs, rounded up to the multiple, evenly filled.

    Falls back to the bins of best fit where even filling finds no place for a part.
    """
    tight = _best_fit(tokens, budget)
    count = -(-max(len(tight), 1) // multiple) * multiple
    return _even(tokens, costs, budget, count) or tight + [[] for _ in range(count - len(tight))]


def _best_fit(tokens: list[int], budget: int) -> list[list[int]]:
    """Largest part first, each into the fullest bin with room."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for i in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        fullest = bisect_left(room, (tokens[i], -1))
        if fullest < len(room):
            left, bin_ = room.pop(fullest)
        else:
            left, bin_ = budget, len(bins)
            bins.append([])
        bins[bin_].append(i)
        insort(room, (left - tokens[i], bin_))
    return bins


def _even(tokens: list[int], costs: list[float], budget: int, count: int) -> list[list[int]] | None:
    """Costliest part first, each into the cheapest bin with room; None if a part fits nowhere."""
    bins: list[list[int]] = [[] for _ in range(count)]
    left = [budget] * count
    heap = [(0.0, b) for b in range(count)]  # (cost, bin)
    for i in sorted(range(len(tokens)), key=lambda i: -costs[i]):
        full = []
        while heap and left[heap[0][1]] < tokens[i]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, bin_ = heapq.heappop(heap)
        bins[bin_].append(i)
        left[bin_] -= tokens[i]
        for entry in [*full, (cost + costs[i], bin_)]:
            heapq.heappush(heap, entry)
    return bins


def _deal(bins: list[list[int]], costs: list[float], ranks: int) -> list[list[list[int]]]:
    """Bins of each rank. Ranks synchronize in every round, so a round has bins of similar cost."""
    by_cost = sorted(bins, key=lambda members: -sum(costs[i] for i in members))
    dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for first in range(0, len(by_cost), ranks):
        least_loaded_first = sorted(range(ranks), key=load.__getitem__)
        for members, rank in zip(by_cost[first : first + ranks], least_loaded_first):
            dealt[rank].append(members)
            load[rank] += sum(costs[i] for i in members)
    return dealt


# ---------------------------------------------------------------- micro-batches


def join(parts: list[Trie], align_tokens: int, routing_shape: tuple[int, int] | None) -> MicroBatch:
    """One forest of some tries, padded; without parts, a padding micro-batch.

    routing_shape: (L, K) of the routing of the batch, if any was recorded.
    """
    real_tokens = sum(map(len, parts))
    padding_tokens = -real_tokens % align_tokens if parts else align_tokens
    all_parts = list(parts)
    if padding_tokens:
        all_parts.append(_padding(padding_tokens, loss_rows=0 if parts else 1))
    start = np.cumsum([0] + [len(part) for part in all_parts]).tolist()  # [part + 1]
    trie = Trie(
        tokens=np.concatenate([part.tokens for part in all_parts]),
        position=np.concatenate([part.position for part in all_parts]),
        end=np.concatenate([part.end + np.int32(first) for part, first in zip(all_parts, start)]),
        loss=_join_losses([part.loss for part in all_parts], start),
        routes=None if routing_shape is None else _join_routes(all_parts, start, routing_shape),
    )
    return MicroBatch(trie, real_tokens)


def _padding(tokens: int, loss_rows: int) -> Trie:
    """A sequence of padding tokens. A loss row of weight 0 makes its backward pass run."""
    zeros = np.zeros(loss_rows, np.int32)
    float_zeros = np.zeros(loss_rows, np.float32)
    padding_ids = np.full(loss_rows, PADDING, np.int32)
    return Trie(
        tokens=np.zeros(tokens, np.int32),
        position=np.arange(tokens, dtype=np.int32),
        end=np.full(tokens, tokens, np.int32),
        loss=LossTable(
            src=zeros,
            target=zeros,
            advantage=float_zeros,
            weight=float_zeros,
            rollout_logprob=float_zeros,
            group=padding_ids,
            trajectory=padding_ids,
            step=padding_ids,
        ),
    )


def _join_losses(tables: list[LossTable], start: list[int]) -> LossTable:
    columns = ("target", "advantage", "weight", "rollout_logprob", "group", "trajectory", "step")
    return LossTable(
        src=np.concatenate([table.src + np.int32(first) for table, first in zip(tables, start)]),
        **{name: np.concatenate([getattr(table, name) for table in tables]) for name in columns},
    )


def _join_routes(parts: list[Trie], start: list[int], shape: tuple[int, int]) -> Routes:
    starts = [np.zeros(0, np.int32)]
    rows: list[Routing] = []
    for part, first in zip(parts, start):
        if part.routes is not None:
            starts.append(part.routes.start + np.int32(first))
            rows += part.routes.rows
    return Routes(np.concatenate(starts), rows, shape)
