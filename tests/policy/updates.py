"""Rollouts for updates of a tiny MoE, and the same update as a plain transformers loop."""

from zlib import crc32

import numpy as np
import torch

from megastep.samples import lay_out, make_samples
from megastep.samples.validation import validate
from megastep.types import Group, Step, Trajectory
from tests.models import VOCAB

LAYERS, EXPERTS, TOP_K = 4, 8, 2
LR = 1e-2
EPS = 1e-3  # large: keeps Adam's first step smooth where a gradient is almost 0


def make_groups(replay: bool, prompts: int = 2, seed: int = 0, lengthen: int = 1) -> list[Group]:
    """Trajectories of 1 to 4 turns; some strip thinking from the history, one repeats another, one
    ends in an appended EOS. With `replay` the routing of a token is a function of its path.
    lengthen: factor of all lengths, for GPUs."""
    random = np.random.default_rng(seed)
    groups = []
    for id in range(prompts):
        prompt = _some(random, 5 * lengthen, 9 * lengthen)
        trajectories = [
            _trajectory(random, id, i, prompt, 1 + (id + 2 * i) % 4, lengthen) for i in range(3)
        ]
        repeated = [Step(**vars(step)) for step in trajectories[0].steps]
        trajectories.append(Trajectory(id, 3, repeated))
        trajectories[0].steps[-1].reward += 0.5
        groups.append(Group(id, trajectories))
    if replay:
        for step in steps_of(groups):
            record_routing(step)
    validate(groups)
    return groups


def steps_of(groups: list[Group]) -> list[Step]:
    return [
        step for group in groups for trajectory in group.trajectories for step in trajectory.steps
    ]


def _trajectory(
    random, id: int, index: int, prompt: np.ndarray, turns: int, lengthen: int
) -> Trajectory:
    steps = []
    for turn in range(turns):
        response = _some(random, 3 * lengthen, 8 * lengthen)
        appended = turn == 1 and index == 1
        steps.append(
            Step(
                index=turn,
                last=turn == turns - 1,
                prompt_ids=prompt,
                response_ids=response,
                loss_mask=np.arange(len(response)) < len(response) - appended,
                logprobs=(-5 - random.random(len(response))).astype(np.float32)
                * ~(appended & (response == response[-1])),
                versions=np.array([[0, len(response)]], np.int32),
                reward=float((index + turn) % 3 == 0),
            )
        )
        kept = response[len(response) // 2 :] if index % 2 == 0 else response  # thinking stripped
        prompt = np.concatenate([prompt, kept, _some(random, 2 * lengthen, 4 * lengthen)])
    return Trajectory(id, index, steps)


def _some(random, low: int, high: int) -> np.ndarray:
    return random.integers(VOCAB, size=random.integers(low, high + 1), dtype=np.int32)


def ids_of(step: Step) -> np.ndarray:
    return np.concatenate([step.prompt_ids, step.response_ids])


def record_routing(step: Step) -> None:
    """As an engine would: of every token but the last that it sampled."""
    generated = len(step.prompt_ids) + int(np.count_nonzero(step.loss_mask))
    step.routing = np.array(
        [experts_of(ids_of(step)[: n + 1]) for n in range(generated - 1)], np.uint8
    )


def experts_of(path: np.ndarray) -> np.ndarray:
    """[LAYERS, TOP_K] distinct experts."""
    first = crc32(path.astype(np.int32).tobytes()) >> np.arange(0, 5 * LAYERS, 5) & 7
    return np.stack([first, (first + 3) % EXPERTS], axis=1)


def micro_batches(
    groups: list[Group],
    ranks: int,
    budget_tokens: int,
    pack_layout: str,
    tensor: int = 1,
    rounds_of: int = 1,
):
    """Of each rank."""
    samples = make_samples(groups, "step_returns", "token")
    by_rank, _ = lay_out(
        samples,
        ranks,
        budget_tokens,
        align_tokens=tensor,
        pack_layout=pack_layout,
        rounds_of=rounds_of,
    )
    return by_rank


def longest_path(groups: list[Group]) -> int:
    """Counts the tokens that predict a trained token."""
    return max(len(s.prompt_ids) + int(np.count_nonzero(s.loss_mask)) - 1 for s in steps_of(groups))


# ---------------------------------------------------------------- the plain loop


def plain_update(folder, groups: list[Group], replay: bool) -> dict:
    """Each step is one unpadded sequence through transformers; PPO's clipped loss with the
    rollout's logprobs as old; gradient clipping; AdamW."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0
    )
    total = 0.0
    for sample in make_samples(groups, "step_returns", "token"):
        logprob, _ = plain_logprobs(model, sample.step, replay)
        mask = torch.from_numpy(sample.step.loss_mask)
        ratio = (logprob - torch.from_numpy(sample.step.logprobs))[mask].exp()
        gain = torch.minimum(ratio * sample.advantage, ratio.clamp(0.8, 1.3) * sample.advantage)
        loss = -(sample.weight * gain).sum()
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    routers = {
        n: p.grad.abs().max().item()
        for n, p in model.named_parameters()
        if n.endswith("mlp.gate.weight")
    }
    optimizer.step()
    return {
        "loss": total,
        "grad_norm": norm.item(),
        "routers": routers,
        "parameters": hf_state(model),
    }


def plain_logprobs(model, step: Step, replay: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of the response, and of the whole vocabulary."""
    ids = torch.from_numpy(ids_of(step).astype(np.int64))
    prompt_tokens = len(step.prompt_ids)
    routing = None
    if replay:
        routing = torch.from_numpy(
            np.stack([experts_of(ids_of(step)[: n + 1]) for n in range(len(ids) - 1)])
        )
    with forced(model, routing):
        logits = model(ids[None, :-1]).logits[0, prompt_tokens - 1 :]
    logp = logits.float().log_softmax(-1)
    return logp.gather(1, ids[prompt_tokens:, None]).squeeze(1), logp


class forced:
    """transformers' routers use this routing [T, LAYERS, TOP_K], weighed by their live scores."""

    def __init__(self, model, routing: torch.Tensor | None):
        self.model = model
        self.routing = routing

    def __enter__(self):
        for number, layer in enumerate(self.model.model.layers):
            if self.routing is not None and hasattr(layer.mlp, "gate"):
                layer.mlp.gate.forward = self.gate(layer.mlp.gate, self.routing[:, number].long())

    def gate(self, gate, experts: torch.Tensor):
        def forward(hidden):
            logits = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
            live = logits.topk(gate.top_k, -1).indices
            chosen = torch.where(experts < 0, live, experts)
            scores = logits.softmax(-1).gather(1, chosen)
            if gate.norm_topk_prob:
                scores = scores / scores.sum(-1, keepdim=True)
            return logits, scores, chosen

        return forward

    def __exit__(self, *_):
        for layer in self.model.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.__dict__.pop("forward", None)


def hf_state(model) -> dict[str, np.ndarray]:
    """Parameters by their names in a saved folder, one tensor per expert."""
    from tempfile import TemporaryDirectory

    from megastep.weights.hf_files import HFReader

    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        reader = HFReader(folder)
        return {name: reader(name).numpy().copy() for name in reader.file_of}
