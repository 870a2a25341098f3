"""X4: the gradient is the same under every pack layout.

A small transformer in float64 whose attention mask is the predicate of types.py.
"""

import random

import numpy as np
import pytest
import torch

from megastep.samples import lay_out, make_samples
from megastep.samples.trie import PACK_LAYOUTS

from .rollouts import group_of, random_group, trajectory

VOCAB, HIDDEN, HEADS, LAYERS = 12, 16, 2, 2


class Transformer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)

        def make(*shape):
            return torch.nn.Parameter(torch.randn(*shape, dtype=torch.float64) / shape[0] ** 0.5)

        self.embed = make(VOCAB, HIDDEN)
        self.embed_position = make(64, HIDDEN)
        self.qkv = torch.nn.ParameterList([make(HIDDEN, 3 * HIDDEN) for _ in range(LAYERS)])
        self.out = torch.nn.ParameterList([make(HIDDEN, HIDDEN) for _ in range(LAYERS)])
        self.mlp = torch.nn.ParameterList([make(HIDDEN, HIDDEN) for _ in range(LAYERS)])

    def forward(self, trie):
        """[T, VOCAB] logprobs of the next token."""
        tokens, position, end = (
            torch.from_numpy(a.astype(np.int64)) for a in (trie.tokens, trie.position, trie.end)
        )
        index = torch.arange(len(tokens))
        visible = (index[None, :] <= index[:, None]) & (index[:, None] < end[None, :])  # [q, k]
        x = self.embed[tokens] + self.embed_position[position]  # [T, HIDDEN]
        for qkv, out, mlp in zip(self.qkv, self.out, self.mlp):
            q, k, v = (
                t.unflatten(1, (HEADS, -1)).transpose(0, 1) for t in (x @ qkv).chunk(3, dim=1)
            )
            scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
            x = x + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ out
            x = x + torch.tanh(x @ mlp)
        return (x @ self.embed.T).log_softmax(-1)


def gradient(micro_batches):
    """The gradient of a clipped policy loss, and the number of real tokens."""
    model = Transformer()
    for micro in (m for rank in micro_batches for m in rank):
        loss = micro.trie.loss
        src, target = (torch.from_numpy(a.astype(np.int64)) for a in (loss.src, loss.target))
        rollout, advantage, weight = (
            torch.from_numpy(a.astype(np.float64))
            for a in (loss.rollout_logprob, loss.advantage, loss.weight)
        )
        ratio = (model(micro.trie)[src, target] - rollout).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.5, 2) * advantage)
        (-(weight * gain).sum()).backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters()])
    return grads, sum(m.real_tokens for rank in micro_batches for m in rank)


def random_batch(seed):
    source = random.Random(seed)
    batch = [random_group(source, id, "none", 0.0) for id in range(3)]
    for s in (s for g in batch for t in g.trajectories for s in t.steps):
        s.logprobs = np.log(np.full(len(s.response_ids), 0.1, np.float32))
    return batch


@pytest.mark.parametrize("reduction", ["token", "step", "trajectory", "prompt"])
def test_x1_x4_s12_s14_gradients_agree_under_every_pack_layout_budget_and_ranks(reduction):
    for seed in range(4):
        samples = make_samples(random_batch(seed), "step_returns", reduction)
        wanted, _ = gradient(lay_out(samples, 1, 64, pack_layout="flat")[0])
        assert wanted.abs().max() > 1e-3
        for pack_layout in PACK_LAYOUTS:
            for ranks, budget, align in ((1, 64, 1), (3, 48, 4)):
                found, _ = gradient(lay_out(samples, ranks, budget, align, pack_layout)[0])
                assert (found - wanted).abs().max() < 1e-10


def test_s14_padding_micro_batches_change_no_gradient():
    samples = make_samples(random_batch(1), "step_returns", "token")
    one, _ = gradient(lay_out(samples, 1, 64)[0])
    many, tokens = gradient(lay_out(samples, 16, 64)[0])
    assert any(m.real_tokens == 0 for rank in lay_out(samples, 16, 64)[0] for m in rank)
    assert (one - many).abs().max() < 1e-10


def test_x1_the_trie_computes_less_for_the_same_gradient():
    """Without thinking in the history, no prompt begins with the whole previous step."""
    turns = []
    prompt = [1, 2, 3, 4]
    for i in range(4):
        response = [5, 6, 7, 8 - i % 2]
        turns.append((prompt, response))
        prompt = prompt + response[2:] + [9, 10]
    group = group_of(
        trajectory(*turns, rewards=[0, 1, 0, 1]), trajectory(*turns[:2], rewards=[0, 0])
    )
    samples = make_samples([group], "step_returns", "token")
    (flat, flat_tokens), (merge, merge_tokens), (trie, trie_tokens) = (
        gradient(lay_out(samples, 1, 128, pack_layout=pack_layout)[0])
        for pack_layout in PACK_LAYOUTS
    )
    assert flat_tokens == merge_tokens > 2 * trie_tokens
    assert (flat - trie).abs().max() < 1e-10 and (flat - merge).abs().max() < 1e-10
