"""Rollouts for updates of a tiny MoE, and the update as a plain transformers loop would do it, step by step."""

from zlib import crc32

import numpy as np
import torch

from megastep.samples import lay_out, make_samples
from megastep.samples.validation import validate
from megastep.types import Group, Step, Trajectory
from tests.models import VOCAB

LAYERS, EXPERTS, TOP_K = 4, 8, 2
LR, EPS = (
    1e-2,
    1e-3,
)  # such an eps keeps Adam's first step smooth where a gradient is almost nothing


def make_groups(replay: bool, prompts: int = 2, seed: int = 0) -> list[Group]:
    """Trajectories of 1 to 4 turns; some strip their thinking from history, one repeats another, one ends in an
    appended EOS. With `replay` every token has experts that depend on its path alone."""
    random = np.random.default_rng(seed)
    groups = []
    for id in range(prompts):
        prompt = _some(random, 5, 9)
        trajectories = [
            _trajectory(random, id, i, prompt, turns=1 + (id + 2 * i) % 4) for i in range(3)
        ]
        again = [Step(**vars(step)) for step in trajectories[0].steps]
        trajectories.append(Trajectory(id, 3, again))
        trajectories[0].steps[-1].reward += 0.5
        groups.append(Group(id, trajectories))
    if replay:
        for step in steps_of(groups):
            record(step)
    validate(groups)
    return groups


def steps_of(groups: list[Group]) -> list[Step]:
    return [
        step for group in groups for trajectory in group.trajectories for step in trajectory.steps
    ]


def _trajectory(random, id: int, index: int, prompt: np.ndarray, turns: int) -> Trajectory:
    steps = []
    for turn in range(turns):
        response = _some(random, 3, 8)
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
        prompt = np.concatenate([prompt, kept, _some(random, 2, 4)])
    return Trajectory(id, index, steps)


def _some(random, low: int, high: int) -> np.ndarray:
    return random.integers(VOCAB, size=random.integers(low, high + 1), dtype=np.int32)


def ids_of(step: Step) -> np.ndarray:
    return np.concatenate([step.prompt_ids, step.response_ids])


def record(step: Step) -> None:
    """As an engine would: every token but the last that it sampled."""
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
    budget: int,
    pack_layout: str,
    tensor: int = 1,
    rounds_of: int = 1,
):
    samples = make_samples(groups, "step_returns", "token")
    return lay_out(
        samples, ranks, budget, align_tokens=tensor, pack_layout=pack_layout, rounds_of=rounds_of
    )[0]


def longest_path(groups: list[Group]) -> int:
    """Of the tokens that predict a trained one."""
    return max(len(s.prompt_ids) + int(np.count_nonzero(s.loss_mask)) - 1 for s in steps_of(groups))


# ---------------------------------------------------------------- the plain way


def plain_update(folder, groups: list[Group], replay: bool) -> dict:
    """Each step its own unpadded sequence through transformers; PPO's clipped loss against the rollout's logprobs;
    gradient clipping; AdamW."""
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
    routes = None
    if replay:
        routes = torch.from_numpy(
            np.stack([experts_of(ids_of(step)[: n + 1]) for n in range(len(ids) - 1)])
        )
    with forced(model, routes):
        everything = model(ids[None, :-1]).logits[0].log_softmax(-1)[len(step.prompt_ids) - 1 :]
    return everything.gather(1, ids[len(step.prompt_ids) :, None]).squeeze(1), everything


class forced:
    """transformers' routers take these experts [T, LAYERS, TOP_K], weighed by their live scores."""

    def __init__(self, model, routes: torch.Tensor | None):
        self.model, self.routes = model, routes

    def __enter__(self):
        for number, layer in enumerate(self.model.model.layers):
            if self.routes is not None and hasattr(layer.mlp, "gate"):
                layer.mlp.gate.forward = self.gate(layer.mlp.gate, self.routes[:, number].long())

    def gate(self, gate, experts: torch.Tensor):
        def forward(hidden):
            logits = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
            live = logits.topk(gate.top_k, -1).indices
            chosen = torch.where(experts < 0, live, experts)
            scores = logits.softmax(-1).gather(1, chosen)
            return (
                logits,
                scores / scores.sum(-1, keepdim=True) if gate.norm_topk_prob else scores,
                chosen,
            )

        return forward

    def __exit__(self, *_):
        for layer in self.model.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.__dict__.pop("forward", None)


def hf_state(model) -> dict[str, np.ndarray]:
    """Parameters under the names of a saved folder, where each expert is a tensor of its own."""
    from tempfile import TemporaryDirectory

    from megastep.weights.hf_files import HFReader

    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        reader = HFReader(folder)
        return {name: reader(name).numpy().copy() for name in reader.file_of}
