"""The tensors of a micro-batch on this rank's device, from the numpy arrays of its trie."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megastep.distributed import parallel
from megastep.policy import context
from megastep.policy.attention import TrieParams, packed_sequences, trie_params
from megastep.policy.logprobs import LogitRows, logit_rows
from megastep.types import FREE, MicroBatch, Trie

ROPE_STEP = 1024  # rotary tables are built for multiples of this, and cached


@dataclass
class PolicyBatch:
    tokens: Tensor  # [1, T]
    # [1, T/tp] bool: padding among the tokens that this rank's routers see
    padding: Tensor
    position: Tensor  # [T] for the rotary embedding
    rope_tokens: int  # greater than any position
    attention: TrieParams
    rows: LogitRows | None  # None: the stage has no output layer
    # [n] with context parallelism: indices of this rank's rows in the loss table
    table_rows: Tensor | None
    table_size: int
    temperature: float  # of the rollout
    entropy_gradient: bool  # whether the loss needs it


def prepare(
    micro_batch: MicroBatch,
    groups: int,
    has_head: bool,
    kept_rows: int,
    temperature: float,
    entropy_gradient: bool,
    attention_setting: str,
) -> PolicyBatch:
    """groups: query heads per key head; kept_rows: see logprobs.py.

    attention_setting: policy.attention. Context parallelism has one kernel, for sequences.
    """
    trie = micro_batch.trie
    device = parallel.device()
    tokens = trie.tokens
    position = trie.position
    padding = np.arange(len(trie)) >= micro_batch.real_tokens
    loss = trie.loss
    table_rows = None
    if parallel.place().context_size == 1:
        attention = trie_params(trie, groups, device, attention_setting)
    else:
        shard = _context_shard(trie)
        tokens = context.take_tokens(tokens, shard.take, padding=0)
        position = shard.position
        padding = context.take_tokens(padding, shard.take, padding=True)
        sequences = packed_sequences(shard.starts, device, shard.padded_starts)
        attention = TrieParams(sequences=sequences)
        rows, src = context.own_rows(loss.src, shard.take)
        loss = loss.take(rows)
        loss.src = src
        table_rows = torch.from_numpy(rows).to(device)
    return PolicyBatch(
        tokens=torch.from_numpy(tokens).to(device, torch.int64).unsqueeze(0),
        padding=torch.from_numpy(parallel.sequence_shard(padding)).to(device).unsqueeze(0),
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
    """[T, layers, K] of this context-parallel rank's tokens, before sequence parallelism."""
    routing = micro_batch.trie.routing(layers)
    assert routing is not None, "checked by the worker"
    if parallel.place().context_size == 1:
        return routing
    return context.take_tokens(routing, _context_shard(micro_batch.trie).take, padding=FREE)


def _context_shard(trie: Trie) -> context.ContextShard:
    place = parallel.place()
    return context.shard_sequences(trie, place.context, place.context_size, place.tensor_size)
