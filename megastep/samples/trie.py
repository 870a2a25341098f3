"""Folding: the steps of a prompt become a trie in which every distinct token is computed once.

    1. insert     each step's prompt + response into a radix tree, starting from the path of the step before it:
                  consecutive steps share almost everything, so a step costs one comparison and a node or two
    2. emit       the nodes depth first: tokens, position, end
    3. loss       one row per trained token; its source is the token before it on its own step's path
    4. experts    each token belongs to one step (the owner) whose recorded experts it takes, by reference
    5. restrict   to the tokens that some loss row needs; what no trained token sees is not computed

`layout` decides how much of that trie goes into one sequence. All three are restrictions of it:

    trie     one trie per prompt
    merge    one path per chain of steps in which each prompt begins with the whole step before it
    flat     one path per step

Who owns a token: the first step that sampled it and has its experts; else the first step that has them at all. So
the last token a step samples, which the engine never forwarded there, takes its experts from the next step; without
one it is free. Where two steps recorded different experts for one token, `on_conflict` decides:

    owner    the token stays shared and takes the owner's experts
    split    the token is no longer shared, and neither is what follows it: every step keeps its own experts

Invariants, held by the tests: the loss rows (who, target, advantage, weight, path of tokens that predicts it) and the
experts along their paths are the same under every layout; under `split` they are what each step recorded.

Left out: sharing across prompts. A common system prompt is computed once per prompt, not once per batch.
"""

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from megastep.samples.prefix import common_prefix
from megastep.types import LossTable, Routes, Sample, Trie

LAYOUTS = ("flat", "merge", "trie")
ON_CONFLICT = ("owner", "split")


@dataclass
class FoldReport:
    """What folding found; `sequences` are paths from a root to a leaf, tokens are those that must be computed."""

    sequences_before: int = 0  # steps with a trained token
    sequences_after: int = 0
    tokens_before: int = 0  # every step on its own
    tokens_distinct: int = 0  # every token of a trie once
    tokens_after: int = 0  # under the chosen layout
    tokens_free: int = 0  # of tokens_after: without recorded experts, in groups that have any
    tokens_replayed: int = 0  # of tokens_after: with recorded experts
    routes_compared: int = 0  # experts that a step recorded for a token it does not own
    routes_conflicting: int = 0  # ... and that differ from the owner's

    def count(self, trie: Trie) -> None:
        self.sequences_after += trie.sequences
        self.tokens_after += len(trie)
        if trie.routes is not None:
            replayed = sum(map(len, trie.routes.rows))
            self.tokens_replayed += replayed
            self.tokens_free += len(trie) - replayed


def fold(
    samples: list[Sample], layout: str = "trie", on_conflict: str = "owner"
) -> tuple[list[Trie], FoldReport]:
    """Tries of the samples, prompt by prompt. The steps of a trajectory must come in order."""
    if layout not in LAYOUTS:
        raise ValueError(f"train.pack_layout = {layout}: must be one of {', '.join(LAYOUTS)}")
    if on_conflict not in ON_CONFLICT:
        raise ValueError(
            f"routing_replay.on_conflict = {on_conflict}: must be one of {', '.join(ON_CONFLICT)}"
        )
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    tries: list[Trie] = []
    report = FoldReport()
    for group in groups.values():
        tries += _fold_group(group, layout, on_conflict, report)
    return tries, report


def _fold_group(
    samples: list[Sample], layout: str, on_conflict: str, report: FoldReport
) -> list[Trie]:
    rows = _Rows(samples)
    if not len(rows.response):
        return []  # nothing is trained
    distinct = restrict(_build(samples, rows, on_conflict, report), slice(None))
    if layout == "trie":
        result = [distinct]
    else:
        result = [restrict(distinct, part) for part in _parts(samples, rows, distinct, layout)]
    report.sequences_before += int(np.count_nonzero(rows.need))
    report.tokens_before += int(rows.need.sum())
    report.tokens_distinct += len(distinct)
    for trie in result:
        report.count(trie)
    return result


def _build(samples: list[Sample], rows: "_Rows", on_conflict: str, report: FoldReport) -> Trie:
    """Everything the steps hold, trained or not: what is not trained may still have recorded experts."""
    tree = _Tree(samples)
    trie = tree.trie(rows)
    if all(sample.step.routing is None for sample in samples):
        return trie
    trie.routes, owner = _routes(samples, tree, trie)
    conflicts = _conflicts(samples, tree, trie, owner, report)
    if conflicts and on_conflict == "split":
        tree.split(samples, conflicts)
        trie = tree.trie(rows)
        trie.routes, _ = _routes(samples, tree, trie)
    return trie


# ---------------------------------------------------------------- the radix tree


class _Tree:
    """A radix tree over `keys`, all steps' tokens one after another. A node is a run of keys; every step ends one."""

    def __init__(self, samples: list[Sample]):
        self.keys = np.concatenate(
            [ids for s in samples for ids in (s.step.prompt_ids, s.step.response_ids)]
        )
        self.bounds = np.cumsum([0] + [len(s.step) for s in samples]).tolist()
        self._insert_all()

    def _insert_all(self) -> None:
        # Node 0 is an empty root above all others.
        self.first, self.depth, self.length, self.parent, self.children = [0], [0], [0], [-1], [{}]
        self.path = [0]  # nodes of the sequence inserted last
        self.leaf = []  # [sample] the node that its step ends
        latest = self.keys[:0]
        for begin, stop in zip(self.bounds, self.bounds[1:]):
            sequence = self.keys[begin:stop]
            self.leaf.append(self._insert(sequence, begin, common_prefix(latest, sequence)))
            latest = sequence
        self._order()

    def _insert(self, sequence: np.ndarray, begin: int, shared: int) -> int:
        """Add a sequence whose first `shared` keys are those of the path; return the node it ends."""
        path = self.path
        while len(path) > 1 and self.depth[path[-1]] >= shared:
            path.pop()
        if self.depth[path[-1]] + self.length[path[-1]] > shared:
            path[-1] = self._cut(path[-1], shared)
        while shared < len(sequence):
            node, key = path[-1], int(sequence[shared])
            child = self.children[node].get(key)
            if child is None:
                path.append(self._add(node, key, begin + shared, shared, len(sequence) - shared))
                break
            run = self.keys[self.first[child] : self.first[child] + self.length[child]]
            shared += common_prefix(run, sequence[shared:])
            if shared < self.depth[child] + self.length[child]:
                child = self._cut(child, shared)
            path.append(child)
        return path[-1]

    def _add(self, parent: int, key: int, first: int, depth: int, length: int) -> int:
        node = len(self.first)
        self.first.append(first)
        self.depth.append(depth)
        self.length.append(length)
        self.parent.append(parent)
        self.children.append({})
        self.children[parent][key] = node
        return node

    def _cut(self, node: int, depth: int) -> int:
        """Move the part of a node above `depth` into a new node; the lower part keeps its number and children."""
        upper_length = depth - self.depth[node]
        first = self.first[node]
        upper = self._add(
            self.parent[node], int(self.keys[first]), first, self.depth[node], upper_length
        )
        self.first[node] += upper_length
        self.depth[node] = depth
        self.length[node] -= upper_length
        self.parent[node] = upper
        self.children[upper][int(self.keys[first + upper_length])] = node
        return upper

    def _order(self) -> None:
        """Depth first: `order` of the nodes, and for each where its tokens (`at`) and its subtree (`end`) lie."""
        self.order, stack = [], [0]
        while stack:
            node = stack.pop()
            self.order.append(node)
            stack.extend(reversed(self.children[node].values()))
        self.at, self.end, at = [0] * len(self.order), [0] * len(self.order), 0
        for node in self.order:
            self.at[node] = at
            at += self.length[node]
            self.end[node] = at
        for node in reversed(self.order[1:]):
            parent = self.parent[node]
            self.end[parent] = max(self.end[parent], self.end[node])

    def runs(self, sample: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Where tokens start..stop of a step lie in the trie: runs (index, position, length), from the root down."""
        result, node = [], self.leaf[sample]
        while start < stop:
            depth = self.depth[node]
            first = max(start, depth)
            if first < stop:
                result.append((self.at[node] + first - depth, first, stop - first))
                stop = first
            node = self.parent[node]
        return result[::-1]

    def trie(self, rows: "_Rows") -> Trie:
        order = self.order[1:]
        keys = np.concatenate(
            [self.keys[self.first[n] : self.first[n] + self.length[n]] for n in order]
        )
        at, length, depth, end = (
            np.array([column[n] for n in order], np.int32)
            for column in (self.at, self.length, self.depth, self.end)
        )
        return Trie(
            tokens=keys.astype(np.int32, copy=False),  # of a split key, the low half
            position=np.arange(len(keys), dtype=np.int32) + np.repeat(depth - at, length),
            end=np.repeat(end, length),
            loss=rows.table(self),
        )

    def split(self, samples: list[Sample], conflicts: list["_Conflict"]) -> None:
        """Build the tree anew so that tokens with different experts are different keys: token + variant · 2³²."""
        keys = self.keys.astype(np.int64)
        for conflict, variant in zip(conflicts, _variants(samples, conflicts)):
            keys[self.bounds[conflict.sample] + conflict.position] += variant << 32
        # What a step did not record itself, it has from the step before it in its trajectory.
        previous: dict[int, int] = {}
        for i, sample in enumerate(samples):
            j, previous[sample.trajectory] = previous.get(sample.trajectory), i
            missing = len(sample.step) if sample.step.routing is None else sample.step.routing_start
            if j is not None and missing:
                mine, theirs = self.bounds[i], self.bounds[j]
                shared = common_prefix(
                    self.keys[mine : self.bounds[i + 1]], self.keys[theirs : self.bounds[j + 1]]
                )
                inherited = min(shared, missing)
                keys[mine : mine + inherited] = keys[theirs : theirs + inherited]
        self.keys = keys
        self._insert_all()


# ---------------------------------------------------------------- loss rows


class _Rows:
    """The trained tokens of some samples, in their order."""

    def __init__(self, samples: list[Sample]):
        self.samples = samples
        prompts = np.array([len(s.step.prompt_ids) for s in samples])
        first = np.cumsum(
            [0] + [len(s.step.response_ids) for s in samples]
        )  # [sample + 1] in all responses
        # [row] where in all responses, the sample, where in its response
        self.response = np.flatnonzero(np.concatenate([s.step.loss_mask for s in samples]))
        self.start = np.searchsorted(self.response, first)  # [sample + 1] its first row
        self.counts = np.diff(self.start)
        self.sample = np.repeat(np.arange(len(samples)), self.counts)
        self.offset = self.response - first[self.sample]
        # [sample] tokens to compute: up to the source of its last trained token
        trained = self.counts > 0
        self.need = np.zeros(len(samples), np.int64)
        self.need[trained] = prompts[trained] + self.offset[self.start[1:][trained] - 1]

    def table(self, tree: _Tree) -> LossTable:
        samples = self.samples
        return LossTable(
            src=self._sources(tree),
            target=np.concatenate([s.step.response_ids for s in samples])[self.response],
            advantage=self._per_row([s.advantage for s in samples], np.float32),
            weight=self._per_row([s.weight for s in samples], np.float32),
            rollout_logprob=np.concatenate([_logprobs(s) for s in samples])[self.response],
            group=self._per_row([s.group for s in samples], np.int32),
            trajectory=self._per_row([s.trajectory for s in samples], np.int32),
            step=self._per_row([s.step.index for s in samples], np.int32),
        )

    def _per_row(self, per_sample: list, dtype) -> np.ndarray:
        return np.repeat(np.array(per_sample, dtype), self.counts)

    def _sources(self, tree: _Tree) -> np.ndarray:
        """Trie index of the token before each trained token, on its own step's path."""
        # The index of every token from the last of the prompt on, step after step; a row reads its own.
        runs, first = [], [0]
        for i, (sample, need) in enumerate(zip(self.samples, self.need.tolist())):
            prompt = len(sample.step.prompt_ids)
            runs += tree.runs(i, prompt - 1, need)
            first.append(first[-1] + max(need - prompt + 1, 0))
        index, _, length = np.array(runs, np.int32).T
        at = np.cumsum(length, dtype=np.int32) - length
        indices = np.arange(first[-1], dtype=np.int32) + np.repeat(index - at, length)
        return indices[np.array(first)[self.sample] + self.offset]


def _logprobs(sample: Sample) -> np.ndarray:
    recorded = sample.step.logprobs
    return (
        np.full(len(sample.step.response_ids), np.nan, np.float32) if recorded is None else recorded
    )


# ---------------------------------------------------------------- experts


def _routes(samples: list[Sample], tree: _Tree, trie: Trie) -> tuple[Routes, np.ndarray]:
    """The experts of each token, and the sample that owns it (-1: nobody has recorded any)."""
    owner = np.full(len(trie), -1, np.int32)
    # What is painted later wins: sampled tokens over context, earlier steps over later ones.
    for sampled in (False, True):
        for i in reversed(range(len(samples))):
            step = samples[i].step
            prompt = len(step.prompt_ids)
            start = max(step.routing_start, prompt) if sampled else step.routing_start
            stop = step.routing_end if sampled else min(step.routing_end, prompt)
            for index, _, length in tree.runs(i, start, stop):
                owner[index : index + length] = i
    start, stop = _runs_of(owner, trie.position)
    owned = owner[start] >= 0
    start, stop = start[owned], stop[owned]
    rows = []
    for i, position, length in zip(
        owner[start].tolist(), trie.position[start].tolist(), (stop - start).tolist()
    ):
        step = samples[i].step
        row = position - step.routing_start
        rows.append(step.routing[row : row + length])
    shape = next(s.step.routing.shape[1:] for s in samples if s.step.routing is not None)
    return Routes(start.astype(np.int32), rows, shape), owner


def _runs_of(owner: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Runs of consecutive tokens of one path with one owner: starts and stops."""
    begins = np.ones(len(owner), bool)
    begins[1:] = (owner[1:] != owner[:-1]) | (position[1:] != position[:-1] + 1)
    start = np.flatnonzero(begins)
    return start, np.append(start[1:], len(owner))


@dataclass
class _Conflict:
    """Tokens of one sample whose recorded experts differ from their owner's."""

    sample: int
    position: np.ndarray  # [n] in the sample
    token: np.ndarray  # [n] in the trie


def _conflicts(
    samples, tree: _Tree, trie: Trie, owner: np.ndarray, report: FoldReport
) -> list[_Conflict]:
    starts, stops = (bounds.tolist() for bounds in _runs_of(owner, trie.position))
    found = []
    for i, sample in enumerate(samples):
        step = sample.step
        for index, position, length in tree.runs(i, step.routing_start, step.routing_end):
            at, stop = index, index + length
            run = bisect_right(starts, at) - 1
            while at < stop:
                piece = min(stops[run], stop) - at
                theirs = samples[owner[at]].step
                if theirs is not step:
                    depth = position + at - index
                    differ = _differing(step, theirs, depth, piece)
                    report.routes_compared += piece
                    report.routes_conflicting += len(differ)
                    if len(differ):
                        found.append(_Conflict(i, depth + differ, at + differ))
                at += piece
                run += 1
    return found


def _differing(a, b, position: int, length: int) -> np.ndarray:
    """Which of these tokens two steps recorded different experts for."""
    mine, theirs = (s.routing[position - s.routing_start :][:length] for s in (a, b))
    if np.array_equal(mine, theirs):
        return np.zeros(0, np.int64)
    return np.flatnonzero((mine != theirs).any(axis=(1, 2)))


def _variants(samples: list[Sample], conflicts: list[_Conflict]) -> list[np.ndarray]:
    """A number from 1 for each different (token, experts); 0 is left to the owner's."""
    records = []
    for conflict in conflicts:
        step = samples[conflict.sample].step
        experts = step.routing[conflict.position - step.routing_start].reshape(
            len(conflict.token), -1
        )
        token = conflict.token.astype(np.int64)[:, None]
        records.append(np.concatenate([token.view(np.uint8), experts.view(np.uint8)], axis=1))
    table = np.concatenate(records)
    _, number = np.unique(table.view(f"V{table.shape[1]}").ravel(), return_inverse=True)
    return np.split(number.astype(np.int64) + 1, np.cumsum([len(c.token) for c in conflicts])[:-1])


# ---------------------------------------------------------------- layouts


def restrict(trie: Trie, rows: np.ndarray | slice) -> Trie:
    """The part of a trie that these loss rows need: the root paths of their sources, and nothing beside."""
    loss = trie.loss.take(rows)
    deepest = np.append(loss.step_starts()[1:], len(loss)) - 1
    sources = np.sort(loss.src[deepest])
    first = trie.node_starts
    stop = np.append(first[1:], np.int32(len(trie)))
    # A node is kept up to the last source in its subtree; -1 stands for none.
    end = trie.end[first]
    last = np.append(sources, np.int32(-1))[np.searchsorted(sources, end) - 1]
    length = np.clip(np.minimum(stop, last + 1) - first, 0, None)
    at = np.append(
        np.int32(0), np.cumsum(length, dtype=np.int32)
    )  # where each node lies afterwards, then the total
    node = np.searchsorted(first, loss.src, side="right") - 1
    loss.src = loss.src + (at[node] - first[node])
    kept = np.flatnonzero(length)
    end = at[np.searchsorted(first, end[kept])]
    first, length, at = first[kept], length[kept], at[kept]
    return Trie(
        tokens=np.concatenate(
            [trie.tokens[a:b] for a, b in zip(first.tolist(), (first + length).tolist())]
        ),
        position=np.arange(length.sum(), dtype=np.int32)
        + np.repeat(trie.position[first] - at, length),
        end=np.repeat(end, length),
        loss=loss,
        routes=None if trie.routes is None else _take_routes(trie.routes, first, length, at),
    )


def _take_routes(routes: Routes, first: np.ndarray, length: np.ndarray, at: np.ndarray) -> Routes:
    """The experts of some ranges of tokens, range i moved from first[i] to at[i]."""
    starts = routes.start.tolist()
    stops = routes.start + np.array([len(r) for r in routes.rows], np.int32)
    overlaps = zip(
        np.searchsorted(stops, first, side="right").tolist(),
        np.searchsorted(routes.start, first + length).tolist(),
    )
    stops = stops.tolist()
    new_start, new_rows = [], []
    for (low, high), begin, n, to in zip(overlaps, first.tolist(), length.tolist(), at.tolist()):
        for run in range(low, high):
            a, b = max(starts[run], begin), min(stops[run], begin + n)
            new_start.append(to + a - begin)
            new_rows.append(routes.rows[run][a - starts[run] : b - starts[run]])
    return Routes(np.array(new_start, np.int32), new_rows, routes.shape)


def _parts(samples: list[Sample], rows: _Rows, trie: Trie, layout: str) -> list[slice]:
    """The loss rows of each sequence under `flat` or `merge`."""
    alone = [(i, i + 1) for i in range(len(samples))]
    ranges = alone if layout == "flat" else _chains(samples, rows, trie)
    bounds = [rows.start[[first, stop]].tolist() for first, stop in ranges]
    return [slice(first, stop) for first, stop in bounds if first < stop]


def _chains(samples: list[Sample], rows: _Rows, trie: Trie) -> list[tuple[int, int]]:
    """Ranges of samples in which each step's prompt begins with the whole step before it."""
    chains, start, tip = [], 0, -1  # tip: the last token of the chain's path
    for i, sample in enumerate(samples):
        source = int(trie.loss.src[rows.start[i + 1] - 1]) if rows.counts[i] else None
        if i > start:
            on_path = (
                source is None or tip < 0 or tip <= source < trie.end[tip]
            )  # false after a split
            if not (on_path and _continues(samples[i - 1], sample)):
                chains.append((start, i))
                start, tip = i, -1
        tip = tip if source is None else source
    return chains + [(start, len(samples))]


def _continues(before: Sample, sample: Sample) -> bool:
    if sample.trajectory != before.trajectory or sample.step.index != before.step.index + 1:
        return False
    prompt, response = len(before.step.prompt_ids), before.step.response_ids
    ids = sample.step.prompt_ids
    whole = np.array_equal(ids[:prompt], before.step.prompt_ids)
    return whole and np.array_equal(ids[prompt : prompt + len(response)], response)
