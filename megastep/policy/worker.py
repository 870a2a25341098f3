"""One rank of the policy: a Megatron model, its optimizer and what can be done with them.

Every public method is collective: all ranks call it, the ranks of one data-parallel group with the same micro-batches.
A mini-batch is one optimizer step:

    remember_old          logprobs of the policy as it is, into the loss tables     where the loss needs them
    remember_reference    the same of the initial model
    update                forward and backward over the micro-batches, then the step, unless something is not finite;
                          nothing of it for a mini-batch without a trained token

`learn` does all three for the mini-batches of a batch.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megastep.checkpoint import saver
from megastep.checkpoint.loop_state import LoopState
from megastep.config import Config, LossConfig, OptimizerConfig
from megastep.distributed import parallel
from megastep.errors import TrainingError
from megastep.models.architecture import read_architecture
from megastep.policy import routing_replay
from megastep.policy.batch import own_routing, prepare
from megastep.policy.loss import MAXIMA, SUMS, LossMetrics, loss_rows, means, policy_loss
from megastep.policy.model import build_model, wrap_for_training
from megastep.policy.optimizer import build_optimizer
from megastep.types import PADDING, MicroBatch
from megastep.weights.hf_files import HFReader, copy_companions, write_shards, written_beside
from megastep.weights.megatron import export_hf, global_name, load_hf
from megastep.weights.random_init import FreshWeights


@dataclass
class Update:
    metrics: dict[str, float]
    skipped: str | None = None  # why the step was not applied, and what it was


class PolicyWorker:
    """`parallel.start` must have run in this process."""

    def __init__(self, config: Config):
        self.config = config
        self.arch = read_architecture(config.model.path)
        # Mini-batches seen: optimizer steps taken, those of the warm start too, and steps that were skipped. Engines
        # know weights by it.
        self.step = 0
        policy = config.policy
        parallel.seed_everything(config.train.seed)
        chunks = build_model(self.arch, policy)
        in_files = config.model.init == "hf"
        weights = (
            HFReader(config.model.path) if in_files else FreshWeights(self.arch, config.train.seed)
        )
        load_hf(chunks, self.arch, weights)
        self.replays = [routing_replay.attach(chunk) for chunk in chunks]
        self.chunks = wrap_for_training(chunks, policy.precision)
        self._saver = saver.Saver()
        self._megatron = chunks[0].config
        self._megatron.finalize_model_grads_func = _finalize_sums
        self.begin(config.optimizer, config.policy_loss, config.optimizer_steps)

    def begin(self, optimizer: OptimizerConfig, loss: LossConfig, optimizer_steps: int) -> None:
        """A stage of training: a loss, a fresh optimizer and its schedule; the model as it is is the reference."""
        self.loss = loss
        # Demonstrations were not sampled; what was, is compared under the distribution that it was sampled from.
        self.temperature = 1.0 if loss.type == "nll" else self.config.rollout.temperature
        self.optimizer, self.scheduler = build_optimizer(
            self.chunks, optimizer, self.config.policy.precision, optimizer_steps
        )
        self._megatron.grad_scale_func = self.optimizer.scale_loss
        self.reference = (
            [p.detach().cpu().clone() for p in self._parameters()] if loss.kl_coef > 0 else None
        )

    # ------------------------------------------------------------ compute

    def learn(self, mini_batches: list[list[MicroBatch]]) -> list[Update]:
        """One optimizer step per mini-batch. What the policy was before the first counts as old for all of them."""
        for micro_batches in mini_batches:
            if (
                len(mini_batches) > 1 and self.loss.old_logprobs == "policy"
            ):  # with one, old is what the update computes itself
                self.remember_old(micro_batches)
            if self.loss.kl_coef > 0:
                self.remember_reference(micro_batches)
        return [self.update(micro_batches) for micro_batches in mini_batches]

    def update(self, micro_batches: list[MicroBatch]) -> Update:
        """One optimizer step on this data-parallel rank's part of a mini-batch."""
        self.step += 1
        # Before the update, and for every mini-batch, whether it ends in one or not: the schedule ends with the run.
        self.scheduler.step(1)
        rate = {"train/lr": self.optimizer.param_groups[0]["lr"]}
        tokens, trained = self._count(micro_batches)
        if trained == 0:  # no gradient, and Adam's momentum alone would move the weights
            return Update(rate | {"train/tokens_trained": 0.0, "train/empty_mini_batches": 1.0})
        self._scale_router_losses(tokens)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        accounts = self._run(micro_batches, self._loss)
        metrics = rate | _metrics(accounts) | self._agreement()
        bad = self._not_finite(micro_batches, accounts)
        if bad is None:
            _, metrics["train/grad_norm"], _ = self.optimizer.step()
            self._check_weights(f"optimizer step {self.step}")
        metrics["train/skipped"] = float(bad is not None)
        metrics["train/empty_mini_batches"] = 0.0
        return Update(metrics, bad)

    def _count(self, micro_batches: list[MicroBatch]) -> tuple[int, int]:
        """Tokens of the mini-batch without padding, and those that are trained; the same on every rank."""
        tokens = sum(m.real_tokens for m in micro_batches)
        trained = sum(np.count_nonzero(m.trie.loss.group != PADDING) for m in micro_batches)
        counts = torch.tensor([tokens, trained], device=parallel.device())
        dist.all_reduce(counts, group=parallel.data_group())
        # Context-parallel ranks, which are in that group, have the same micro-batches.
        tokens, trained = (counts // parallel.place().context_size).tolist()
        return tokens, trained

    def remember_old(self, micro_batches: list[MicroBatch]) -> None:
        """Fill `old_logprob` of the loss tables, where the head is, with the policy's logprobs as it is now."""
        for micro_batch, logprob in zip(micro_batches, self.logprobs(micro_batches)):
            micro_batch.trie.loss.old_logprob = logprob

    def remember_reference(self, micro_batches: list[MicroBatch]) -> None:
        """Fill `ref_logprob` of the loss tables, where the head is, with the initial model's logprobs."""
        with self._weights(self.reference):
            for micro_batch, logprob in zip(micro_batches, self.logprobs(micro_batches)):
                micro_batch.trie.loss.ref_logprob = logprob

    def logprobs(self, micro_batches: list[MicroBatch]) -> list[np.ndarray]:
        """[N] of each loss table; nothing on ranks without the head."""
        return [logprob for logprob, _ in self.logprobs_and_entropies(micro_batches)]

    @torch.no_grad()
    def logprobs_and_entropies(self, micro_batches: list[MicroBatch]) -> list[np.ndarray]:
        """[2, N] of each loss table; nothing on ranks without the head."""

        def finish(
            micro_batch: MicroBatch, output: Tensor, non_loss_data: bool = True
        ) -> np.ndarray:
            return output.cpu().numpy()

        return self._run(micro_batches, finish, forward_only=True)

    def _run(
        self, micro_batches: list[MicroBatch], finish: Callable, forward_only: bool = False
    ) -> list:
        """Megatron's schedule over the micro-batches; what `finish` left for each, where the head is."""
        with routing_replay.replayed(
            [layer for layers in self.replays for layer in layers], forward_only
        ):
            return get_forward_backward_func()(
                forward_step_func=partial(self._forward_step, finish),
                data_iterator=[
                    iter([(chunk, m) for m in micro_batches]) for chunk in range(len(self.chunks))
                ],
                model=self.chunks,
                num_microbatches=len(micro_batches),
                seq_length=len(micro_batches[0].trie),
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )

    def _forward_step(self, finish: Callable, data: Iterator, model) -> tuple[Tensor, Callable]:
        """As Megatron's schedules want it: the output, and the function that ends the micro-batch."""
        chunk, micro_batch = next(data)
        if (
            self.config.routing_replay.enabled and self.loss.type != "nll"
        ):  # demonstrations were not routed
            self._give_routes(chunk, micro_batch)
        batch = prepare(
            micro_batch,
            self.arch.heads // self.arch.kv_heads,
            parallel.has_head(chunk),
            self.config.policy.logits_chunk_rows,
            self.temperature,
            entropy_gradient=self.loss.entropy_coef > 0,
        )
        return model(batch), partial(finish, micro_batch)

    def _give_routes(self, chunk: int, micro_batch: MicroBatch) -> None:
        layers = self.replays[chunk]
        if layers and micro_batch.trie.routes is None:
            raise routing_replay.ReplayError(
                "routing_replay.enabled needs experts, and no step of the batch has recorded any"
            )
        if layers:
            mine = slice(layers[0].layer, layers[-1].layer + 1)
            routing_replay.give(layers, own_routing(micro_batch, mine), mine.start)

    def _loss(self, micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, LossMetrics]:
        rows = loss_rows(micro_batch.trie.loss, parallel.device())
        loss, account = policy_loss(self.loss, *output, rows)
        return loss, torch.tensor(1, dtype=torch.int, device=loss.device), account

    def _scale_router_losses(self, tokens: int) -> None:
        """Coefficients per token of the mini-batch, as router.py takes them."""
        policy = self.config.policy
        self._megatron.moe_aux_loss_coeff = policy.moe_aux_loss_coef / tokens
        self._megatron.moe_z_loss_coeff = policy.moe_z_loss_coef / tokens

    def _agreement(self) -> dict[str, float]:
        """How often the live routers would have chosen the replayed experts; raises where it cannot be so seldom."""
        same, recorded = routing_replay.agreement(
            [layer for layers in self.replays for layer in layers]
        )
        if not recorded:
            return {}
        floor = self.config.routing_replay.min_agreement
        if same < floor * recorded:
            raise routing_replay.ReplayError(
                f"the live routers agree with {same / recorded:.1%} of the recorded experts, less than "
                f"routing_replay.min_agreement = {floor}: the routes do not belong to these tokens or these weights"
            )
        return {"routing_replay/agreement": same / recorded}

    def _not_finite(
        self, micro_batches: list[MicroBatch], accounts: list[LossMetrics]
    ) -> str | None:
        """What keeps the step from being applied, the same text on every rank; None: nothing."""
        self.optimizer.prepare_grads()
        norm = self.optimizer.get_grad_norm()
        mine = _bad_rows(micro_batches, accounts) if parallel.place().tensor == 0 else []
        trouble = torch.tensor(
            float(bool(mine) or not math.isfinite(norm)), device=parallel.device()
        )
        dist.all_reduce(trouble)
        if trouble.item() == 0:
            return None
        # Losses before gradients: they are the cause.
        found = sorted(
            _of_all_ranks(mine or self._bad_gradients()), key=lambda n: n.startswith("gradient")
        )
        return f"gradient norm {norm}; not finite: {_some_of(found)}"

    def _bad_gradients(self) -> list[str]:
        named = [(n, p) for chunk in self.chunks for n, p in chunk.named_parameters()]
        return [f"gradient of {n}" for n, p in named if not p.main_grad.isfinite().all()]

    def _check_weights(self, after: str) -> None:
        """Raise on every rank if a weight of any rank is not finite: such a policy is neither used nor saved."""
        bad = self._bad_weights()
        trouble = torch.tensor(float(bool(bad)), device=parallel.device())
        dist.all_reduce(trouble)
        if trouble.item() > 0:
            raise TrainingError(
                f"after {after} weights are not finite: {_some_of(_of_all_ranks(bad))}; lower "
                f"optimizer.lr = {self.config.optimizer.lr:g}"
            )

    def _bad_weights(self) -> list[str]:
        """This rank's, by their names in the whole model. A norm is finite if all elements are, and needs no copy."""
        named = [
            (chunk, name, p.detach())
            for chunk in self.chunks
            for name, p in chunk.named_parameters()
        ]
        largest = torch.stack([torch.linalg.vector_norm(p, math.inf).float() for _, _, p in named])
        finite = largest.isfinite().tolist()
        return [
            global_name(name, chunk, self.arch)
            for (chunk, name, _), ok in zip(named, finite)
            if not ok
        ]

    def _parameters(self) -> list[Tensor]:
        return [p for chunk in self.chunks for p in chunk.parameters()]

    @contextmanager
    def _weights(self, weights: list[Tensor]) -> Iterator[None]:
        """Other weights in the place of the policy's own, which come back at the end."""
        parameters = self._parameters()
        with torch.no_grad():
            own = [p.detach().clone() for p in parameters]
            try:
                for p, w in zip(parameters, weights, strict=True):
                    p.copy_(w)
                yield
            finally:
                for p, w in zip(parameters, own):
                    p.copy_(w)

    # ------------------------------------------------------------ taking turns on a GPU

    def rest(self) -> None:
        """The weights stay on the device; gradients are given up, Adam's state waits in CPU memory.

        With `optimizer.cpu_offload_fraction` a part of Adam's state is there always, and the rest does not move: Megatron
        would bring back all of it, and would tear the weights, which its hybrid optimizer works on, from their buffer.
        """
        for chunk in self.chunks:
            chunk.offload_grad_buffers()
        if self.config.optimizer.cpu_offload_fraction == 0:
            self.optimizer.offload_to_cpu()

    def wake(self) -> None:
        for chunk in self.chunks:
            chunk.restore_grad_buffers()
        if self.config.optimizer.cpu_offload_fraction == 0:
            self.optimizer.restore_from_cpu()

    # ------------------------------------------------------------ disk

    def save(self, root: str | Path, loop: LoopState) -> None:
        """Write `root/step_N`; with `saver.asynchronous` the files are written while training goes on."""
        self._check_weights(f"step {loop.step}, which was to be saved,")
        settings = self.config.checkpoint
        self._saver.save(root, self, loop, keep=settings.keep, in_background=settings.asynchronous)

    def seal_written(self) -> None:
        self._saver.seal_written()

    def finish_saving(self) -> None:
        self._saver.finish()

    def load(self, folder: str | Path) -> None:
        """Continue from a checkpoint, of whatever layout."""
        saver.load(folder, self)

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model under its HF name, on rank 0; all ranks must run through it."""
        return export_hf(self.chunks, self.arch)

    def export(self, destination: str | Path, shard_bytes: int = 5 * 10**9) -> None:
        """Write a Hugging Face folder, with the config and tokenizer of `model.path`."""
        self._check_weights(f"optimizer step {self.step}")
        if parallel.place().rank != 0:
            for _ in self.hf_tensors():
                pass
        else:
            with written_beside(destination) as folder:
                copy_companions(self.config.model.path, folder)
                write_shards(folder, self.hf_tensors(), shard_bytes)
        dist.barrier()


def _finalize_sums(model, num_tokens=None, **kwargs) -> None:
    """Losses come weighted: Megatron's division by a token count must not happen."""
    finalize_model_grads(model, None, **kwargs)


def _metrics(accounts: list[LossMetrics]) -> dict[str, float]:
    """Of the whole mini-batch, on every rank."""
    place = parallel.place()
    counts = (
        place.tensor == place.context == 0
    )  # the other ranks of these groups have the same ones
    device = parallel.device()
    sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
    maxima = torch.zeros(len(MAXIMA), dtype=torch.float64, device=device)
    for account in accounts if counts else []:
        sums += account.sums
        maxima = torch.maximum(maxima, account.maxima)
    dist.all_reduce(sums)
    dist.all_reduce(maxima, dist.ReduceOp.MAX)
    return means(dict(zip(SUMS, sums.tolist())), dict(zip(MAXIMA, maxima.tolist())))


def _of_all_ranks(names: list[str]) -> list[str]:
    """Each once."""
    lists: list = [None] * parallel.place().world
    dist.all_gather_object(lists, names)
    return list(dict.fromkeys(name for names in lists for name in names))


def _some_of(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return "; ".join(names[:5]) + more


def _bad_rows(micro_batches: list[MicroBatch], accounts: list[LossMetrics]) -> list[str]:
    """The steps whose loss is not a finite number."""
    found = []
    for micro_batch, account in zip(micro_batches, accounts):
        bad = account.nonfinite.cpu().numpy()
        if bad.any():
            table = micro_batch.trie.loss.take(bad)
            found += [
                f"loss of group {g}, trajectory {t}, step {s}"
                for g, t, s in zip(table.group, table.trajectory, table.step)
            ]
    return list(dict.fromkeys(found))
