"""The checks of tests/gpu, on any device: each returns its figures.

tests/test_gpu_checks.py runs them on the CPU.
"""

import copy
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from megastep.policy import cpu_attention, flex_attention
from megastep.types import Group, LossTable, Trie
from tests.engines import GREEDY, Rollouts, export, shake
from tests.models import some_tokens
from tests.policy.updates import forced, plain_logprobs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


# ---------------------------------------------------------------- attention


def branching_trie(tokens: int, seed: int, branch_rate: float = 0.01) -> Trie:
    """A forest in depth-first order: before some tokens the path returns to an ancestor."""
    random = np.random.default_rng(seed)
    position = np.zeros(tokens, np.int32)
    end = np.full(tokens, tokens, np.int32)
    path: list[int] = []
    for token in range(tokens):
        if token and random.random() < branch_rate:
            depth = int(random.integers(len(path)))
            end[path[depth:]] = token
            del path[depth:]
        position[token] = len(path)
        path.append(token)
    none = np.zeros(0, np.int32)
    trie = Trie(np.zeros(tokens, np.int32), position, end, LossTable(*[none] * 8))
    assert trie.branches
    return trie


def attend(
    kind: str, query: Tensor, key: Tensor, value: Tensor, trie: Trie, scale: float
) -> Tensor:
    """[T, heads, dim]: attention by the kernel `kind` of policy.attention, or by that for CPUs."""
    groups = query.shape[1] // key.shape[1]
    if kind == "cpu":
        blocks = cpu_attention.blocks_of(trie, groups)
        return cpu_attention.attend(query, key, value, blocks, scale)
    if kind == "flex":
        mask = flex_attention.block_mask(trie, query.device)
        return flex_attention.attend(query, key, value, mask, scale)
    from megastep.policy import triton_attention

    assert kind == "triton", kind
    blocks = triton_attention.trie_blocks(trie, query.device)
    return triton_attention.attend(query, key, value, blocks, scale)


def dense_attention(query: Tensor, key: Tensor, value: Tensor, trie: Trie, scale: float) -> Tensor:
    """Head by head, since the scores of 5,000 tokens take 100 MB each."""
    index = torch.arange(len(trie), device=query.device)
    end = torch.from_numpy(trie.end.astype(np.int64)).to(query.device)
    hidden = (index[None] > index[:, None]) | (index[:, None] >= end[None])  # [q, k]
    groups = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        scores = query[:, head] @ key[:, head // groups].T * scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        heads.append(weights @ value[:, head // groups])
    return torch.stack(heads, dim=1)


def attention_errors(
    kind: str,
    trie: Trie,
    heads: int,
    kv_heads: int,
    head_dim: int,
    precision: str,
    device: torch.device,
) -> dict[str, float]:
    """Largest errors of output and gradients, of the largest value of each."""
    dtype = DTYPES[precision]
    generator = torch.Generator().manual_seed(len(trie))
    sizes = (heads, kv_heads, kv_heads, heads)
    *inputs, grad = (
        torch.randn(len(trie), n, head_dim, generator=generator).to(device, dtype) for n in sizes
    )
    scale = head_dim**-0.5
    ours = [t.requires_grad_() for t in inputs]
    out = attend(kind, *ours, trie, scale)
    grads = torch.autograd.grad(out, ours, grad)
    exact = [t.detach().float().requires_grad_() for t in inputs]
    expected = dense_attention(*exact, trie, scale)
    expected_grads = torch.autograd.grad(expected, exact, grad.float())
    return {
        "output": _relative(out, expected),
        "gradients": max(_relative(a, b) for a, b in zip(grads, expected_grads, strict=True)),
    }


def _relative(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected).abs().max() / expected.abs().max()).item()


# ---------------------------------------------------------------- logprobs and updates


def policy_settings(precision: str, replay: bool, kind: str = "auto") -> dict:
    """kind: policy.attention."""
    return {
        "policy.precision": precision,
        "policy.attention": kind,
        "routing_replay.enabled": replay,
    }


def logprob_errors(
    found: dict, model, groups: list[Group], precision: str, replay: bool
) -> dict[str, float]:
    """Mean and largest difference of `found` from transformers.

    In bf16: as multiples of transformers' own in bf16, which depend on the model and on its
    lengths; both against fp32 with weights rounded to bf16.
    """
    in_precision = with_weights_in(DTYPES[precision], model)
    exact = expected_logprobs(with_weights_in(torch.float32, in_precision), groups, replay)
    errors = differences(found, exact)
    if precision == "fp32":
        return errors
    others = differences(expected_logprobs(in_precision, groups, replay), exact)
    return {name: error / others[name] for name, error in errors.items()}


def with_weights_in(dtype: torch.dtype, model):
    """A copy. Its buffers stay in fp32: rounded rotary frequencies would be those of other
    positions, more so the longer the sequence."""
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.data = parameter.data.to(dtype)
    return copied


@torch.no_grad()
def expected_logprobs(model, groups: list[Group], replay: bool) -> dict:
    """Of transformers, by (group, trajectory, step)."""
    found = {}
    for group in groups:
        for trajectory in group.trajectories:
            for step in trajectory.steps:
                logprobs, _ = plain_logprobs(model, step, replay)
                key = (group.id, trajectory.index, step.index)
                found[key] = logprobs.numpy()[step.loss_mask]
    return found


def merged(results: Iterable[dict], name: str) -> dict:
    """One table of the ranks' logprobs."""
    return {key: values for result in results for key, values in result[name].items()}


def differences(found: dict, expected: dict) -> dict[str, float]:
    """Mean and largest difference of two tables of logprobs."""
    assert found.keys() == expected.keys() and found
    gaps = np.concatenate([np.abs(found[key] - expected[key]) for key in expected])
    return {"mean": float(gaps.mean()), "max": float(gaps.max())}


def layout_errors(results: list[dict], one_rank: list[dict]) -> dict[str, float]:
    """Results of `cases.train_a_little` under a parallel layout against one rank."""
    norms = [r[0]["metrics"][-1]["train/grad_norm"] for r in (results, one_rank)]
    return {
        "logprobs": differences(merged(results, "before"), merged(one_rank, "before"))["max"],
        "grad_norm": abs(norms[0] / norms[1] - 1),
        "after": differences(merged(results, "after"), merged(one_rank, "after"))["max"],
    }


# ---------------------------------------------------------------- engines


def change_and_sync(rollouts: Rollouts, seed: int) -> None:
    """Change every weight of the policy, then a weight sync."""
    rollouts.cluster.to_policy()
    rollouts.on_ranks(shake, seed)
    rollouts.cluster.sync()


@torch.no_grad()
def engine_errors(rollouts: Rollouts, folder) -> dict[str, float]:
    """Greedy tokens of every engine against transformers with the policy's weights.

    logprobs: largest difference for the engine's own tokens. regret: what a token's logprob lacks
    to the best one's. Tokens themselves are not compared, and transformers uses the engine's
    routing: vLLM's attention kernel has TF32 products, so that a tie may fall either way.
    """
    from transformers import AutoModelForCausalLM

    rollouts.on_ranks(export, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = some_tokens(2 * len(rollouts.fleet.slots))
    errors = {"logprobs": 0.0, "regret": 0.0}
    for prompt, generation in zip(prompts, rollouts.ask(prompts), strict=True):
        assert len(generation.ids) == GREEDY.max_tokens
        ids = torch.from_numpy(generation.ids).long()
        routing = generation.routing  # [P+R-1, L, K]
        with forced(model, None if routing is None else torch.from_numpy(routing)):
            logits = model(torch.cat([prompt, ids])[None, :-1]).logits[0, len(prompt) - 1 :]
        logprobs = logits.log_softmax(-1)  # [R, vocab]
        chosen = logprobs.gather(1, ids[:, None])[:, 0]
        gap = np.abs(generation.logprobs - chosen.numpy()).max()
        errors["logprobs"] = max(errors["logprobs"], float(gap))
        errors["regret"] = max(errors["regret"], (logprobs.amax(-1) - chosen).max().item())
    return errors
