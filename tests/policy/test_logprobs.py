"""X3: logprobs, entropies and gradients of the loss rows, in chunks, equal a full softmax."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megastep.policy import logprobs
from megastep.policy.logprobs import VocabShard, logit_rows, row_logprobs
from megastep.types import LossTable

T, H, VOCAB, PADDED = 30, 8, 19, 24
# Unsorted, some sources with several targets.
SRC = np.array([4, 2, 2, 29, 7, 7, 7, 0, 12, 4], np.int32)
TARGET = np.array([1, 0, 18, 5, 5, 6, 5, 9, 11, 1], np.int32)


@pytest.fixture(scope="module")
def group():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def loss_table() -> LossTable:
    zero = np.zeros(len(SRC), np.float32)
    ids = zero.astype(np.int32)
    return LossTable(SRC, TARGET, zero, zero, zero, ids, ids, ids)


def plain(hidden, weight, temperature):
    logp = (hidden @ weight[:VOCAB].t() / temperature).log_softmax(-1)[torch.from_numpy(SRC).long()]
    logprob = logp.gather(1, torch.from_numpy(TARGET).long()[:, None]).squeeze(1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logprob, entropy


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk, kept", [(512, 512), (2, 2), (3, 6), (1, 3)])
def test_rows_equal_a_full_softmax(chunk, kept, temperature, group, monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_ROWS", chunk)
    torch.manual_seed(0)
    rows = logit_rows(loss_table(), kept, torch.device("cpu"))
    assert rows.src.tolist() == sorted(set(SRC.tolist()))
    a, b = torch.randn(2, len(SRC), dtype=torch.float64).float()
    found = []
    for compute in (
        lambda h, w: row_logprobs(
            h, w, rows, VocabShard(0, VOCAB, group), temperature, entropy_gradient=True
        ),
        lambda h, w: plain(h, w, temperature),
    ):
        torch.manual_seed(1)
        hidden = torch.randn(T, H, requires_grad=True)
        weight = torch.randn(PADDED, H, requires_grad=True)
        x, entropy = compute(hidden, weight)
        (a @ x + b @ entropy).backward()
        found.append((x, entropy, hidden.grad, weight.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not found[0][3][VOCAB:].any(), "padding rows of the vocabulary got a gradient"


def test_logit_rows_of_the_worked_example():
    """The example in the docstring of LogitRows."""
    table = loss_table().take(slice(0, 3))
    a, b, c = table.target.tolist()
    rows = logit_rows(table, 512, torch.device("cpu"))
    assert rows.src.tolist() == [2, 4]
    assert rows.source.tolist() == [0, 0, 1]
    assert rows.target.tolist() == [b, c, a]
    assert rows.to_table.tolist() == [2, 0, 1]


def test_a_shard_of_padding_adds_nothing(group):
    """The last rank of a small vocabulary: no logits, no gradient, 0 in every sum."""
    rows = logit_rows(loss_table(), 512, torch.device("cpu"))
    hidden = torch.randn(T, H, requires_grad=True)
    weight = torch.randn(8, H, requires_grad=True)
    shard = VocabShard(24, 0, group)
    targets = logprobs._targets(rows, rows.chunks[0], shard)
    softmax, _ = logprobs._chunk_softmax(hidden[rows.src], weight, targets, shard, 1.0)
    assert softmax.exp.shape == (len(rows.src), 0) and not softmax.total.any()


def test_memory_is_bounded_by_the_chunk(group, monkeypatch):
    """No tensor of forward or backward is larger than a chunk of logits; kept chunks count too."""
    monkeypatch.setattr(logprobs, "CHUNK_ROWS", 64)
    vocab, sources = 4000, 2000
    ids = np.arange(sources, dtype=np.int32)
    zero = np.zeros(sources, np.float32)
    table = LossTable(ids, ids, zero, zero, zero, ids, ids, ids)
    hidden = torch.randn(sources, 16, requires_grad=True)
    weight = torch.randn(vocab, 16, requires_grad=True)
    rows = logit_rows(table, 128, torch.device("cpu"))
    with Allocations() as made:
        x, _ = row_logprobs(
            hidden, weight, rows, VocabShard(0, vocab, group), 1.0, entropy_gradient=False
        )
        x.sum().backward()
    chunk = 64 * vocab * 4
    assert made.largest <= chunk
    assert made.peak <= 5 * chunk + 4 * weight.nbytes + 6 * hidden.nbytes < sources * vocab * 4 / 4


class Allocations(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes of the largest tensor, and the peak of all live tensors."""

    def __init__(self):
        super().__init__()
        self.largest = self.peak = self.alive = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        import weakref

        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if (
                torch.is_tensor(tensor)
                and tensor._base is None
                and not any(tensor is a for a in args)
            ):
                size = tensor.untyped_storage().nbytes()
                self.alive += size
                self.largest, self.peak = max(self.largest, size), max(self.peak, self.alive)
                weakref.finalize(tensor, self._free, size)
        return out

    def _free(self, size):
        self.alive -= size
