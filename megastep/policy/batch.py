"""A micro-batch on its way into the model: numpy arrays of a trie as tensors on this rank's device."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megastep.distributed import parallel
from megastep.policy import context
from megastep.policy.attention import TrieParams, packed_params, trie_params
from megastep.policy.logprobs import LogitRows, logit_rows
from megastep.types import FREE, MicroBatch, Trie

ROPE_STEP = 1024  # rotary tables are made for multiples of this, and cached


@dataclass
class PolicyBatch:
    tokens: Tensor  # [1, T]
    padding: (
        Tensor  # [1, T/tp] bool: of the tokens that this rank's routers see, those that are padding
    )
    position: (
        Tensor  # [T] for the rotary embedding; with context parallelism that of all ranks' tokens
    )
    rope_tokens: int  # more than any position
    attention: TrieParams
    rows: LogitRows | None  # of the stage that has the head
    table_rows: (
        Tensor | None
    )  # with context parallelism: where this rank's rows are in the loss table
    table_size: int
    temperature: float  # that the rollout sampled with
    entropy_gradient: bool  # does the loss need it


def prepare(
    micro_batch: MicroBatch,
    groups: int,
    has_head: bool,
    kept_rows: int,
    temperature: float,
    entropy_gradient: bool,
) -> PolicyBatch:
    """groups: query heads per key head; kept_rows: see logprobs.py."""
    trie, device = micro_batch.trie, parallel.device()
    tokens, position, loss, table_rows = trie.tokens, trie.position, trie.loss, None
    padding = np.arange(len(trie)) >= micro_batch.real_tokens
    if parallel.place().context_size == 1:
        attention = trie_params(trie, groups, device)
    else:
        own = _own_tokens(trie)
        tokens, position = context.taken(tokens, own.take, padding=0), own.position
        padding = context.taken(padding, own.take, padding=True)
        attention = packed_params(own.starts, device, own.padded_starts)
        rows, at = context.rows_here(loss.src, own.take)
        loss = loss.take(rows)
        loss.src, table_rows = at, torch.from_numpy(rows).to(device)
    return PolicyBatch(
        tokens=torch.from_numpy(tokens).to(device, torch.int64).unsqueeze(0),
        padding=torch.from_numpy(parallel.own_stretch(padding)).to(device).unsqueeze(0),
        position=torch.from_numpy(position).to(device, torch.int64),
        rope_tokens=(int(position.max()) // ROPE_STEP + 1) * ROPE_STEP,
        attention=attention,
        rows=logit_rows(loss, kept_rows, device) if has_head else None,
        table_rows=table_rows,
        table_size=len(trie.loss),
        temperature=temperature,
        entropy_gradient=entropy_gradient,
    )


def own_routing(micro_batch: MicroBatch, layers: slice) -> np.ndarray:
    """[T, layers, K] of this rank's tokens, all tensor-parallel stretches of them."""
    routing = micro_batch.trie.routing(layers)
    if parallel.place().context_size == 1:
        return routing
    return context.taken(routing, _own_tokens(micro_batch.trie).take, padding=FREE)


def _own_tokens(trie: Trie) -> context.Spread:
    place = parallel.place()
    return context.spread(trie, place.context, place.context_size, place.tensor_size)
