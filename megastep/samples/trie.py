"""Folding: the steps of a prompt become a trie that holds every distinct token once.

    1. insert     each step's prompt + response into a radix tree, from the path of the last step:
                  consecutive steps share most tokens, so a step costs one comparison and few nodes
    2. emit       the nodes depth first: tokens, position, end
    3. loss       one row per trained token; its source is the token before it on its step's path
    4. routing    each token takes the routing that one step, its owner, recorded, by reference
    5. restrict   to the tokens that some loss row needs

The pack layout decides how much of that trie goes into one sequence:

    trie     one trie per prompt
    merge    one path per chain of steps in which each prompt begins with the whole previous step
    flat     one path per step

The owner of a token is the first step that sampled it and recorded its routing; else the first step
that recorded it. The engine never forwards the last token that it samples, so that token takes its
routing from the next step; without a next step it is free. `on_conflict` decides where two steps
recorded different routed experts for one token:

    owner    the token stays shared and takes the owner's routing
    split    the token and its successors are no longer shared: every step keeps its own routing

Invariants, held by the tests: the loss rows (identity, target, advantage, weight, path of tokens
that predicts the target) and the routing along their paths are the same under every pack layout;
under `split` the routing is what each step recorded.

Left out: sharing across prompts. A common system prompt is computed once per prompt.
"""

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from megastep.samples.prefix import common_prefix
from megastep.types import LossTable, Routes, Routing, Sample, Step, Trie, routing_keys

PACK_LAYOUTS = ("flat", "merge", "trie")
ON_CONFLICT = ("owner", "split")


@dataclass
class FoldReport:
    """Counts of one mini-batch. Sequences are paths from a root to a leaf."""

    sequences_before: int = 0  # steps with a trained token
    sequences_after: int = 0
    tokens_before: int = 0  # each step computed separately
    tokens_distinct: int = 0  # each token of a trie once
    tokens_after: int = 0  # under the chosen pack layout
    tokens_free: int = 0  # of tokens_after: without recorded routing, in groups that have any
    tokens_replayed: int = 0  # of tokens_after: with recorded routing
    routes_compared: int = 0  # tokens whose routing a step recorded without owning them
    routes_conflicting: int = 0  # of routes_compared: the owner recorded other experts

    def count(self, trie: Trie) -> None:
        self.sequences_after += trie.sequences
        self.tokens_after += len(trie)
        if trie.routes is not None:
            replayed = sum(map(len, trie.routes.rows))
            self.tokens_replayed += replayed
            self.tokens_free += len(trie) - replayed


def fold(
    samples: list[Sample], pack_layout: str = "trie", on_conflict: str = "owner"
) -> tuple[list[Trie], FoldReport]:
    """Tries of the samples, prompt by prompt. The steps of a trajectory must be in order."""
    if pack_layout not in PACK_LAYOUTS:
        choices = ", ".join(PACK_LAYOUTS)
        raise ValueError(f"train.pack_layout = {pack_layout}: must be one of {choices}")
    if on_conflict not in ON_CONFLICT:
        choices = ", ".join(ON_CONFLICT)
        raise ValueError(f"routing_replay.on_conflict = {on_conflict}: must be one of {choices}")
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    tries: list[Trie] = []
    report = FoldReport()
    for group in groups.values():
        tries += _fold_group(group, pack_layout, on_conflict, report)
    return tries, report


def _fold_group(
    samples: list[Sample], pack_layout: str, on_conflict: str, report: FoldReport
) -> list[Trie]:
    rows = _LossRows(samples)
    if not len(rows):
        return []
    distinct = restrict(_build(samples, rows, on_conflict, report), slice(None))
    if pack_layout == "trie":
        result = [distinct]
    else:
        ranges = _sequence_rows(samples, rows, distinct, pack_layout)
        result = [restrict(distinct, row_range) for row_range in ranges]
    report.sequences_before += int(np.count_nonzero(rows.needed_tokens))
    report.tokens_before += int(rows.needed_tokens.sum())
    report.tokens_distinct += len(distinct)
    for trie in result:
        report.count(trie)
    return result


def _build(samples: list[Sample], rows: "_LossRows", on_conflict: str, report: FoldReport) -> Trie:
    """The trie of all tokens, trained or not: an untrained step may have recorded routing too."""
    tree = Tree(samples)
    trie = tree.trie(rows)
    if all(sample.step.routing is None for sample in samples):
        return trie
    owners = Owners(samples, tree, trie.position)
    conflicts = find_conflicts(samples, tree, owners, report)
    if conflicts and on_conflict == "split":
        tree.split_conflicts(samples, conflicts)
        trie = tree.trie(rows)
        owners = Owners(samples, tree, trie.position)
    trie.routes = _routes(samples, trie, owners)
    return trie


# ---------------------------------------------------------------- the radix tree


class Tree:
    """A radix tree over `keys`, the tokens of all steps in a row. A node is a run of keys.

    Node 0 is an empty root above all others. Every step ends where a node ends.
    """

    def __init__(self, samples: list[Sample]):
        ids = [ids for s in samples for ids in (s.step.prompt_ids, s.step.response_ids)]
        self.keys = np.concatenate(ids)
        # [sample + 1] the first key of each step, then the total
        self.bounds: list[int] = np.cumsum([0] + [len(s.step) for s in samples]).tolist()
        self._insert_all()

    def _insert_all(self) -> None:
        # Columns [node]:
        self.first = [0]  # index in `keys` of the node's first key
        self.depth = [0]  # keys above the node
        self.length = [0]  # keys of the node
        self.parent = [-1]
        self.children: list[dict[int, int]] = [{}]  # first key → child
        self.path = [0]  # nodes of the sequence inserted last, from the root down
        self.leaf: list[int] = []  # [sample] the node that its step ends
        previous = self.keys[:0]
        for begin, stop in zip(self.bounds, self.bounds[1:]):
            sequence = self.keys[begin:stop]
            self.leaf.append(self._insert(sequence, begin, common_prefix(previous, sequence)))
            previous = sequence
        self._order()

    def _insert(self, sequence: np.ndarray, begin: int, shared: int) -> int:
        """Add a sequence, keys[begin:], and return the node it ends.

        shared: the number of its first keys that are on `path`.

            inserted last   A B T C .          path: the root and one node, A B T C .
            sequence        A B C . O D .      shared = 2

            back up     to the node that holds the last shared key, B: it is A B T C .
            split       it after B:                A B ─── T C .
            descend     while a child matches: no child of A B begins with C
            add         the rest as a new leaf:    A B ─┬─ T C .
                                                        └─ C . O D .
        """
        path = self.path
        while len(path) > 1 and self.depth[path[-1]] >= shared:
            path.pop()
        if self.depth[path[-1]] + self.length[path[-1]] > shared:
            path[-1] = self._split_node(path[-1], shared)
        matched = shared  # keys of the sequence that `path` holds
        while matched < len(sequence):
            child = self.children[path[-1]].get(int(sequence[matched]))
            if child is None:
                rest = len(sequence) - matched
                path.append(self._add(path[-1], begin + matched, matched, rest))
                break
            child_keys = self.keys[self.first[child] : self.first[child] + self.length[child]]
            equal = common_prefix(child_keys, sequence[matched:])
            matched += equal
            partly = equal < self.length[child]
            path.append(self._split_node(child, matched) if partly else child)
        return path[-1]

    def _add(self, parent: int, first: int, depth: int, length: int) -> int:
        node = len(self.first)
        self.first.append(first)
        self.depth.append(depth)
        self.length.append(length)
        self.parent.append(parent)
        self.children.append({})
        self.children[parent][int(self.keys[first])] = node
        return node

    def _split_node(self, node: int, depth: int) -> int:
        """Move the keys above `depth` to a new parent and return it.

        The lower part keeps the node's number and its children.
        """
        first = self.first[node]
        upper_length = depth - self.depth[node]
        upper = self._add(self.parent[node], first, self.depth[node], upper_length)
        self.first[node] += upper_length
        self.depth[node] = depth
        self.length[node] -= upper_length
        self.parent[node] = upper
        self.children[upper][int(self.keys[first + upper_length])] = node
        return upper

    def _order(self) -> None:
        """Set the depth-first `order` of the nodes, and per node its trie index and subtree end."""
        self.order: list[int] = []
        stack = [0]
        while stack:
            node = stack.pop()
            self.order.append(node)
            stack.extend(reversed(self.children[node].values()))
        self.at = [0] * len(self.order)  # [node] trie index of its first token
        self.end = [0] * len(self.order)  # [node] first trie index after its subtree
        tokens = 0
        for node in self.order:
            self.at[node] = tokens
            tokens += self.length[node]
            self.end[node] = tokens
        for node in reversed(self.order[1:]):
            parent = self.parent[node]
            self.end[parent] = max(self.end[parent], self.end[node])

    def runs(self, sample: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Tokens start..stop of a step as runs (trie index, position, length), root first."""
        result = []
        node = self.leaf[sample]
        while start < stop:
            depth = self.depth[node]
            first = max(start, depth)
            if first < stop:
                result.append((self.at[node] + first - depth, first, stop - first))
                stop = first
            node = self.parent[node]
        return result[::-1]

    def trie(self, rows: "_LossRows") -> Trie:
        nodes = self.order[1:]
        runs = [self.keys[self.first[n] : self.first[n] + self.length[n]] for n in nodes]
        length = np.array([self.length[n] for n in nodes], np.int32)
        end = np.array([self.end[n] for n in nodes], np.int32)
        return Trie(
            # drops the variant, see split_conflicts
            tokens=np.concatenate(runs).astype(np.int32, copy=False),
            position=self.positions(),
            end=np.repeat(end, length),
            loss=rows.table(self),
        )

    def positions(self) -> np.ndarray:
        """[token] i32: its depth in the trie."""
        nodes = self.order[1:]
        # [node] i32
        at = np.array([self.at[n] for n in nodes], np.int32)
        length = np.array([self.length[n] for n in nodes], np.int32)
        depth = np.array([self.depth[n] for n in nodes], np.int32)
        tokens = int(length.sum())
        return np.arange(tokens, dtype=np.int32) + np.repeat(depth - at, length)

    def split_conflicts(self, samples: list[Sample], conflicts: list["Conflict"]) -> None:
        """Rebuild the tree with keys token + variant · 2³²: one variant per recorded routing."""
        keys = self.keys.astype(np.int64)
        for conflict, variant in zip(conflicts, number_variants(samples, conflicts)):
            keys[self.bounds[conflict.sample] + conflict.position] += variant << 32
        # A step inherits the routing that it did not record from its trajectory's previous step.
        previous: dict[int, int] = {}  # trajectory → its latest sample
        for i, sample in enumerate(samples):
            j = previous.get(sample.trajectory)
            previous[sample.trajectory] = i
            missing = len(sample.step) if sample.step.routing is None else sample.step.routing_start
            if j is None or not missing:
                continue
            mine = self.bounds[i]
            theirs = self.bounds[j]
            shared = common_prefix(
                self.keys[mine : self.bounds[i + 1]], self.keys[theirs : self.bounds[j + 1]]
            )
            inherited = min(shared, missing)
            keys[mine : mine + inherited] = keys[theirs : theirs + inherited]
        self.keys = keys
        self._insert_all()


# ---------------------------------------------------------------- loss rows


class _LossRows:
    """The trained tokens of some samples, in order: one row of the loss table each."""

    def __init__(self, samples: list[Sample]):
        self.samples = samples
        prompt_tokens = np.array([s.step.prompt_tokens for s in samples])
        # [sample + 1] the first token of each response among all response tokens, then the total
        response_start = np.cumsum([0] + [len(s.step.response_ids) for s in samples])
        # [row] index among all response tokens
        self.response_index = np.flatnonzero(np.concatenate([s.step.loss_mask for s in samples]))
        # [sample + 1] the first row of each sample, then the total
        self.start = np.searchsorted(self.response_index, response_start)
        self.counts = np.diff(self.start)  # [sample]
        self.sample = np.repeat(np.arange(len(samples)), self.counts)  # [row]
        # [row] index in the sample's own response
        self.offset = self.response_index - response_start[self.sample]
        # [sample] tokens to compute: up to the source of its last trained token
        self.needed_tokens = np.zeros(len(samples), np.int64)
        trained = self.counts > 0
        last_offset = self.offset[self.start[1:][trained] - 1]
        self.needed_tokens[trained] = prompt_tokens[trained] + last_offset

    def __len__(self) -> int:
        return len(self.response_index)

    def table(self, tree: Tree) -> LossTable:
        samples = self.samples
        response_ids = np.concatenate([s.step.response_ids for s in samples])
        logprobs = np.concatenate([_logprobs(s) for s in samples])
        return LossTable(
            src=self._sources(tree),
            target=response_ids[self.response_index],
            advantage=self._per_row([s.advantage for s in samples], np.float32),
            weight=self._per_row([s.weight for s in samples], np.float32),
            rollout_logprob=logprobs[self.response_index],
            group=self._per_row([s.group for s in samples], np.int32),
            trajectory=self._per_row([s.trajectory for s in samples], np.int32),
            step=self._per_row([s.step.index for s in samples], np.int32),
        )

    def _per_row(self, per_sample: list, dtype: type) -> np.ndarray:
        return np.repeat(np.array(per_sample, dtype), self.counts)

    def _sources(self, tree: Tree) -> np.ndarray:
        """[row] trie index of the token before each trained token, on its step's path."""
        # Expand the runs to the trie index of every token from the last prompt token on, step by
        # step. `first` [sample + 1]: where the tokens of each step begin among these.
        runs = []
        first = [0]
        for i, (sample, needed) in enumerate(zip(self.samples, self.needed_tokens.tolist())):
            prompt_tokens = sample.step.prompt_tokens
            runs += tree.runs(i, prompt_tokens - 1, needed)
            first.append(first[-1] + max(needed - prompt_tokens + 1, 0))
        index, _, length = np.array(runs, np.int32).T
        run_start = np.cumsum(length, dtype=np.int32) - length
        indices = np.arange(first[-1], dtype=np.int32) + np.repeat(index - run_start, length)
        return indices[np.array(first)[self.sample] + self.offset]


def _logprobs(sample: Sample) -> np.ndarray:
    if sample.step.logprobs is None:
        return np.full(len(sample.step.response_ids), np.nan, np.float32)
    return sample.step.logprobs


# ---------------------------------------------------------------- routing


def _find_owners(samples: list[Sample], tree: Tree, tokens: int) -> np.ndarray:
    """[token] the sample whose routing it takes; -1 where no step recorded any.

        sample 0   prompt [A]          response [B C]    recorded A B; C was never forwarded
        sample 1   prompt [A B C O]    response [D E]    recorded A B C O D

        token                 A  B  C  O  D  E
        1. prompt tokens      0  1  1  1  -  -    sample 1 writes A B C O, then sample 0 writes A
        2. sampled tokens     0  0  1  1  1  -    sample 1 writes D, then sample 0 writes B

    The last writer wins: sampled tokens over prompt tokens, earlier samples over later ones.
    """
    owner = np.full(tokens, -1, np.int32)
    for sampled in (False, True):
        for i in reversed(range(len(samples))):
            step = samples[i].step
            prompt_tokens = step.prompt_tokens
            if sampled:
                runs = tree.runs(i, max(step.routing_start, prompt_tokens), step.routing_end)
            else:
                runs = tree.runs(i, step.routing_start, min(step.routing_end, prompt_tokens))
            for index, _, length in runs:
                owner[index : index + length] = i
    return owner


class Owners:
    """The owner of each token, and the runs of consecutive tokens on one path with one owner."""

    def __init__(self, samples: list[Sample], tree: Tree, position: np.ndarray):
        self.owner = _find_owners(samples, tree, len(position))  # [token]
        # Only where a node begins can a path end.
        nodes = np.array(tree.at[1:], np.int64)
        nodes = nodes[nodes > 0]
        breaks = nodes[position[nodes] != position[nodes - 1] + 1]
        changes = np.flatnonzero(self.owner[1:] != self.owner[:-1]) + 1
        # [run] its first token, and the first one after it
        self.start = np.union1d(np.append(0, breaks), changes)
        self.stop = np.append(self.start[1:], len(position))


def _routes(samples: list[Sample], trie: Trie, owners: Owners) -> Routes:
    """Views of the recorded routing, one per run of tokens on one path with one owner.

    The example of `_find_owners` gives start = [0, 2]; E, without an owner, is in no run:

        A B      tokens 0 and 1    rows[0] = routing[0:2] of sample 0
        C O D    tokens 2 to 4     rows[1] = routing[2:5] of sample 1
    """
    owner = owners.owner
    recorded = owner[owners.start] >= 0
    start = owners.start[recorded]
    length = owners.stop[recorded] - start
    rows = []
    for i, position, tokens in zip(
        owner[start].tolist(), trie.position[start].tolist(), length.tolist()
    ):
        rows.append(_recorded(samples[i].step, position, tokens))
    shape = next(s.step.routing.shape[1:] for s in samples if s.step.routing is not None)
    return Routes(start.astype(np.int32), rows, shape)


def _recorded(step: Step, position: int, tokens: int) -> Routing:
    """[tokens, L, K] slice of the routing that a step recorded from this position on."""
    assert step.routing is not None
    row = position - step.routing_start
    return step.routing[row : row + tokens]


@dataclass
class Conflict:
    """Tokens for which a sample recorded other experts than their owner."""

    sample: int
    position: np.ndarray  # [n] in the sample
    token: np.ndarray  # [n] in the trie


def find_conflicts(
    samples: list[Sample], tree: Tree, owners: Owners, report: FoldReport
) -> list[Conflict]:
    owner = owners.owner
    run_starts, run_stops = (bounds.tolist() for bounds in (owners.start, owners.stop))
    conflicts = []
    for i, sample in enumerate(samples):
        step = sample.step
        for index, position, length in tree.runs(i, step.routing_start, step.routing_end):
            stop = index + length
            token = index
            run = bisect_right(run_starts, token) - 1
            while token < stop:
                tokens = min(run_stops[run], stop) - token  # of one owner
                owner_step = samples[owner[token]].step
                if owner_step is not step:
                    depth = position + token - index
                    differ = _differing(step, owner_step, depth, tokens)
                    report.routes_compared += tokens
                    report.routes_conflicting += len(differ)
                    if len(differ):
                        conflicts.append(Conflict(i, depth + differ, token + differ))
                token += tokens
                run += 1
    return conflicts


def _differing(a: Step, b: Step, position: int, tokens: int) -> np.ndarray:
    """Offsets, from `position`, of the tokens for which two steps recorded different experts."""
    mine = routing_keys(_recorded(a, position, tokens))
    theirs = routing_keys(_recorded(b, position, tokens))
    if np.array_equal(mine, theirs):
        return np.zeros(0, np.int64)
    return np.flatnonzero((mine != theirs).any(axis=1))


def number_variants(samples: list[Sample], conflicts: list[Conflict]) -> list[np.ndarray]:
    """A number from 1 for each distinct (token, routed experts); 0 is the owner's variant."""
    records = []
    for conflict in conflicts:
        step = samples[conflict.sample].step
        assert step.routing is not None
        keys = routing_keys(step.routing)[conflict.position - step.routing_start]
        routing_bytes = keys.view(np.uint8)
        token_bytes = conflict.token.astype(np.int64)[:, None].view(np.uint8)
        records.append(np.concatenate([token_bytes, routing_bytes], axis=1))
    table = np.concatenate(records)
    _, number = np.unique(table.view(f"V{table.shape[1]}").ravel(), return_inverse=True)
    variants = number.astype(np.int64) + 1
    return np.split(variants, np.cumsum([len(c.token) for c in conflicts])[:-1])


# ---------------------------------------------------------------- restriction


def restrict(trie: Trie, rows: np.ndarray | slice) -> Trie:
    """The part of a trie that these loss rows need: the root paths of their sources.

    The trie of `types.py` has three nodes. Restricted to the row with source 6 (`O` predicts `D`):

        trie           A B   T C   C . O D             A B ─┬─ T C
        index          0 1   2 3   4 5 6 7                  └─ C . O D
        node_start     0     2     4
        last_needed    6     -     6                   the last needed source in the subtree
        kept_tokens    2     0     3
        new_start      0     2     2       5           where the node begins in the result

        result         A B   C . O                     its source: 6 + (2 - 4) = 4
    """
    loss = trie.loss.take(rows)
    # [node]
    node_start = trie.node_starts
    node_stop = np.append(node_start[1:], np.int32(len(trie)))
    subtree_end = trie.end[node_start]

    last_row_of_step = np.append(loss.step_starts()[1:], len(loss)) - 1
    sources = np.sort(loss.src[last_row_of_step])  # the deepest source of each step
    # The last source before the subtree's end; one before the node itself keeps nothing of it.
    last_needed = np.append(sources, np.int32(-1))[np.searchsorted(sources, subtree_end) - 1]
    kept_tokens = np.clip(np.minimum(node_stop, last_needed + 1) - node_start, 0, None)
    new_start = np.append(np.int32(0), np.cumsum(kept_tokens, dtype=np.int32))  # [node + 1]

    source_node = np.searchsorted(node_start, loss.src, side="right") - 1  # [row]
    loss.src = loss.src + (new_start[source_node] - node_start[source_node])

    kept = np.flatnonzero(kept_tokens)
    new_end = new_start[np.searchsorted(node_start, subtree_end[kept])]
    ranges = _Ranges(node_start[kept], kept_tokens[kept], new_start[kept])
    # [token of the result] its position minus its index
    offset = np.repeat(trie.position[ranges.start] - ranges.new_start, ranges.length)
    return Trie(
        tokens=np.concatenate([trie.tokens[a:b] for a, b in ranges.bounds()]),
        position=np.arange(len(offset), dtype=np.int32) + offset,
        end=np.repeat(new_end, ranges.length),
        loss=loss,
        routes=None if trie.routes is None else _take_routes(trie.routes, ranges),
    )


@dataclass
class _Ranges:
    """Ranges of tokens of a trie, and where they begin in another one."""

    start: np.ndarray  # [n] i32, ascending
    length: np.ndarray  # [n] i32
    new_start: np.ndarray  # [n] i32

    def bounds(self) -> list[tuple[int, int]]:
        return list(zip(self.start.tolist(), (self.start + self.length).tolist()))


def _take_routes(routes: Routes, ranges: _Ranges) -> Routes:
    """The routing of some ranges of tokens, at their new places."""
    run_start = routes.start
    run_stop = run_start + np.array([len(rows) for rows in routes.rows], np.int32)
    # [range] the first run that overlaps it, and the first one after it
    first_run = np.searchsorted(run_stop, ranges.start, side="right").tolist()
    after_run = np.searchsorted(run_start, ranges.start + ranges.length).tolist()
    starts: list[int] = run_start.tolist()
    stops: list[int] = run_stop.tolist()
    shifts = (ranges.new_start - ranges.start).tolist()
    new_start = []
    new_rows = []
    for i, (start, stop) in enumerate(ranges.bounds()):
        for run in range(first_run[i], after_run[i]):
            first = max(starts[run], start)
            last = min(stops[run], stop)
            new_start.append(first + shifts[i])
            new_rows.append(routes.rows[run][first - starts[run] : last - starts[run]])
    return Routes(np.array(new_start, np.int32), new_rows, routes.shape)


# ---------------------------------------------------------------- pack layouts merge and flat


def _sequence_rows(
    samples: list[Sample], rows: _LossRows, trie: Trie, pack_layout: str
) -> list[slice]:
    """The loss rows of each sequence under `flat` or `merge`."""
    if pack_layout == "flat":
        chains = [(i, i + 1) for i in range(len(samples))]
    else:
        chains = _chains(samples, rows, trie)
    bounds = [rows.start[[first, stop]].tolist() for first, stop in chains]
    return [slice(first, stop) for first, stop in bounds if first < stop]


def _chains(samples: list[Sample], rows: _LossRows, trie: Trie) -> list[tuple[int, int]]:
    """Ranges of samples in which each step's prompt begins with the whole previous step."""
    chains = []
    start = 0
    tip: int | None = None  # the last token on the chain's path
    for i, sample in enumerate(samples):
        source = int(trie.loss.src[rows.start[i + 1] - 1]) if rows.counts[i] else None
        if i > start:
            # False after split_conflicts: the same tokens are then on different paths.
            on_path = source is None or tip is None or tip <= source < trie.end[tip]
            if not (on_path and _continues(samples[i - 1], sample)):
                chains.append((start, i))
                start = i
                tip = None
        if source is not None:
            tip = source
    return [*chains, (start, len(samples))]


def _continues(previous: Sample, sample: Sample) -> bool:
    """Whether the prompt begins with the whole previous step of the same trajectory."""
    if sample.trajectory != previous.trajectory or sample.step.index != previous.step.index + 1:
        return False
    ids = sample.step.prompt_ids
    prompt_ids = previous.step.prompt_ids
    response_ids = previous.step.response_ids
    after_prompt = ids[len(prompt_ids) :]
    return np.array_equal(ids[: len(prompt_ids)], prompt_ids) and np.array_equal(
        after_prompt[: len(response_ids)], response_ids
    )
