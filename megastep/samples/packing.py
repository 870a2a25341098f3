"""Packing: which rank computes what, in which micro-batch.

    mini_batches   prompts → optimizer steps: B prompts, b each, make ceil(B / b) of them, however many turns
    cut            a trie over the budget → parts under it, along depth-first order, with the least repeated prefix
    pack           parts → bins under the budget → ranks, so that ranks and micro-batches cost about the same
    join           a bin → one forest, padded to the alignment

Expert parallelism spans data-parallel ranks, so every rank runs the same number of micro-batches. Where there is
nothing left to run, a padding stands in: one padding sequence and one loss row of weight 0 that belongs to nobody, so
that forward, backward and their collectives run and add nothing.

Invariants, held by the tests, for every budget, alignment and number of ranks:

    every loss row is in exactly one micro-batch, unchanged; the rows of one step are in the same one
    no micro-batch has more tokens than the budget, padding included; its length is a multiple of the alignment
    every rank has the same number of micro-batches; padding micro-batches have weight 0
"""

import heapq
from bisect import bisect_left, insort
from collections import deque

import numpy as np

from megastep.samples.trie import restrict
from megastep.types import PADDING, Group, LossTable, MicroBatch, Routes, Trie


def mini_batches(groups: list[Group], prompts: int) -> list[list[Group]]:
    """One list per optimizer step. Every prompt is in one; sizes differ by at most one where they do not divide."""
    count = -(-len(groups) // prompts)
    bounds = [i * len(groups) // count for i in range(count + 1)] if count else [0]
    return [groups[a:b] for a, b in zip(bounds, bounds[1:])]


def pack(
    tries: list[Trie],
    ranks: int,
    budget_tokens: int,
    align_tokens: int = 1,
    attention_tokens: int = 24_576,
    rounds_of: int = 1,
) -> list[list[MicroBatch]]:
    """Micro-batches of each rank. Empties `tries`: each is let go as soon as its tokens are in a micro-batch.

    rounds_of: the number of micro-batches per rank is a multiple of it; interleaved pipelines need that of their depth.
    attention_tokens: the length of context at which a token's attention costs as much as all else (dense: 6 × hidden).
    """
    budget = budget_tokens - budget_tokens % align_tokens
    parts = []
    while tries:
        parts += cut(tries.pop(), budget)
    parts.reverse()
    shape = next((part.routes.shape for part in parts if part.routes is not None), None)
    costs = [
        len(part) + float(part.position.sum(dtype=np.int64)) / attention_tokens for part in parts
    ]
    bins = _fill_bins([len(part) for part in parts], costs, budget, ranks * rounds_of)
    result = []
    for rank_bins in _deal(bins, costs, ranks):
        result.append([])
        for members in rank_bins:
            result[-1].append(join([parts[i] for i in members], align_tokens, shape))
            for i in members:
                parts[i] = None
    return result


# ---------------------------------------------------------------- cutting


def cut(trie: Trie, budget: int) -> list[Trie]:
    """Parts of at most `budget` tokens with the rows of a step together and as few tokens repeated as possible.

    In depth-first order the leaves are cut into consecutive runs. A run that begins at leaf i repeats what i shares
    with the leaf before it; its size is the path of its first leaf plus what each further leaf adds. So the best cuts
    are a shortest path over leaves, found in one pass with a sliding minimum.
    """
    if len(trie) <= budget:
        return [trie]
    starts = trie.loss.step_starts()
    stops = np.append(starts[1:], len(trie.loss))
    step_leaf = trie.loss.src[stops - 1]  # [step] the deepest token it needs
    leaves = np.unique(step_leaf)
    path = trie.position[leaves].astype(np.int64) + 1  # tokens on the path of each leaf
    _check_paths(trie, step_leaf, starts, budget)
    # Between two leaves, the depth-first walk goes up to their last common token and no further.
    shared = np.append(0, np.minimum.reduceat(trie.position[: leaves[-1] + 1], leaves[:-1] + 1))
    parts = _best_cuts(path.tolist(), shared.tolist(), budget)
    of_step = np.searchsorted(parts, np.searchsorted(leaves, step_leaf), side="right") - 1
    of_row = np.repeat(of_step, stops - starts)
    return [restrict(trie, np.flatnonzero(of_row == part)) for part in range(len(parts))]


def _check_paths(trie: Trie, step_leaf: np.ndarray, starts: np.ndarray, budget: int) -> None:
    longest = int(trie.position[step_leaf].argmax())
    tokens = int(trie.position[step_leaf[longest]]) + 1
    if tokens > budget:
        row, loss = starts[longest], trie.loss
        raise _too_long(loss.group[row], loss.trajectory[row], loss.step[row], tokens, budget)


def check_lengths(groups: list[Group], budget_tokens: int, align_tokens: int) -> None:
    """Raise what `pack` would for a step that is longer than a micro-batch, before anything is folded."""
    budget = budget_tokens - budget_tokens % align_tokens
    for group in groups:
        for trajectory in group.trajectories:
            for step in trajectory.steps:
                trained = np.flatnonzero(step.loss_mask)
                tokens = len(step.prompt_ids) + int(trained[-1]) if len(trained) else 0
                if tokens > budget:
                    raise _too_long(group.id, trajectory.index, step.index, tokens, budget)


def _too_long(group: int, trajectory: int, step: int, tokens: int, budget: int) -> ValueError:
    return ValueError(
        f"group {group}, trajectory {trajectory}, step {step}: {tokens} tokens in one path do not fit a "
        f"micro-batch of {budget}; raise train.micro_batch_tokens"
    )


def _best_cuts(path: list[int], shared: list[int], budget: int) -> list[int]:
    """The first leaf of each part: least repeated tokens, then fewest parts."""
    # A part of the leaves i..j has shared[i] + size[j + 1] - size[i] tokens.
    size = np.cumsum([0] + [p - s for p, s in zip(path, shared)]).tolist()
    best = [(0, 0)]  # [j] (tokens repeated, parts) of the best cuts of leaves 0..j-1
    before = [0]  # [j] where its last part begins
    window: deque[int] = deque()  # starts of a part that may end at j, the best in front

    def begun(i: int) -> tuple[int, int]:
        return best[i][0] + shared[i], best[i][1] + 1

    for j in range(len(path)):
        while window and begun(window[-1]) >= begun(j):
            window.pop()
        window.append(j)
        while shared[window[0]] + size[j + 1] - size[window[0]] > budget:
            window.popleft()
        best.append(begun(window[0]))
        before.append(window[0])
    cuts = [before[-1]]
    while cuts[-1] > 0:
        cuts.append(before[cuts[-1]])
    return cuts[::-1]


# ---------------------------------------------------------------- bins and ranks


def _fill_bins(
    tokens: list[int], costs: list[float], budget: int, multiple: int
) -> list[list[int]]:
    """Parts per bin: as few bins as best-fit finds, up to the multiple, then filled evenly if that fits too."""
    tight = _best_fit(tokens, budget)
    count = -(-max(len(tight), 1) // multiple) * multiple
    return _even(tokens, costs, budget, count) or tight + [[] for _ in range(count - len(tight))]


def _best_fit(tokens: list[int], budget: int) -> list[list[int]]:
    """Largest first, each into the fullest bin that has room."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for i in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        at = bisect_left(room, (tokens[i], -1))
        left, bin_ = room.pop(at) if at < len(room) else (budget, len(bins))
        if bin_ == len(bins):
            bins.append([])
        bins[bin_].append(i)
        insort(room, (left - tokens[i], bin_))
    return bins


def _even(tokens: list[int], costs: list[float], budget: int, count: int) -> list[list[int]] | None:
    """Costliest first, each into the cheapest bin with room; None when one fits nowhere."""
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
    """Bins of each rank. Ranks wait for each other in every round, so a round is made of bins of similar cost."""
    bins = sorted(bins, key=lambda members: -sum(costs[i] for i in members))
    dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for at in range(0, len(bins), ranks):
        for members, rank in zip(bins[at : at + ranks], sorted(range(ranks), key=load.__getitem__)):
            dealt[rank].append(members)
            load[rank] += sum(costs[i] for i in members)
    return dealt


# ---------------------------------------------------------------- micro-batches


def join(parts: list[Trie], align: int, shape: tuple[int, int] | None) -> MicroBatch:
    """One forest of some tries, with a padding sequence at its end; `shape` of the batch's experts, if it has any."""
    real = sum(map(len, parts))
    padding = -real % align if parts else align
    if padding:
        parts = parts + [_padding(padding, padding=not parts)]
    at = np.cumsum([0] + [len(part) for part in parts]).tolist()
    trie = Trie(
        tokens=np.concatenate([part.tokens for part in parts]),
        position=np.concatenate([part.position for part in parts]),
        end=np.concatenate([part.end + np.int32(first) for part, first in zip(parts, at)]),
        loss=_join_losses([part.loss for part in parts], at),
        routes=None if shape is None else _join_routes(parts, at, shape),
    )
    return MicroBatch(trie, real)


def _padding(tokens: int, padding: bool) -> Trie:
    """A sequence that nobody looks at; the row of a padding gives a loss, and so a backward pass, that is 0."""
    rows = 1 if padding else 0
    zero = np.zeros(rows, np.int32)
    nobody = np.full(rows, PADDING, np.int32)
    loss = LossTable(zero, zero, *[zero.astype(np.float32)] * 3, nobody, nobody, nobody)
    return Trie(
        np.zeros(tokens, np.int32),
        np.arange(tokens, dtype=np.int32),
        np.full(tokens, tokens, np.int32),
        loss,
    )


def _join_losses(tables: list[LossTable], at: list[int]) -> LossTable:
    columns = ("target", "advantage", "weight", "rollout_logprob", "group", "trajectory", "step")
    return LossTable(
        src=np.concatenate([table.src + np.int32(first) for table, first in zip(tables, at)]),
        **{name: np.concatenate([getattr(table, name) for table in tables]) for name in columns},
    )


def _join_routes(parts: list[Trie], at: list[int], shape: tuple[int, int]) -> Routes:
    routed = [(part.routes, first) for part, first in zip(parts, at) if part.routes is not None]
    starts = [np.zeros(0, np.int32)] + [routes.start + np.int32(first) for routes, first in routed]
    return Routes(
        np.concatenate(starts), [rows for routes, _ in routed for rows in routes.rows], shape
    )
