"""One rank of the policy: a Megatron model and its optimizer.

Every public method is collective: all ranks call it, the model-parallel ranks of one data-parallel
rank with the same micro-batches. `learn` runs, for each mini-batch and where the loss needs it:

    compute_old_logprobs          of the current policy, into the loss tables
    compute_reference_logprobs    of the initial model, into the loss tables
    compute_teacher_logprobs      of the teacher of a distillation, into the loss tables
    update                        forward and backward over the micro-batches, then one optimizer
                                  step; skipped if the loss or a gradient is not finite, or if the
                                  mini-batch has no trained token
"""

import gc
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from megastep.checkpoint import saver
from megastep.checkpoint.loop_state import LoopState
from megastep.config import Config, LossConfig, OptimizerConfig
from megastep.distributed import parallel
from megastep.errors import ReplayError, TrainingError
from megastep.models.architecture import read_architecture
from megastep.policy import routing_replay
from megastep.policy.batch import own_routing, prepare
from megastep.policy.loss import MAXIMA, SUMS, LossMetrics, loss_rows, means, policy_loss
from megastep.policy.model import build_model, gather_weights, wrap_for_training
from megastep.policy.optimizer import build_optimizer, clip_and_step
from megastep.policy.schedule import run_schedule
from megastep.policy.teacher import Teacher
from megastep.types import PADDING, MicroBatch, Update
from megastep.weights.hf_files import (
    SHARD_BYTES,
    HFReader,
    copy_companions,
    write_shards,
    written_atomically,
)
from megastep.weights.megatron import export_hf, global_name, load_hf
from megastep.weights.random_init import RandomWeights


class PolicyWorker:
    """Requires `parallel.start` in this process."""

    def __init__(self, config: Config):
        self.config = config
        self.arch = read_architecture(config.model.path)
        # Mini-batches trained, including those of the warm start and skipped ones. Also the weight
        # version of the engines.
        self.step = 0
        policy = config.policy
        parallel.seed_everything(config.train.seed)
        self._saver = saver.Saver()
        chunks = build_model(self.arch, policy)
        weights: HFReader | RandomWeights
        if config.model.init == "hf":
            weights = HFReader(config.model.path)
        else:
            weights = RandomWeights(self.arch, config.train.seed)
        load_hf(chunks, self.arch, weights)
        self.layer_replays = [routing_replay.attach(chunk) for chunk in chunks]
        self.chunks = wrap_for_training(chunks, policy)
        self.teacher = Teacher(config) if config.loss.type == "distill" else None
        self._megatron = chunks[0].config
        self._megatron.finalize_model_grads_func = _finalize_sums
        self.begin(config.optimizer, config.policy_loss, config.optimizer_steps)

    def begin(self, optimizer: OptimizerConfig, loss: LossConfig, optimizer_steps: int) -> None:
        """Start a training stage: a loss, a new optimizer and schedule.

        The current weights become the reference.
        """
        self.loss = loss
        # Logprobs are computed at the temperature of the rollout; demonstrations have none.
        self.temperature = 1.0 if loss.type == "nll" else self.config.rollout.temperature
        self._release_optimizer()
        self.optimizer, self.scheduler = build_optimizer(
            self.chunks, optimizer, self.config.policy, optimizer_steps
        )
        self._megatron.grad_scale_func = self.optimizer.scale_loss
        self.reference: list[Tensor] | None = None
        if loss.kl_coef > 0:
            self.reference = [p.detach().cpu().clone() for p in self._parameters()]

    def _release_optimizer(self) -> None:
        """Free the state of the last stage's optimizer before the next one is allocated."""
        self.optimizer = self.scheduler = self._megatron.grad_scale_func = None
        gc.collect()  # Megatron's optimizers have reference cycles

    # ------------------------------------------------------------ compute

    def learn(
        self,
        mini_batches: list[list[MicroBatch]],
        each: Callable[[list], Iterable[list[MicroBatch]]] = iter,
    ) -> list[Update]:
        """One optimizer step per mini-batch; old logprobs are those before the first step.

        each: iterates over the mini-batches; each one's routing is there when it is reached.
        """
        # With one mini-batch the old logprobs are those that the update itself computes.
        needs_old_logprobs = len(mini_batches) > 1 and self.loss.old_logprobs == "policy"
        needs_reference = self.loss.kl_coef > 0
        needs_teacher = self.loss.type == "distill"
        if needs_old_logprobs or needs_reference or needs_teacher:
            for micro_batches in each(mini_batches):
                if needs_old_logprobs:
                    self.compute_old_logprobs(micro_batches)
                if needs_reference:
                    self.compute_reference_logprobs(micro_batches)
                if needs_teacher:
                    self.compute_teacher_logprobs(micro_batches)
        updates = [self.update(micro_batches) for micro_batches in each(mini_batches)]
        gather_weights(self.chunks)  # exports, checkpoints and references read them
        return updates

    def update(self, micro_batches: list[MicroBatch]) -> Update:
        """One optimizer step on this data-parallel rank's micro-batches.

        With overlap_param_gather only another forward pass may follow: `learn` completes the
        weights for all else.
        """
        self.step += 1
        # The schedule counts mini-batches, also those without an update: it ends with the run.
        self.scheduler.step(1)
        rate = {"train/lr": self.optimizer.param_groups[0]["lr"]}
        tokens, trained_tokens = self._count_tokens(micro_batches)
        if trained_tokens == 0:  # without a gradient Adam's momentum would move the weights
            return Update(rate | {"train/tokens_trained": 0.0, "train/empty_mini_batches": 1.0})
        self._scale_router_losses(tokens)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss_metrics = self._run(micro_batches, self._loss)
        metrics = rate | _reduce_metrics(loss_metrics) | self._agreement()
        self.optimizer.prepare_grads()
        norm = self.optimizer.get_grad_norm()
        problem = self._find_nonfinite(micro_batches, loss_metrics, norm)
        if problem is None:
            metrics["train/grad_norm"] = norm
            clip_and_step(self.optimizer, norm)
            self._check_weights(f"optimizer step {self.step}")
        metrics["train/skipped"] = float(problem is not None)
        metrics["train/empty_mini_batches"] = 0.0
        return Update(metrics, problem)

    def _count_tokens(self, micro_batches: list[MicroBatch]) -> tuple[int, int]:
        """Real and trained tokens of the whole mini-batch, the same on every rank."""
        tokens = sum(m.real_tokens for m in micro_batches)
        trained = sum(np.count_nonzero(m.trie.loss.group != PADDING) for m in micro_batches)
        counts = torch.tensor([tokens, trained], device=parallel.device())
        dist.all_reduce(counts, group=parallel.data_group())
        # The group includes context-parallel ranks, which have the same micro-batches.
        tokens, trained = (counts // parallel.place().context_size).tolist()
        return tokens, trained

    def compute_old_logprobs(self, micro_batches: list[MicroBatch]) -> None:
        """Fill `old_logprob` of the loss tables, on ranks with the output layer."""
        for micro_batch, logprob in zip(micro_batches, self.logprobs(micro_batches)):
            micro_batch.trie.loss.old_logprob = logprob

    def compute_reference_logprobs(self, micro_batches: list[MicroBatch]) -> None:
        """Fill `ref_logprob` of the loss tables, on ranks with the output layer."""
        assert self.reference is not None, "kept where loss.kl_coef > 0"
        with self._swapped_weights(self.reference):
            for micro_batch, logprob in zip(micro_batches, self.logprobs(micro_batches)):
                micro_batch.trie.loss.ref_logprob = logprob

    def compute_teacher_logprobs(self, micro_batches: list[MicroBatch]) -> None:
        """Fill `teacher_logprob` of the loss tables, on ranks with the output layer."""
        assert self.teacher is not None, "built for loss.type=distill"
        for micro_batch, logprob in zip(micro_batches, self.teacher.logprobs(micro_batches)):
            micro_batch.trie.loss.teacher_logprob = logprob

    def logprobs(self, micro_batches: list[MicroBatch]) -> list[np.ndarray]:
        """[N] of each loss table; empty on ranks without the output layer."""
        return [logprob for logprob, _ in self.logprobs_and_entropies(micro_batches)]

    @torch.no_grad()
    def logprobs_and_entropies(self, micro_batches: list[MicroBatch]) -> list[np.ndarray]:
        """[2, N] of each loss table; empty on ranks without the output layer."""

        def finish(
            micro_batch: MicroBatch, output: Tensor, non_loss_data: bool = True
        ) -> np.ndarray:
            return output.cpu().numpy()

        return self._run(micro_batches, finish, forward_only=True)

    def _run(
        self, micro_batches: list[MicroBatch], finish: Callable, forward_only: bool = False
    ) -> list:
        """Run Megatron's schedule over the micro-batches.

        Returns the last result of `finish` for each, on ranks with the output layer.
        """
        forward_step = partial(self._forward_step, finish)
        with routing_replay.replayed(self._all_layer_replays(), forward_only):
            return run_schedule(self.chunks, forward_step, micro_batches, forward_only)

    def _forward_step(self, finish: Callable, data: Iterator, model) -> tuple[Tensor, Callable]:
        """The signature of Megatron's schedules: the output, and the function for the loss."""
        chunk, micro_batch = next(data)
        if self._replays_routing:
            self._set_routing(chunk, micro_batch)
        batch = prepare(
            micro_batch,
            self.arch.heads // self.arch.kv_heads,
            parallel.has_head(chunk),
            self.config.policy.logits_chunk_rows,
            self.temperature,
            entropy_gradient=self.loss.entropy_coef > 0,
            attention_setting=self.config.policy.attention,
        )
        return model(batch), partial(finish, micro_batch)

    @property
    def _replays_routing(self) -> bool:
        """Demonstrations have no recorded routing."""
        return self.config.routing_replay.enabled and self.loss.type != "nll"

    @property
    def replayed_layers(self) -> set[int]:
        """This rank's layers, by their index in the model, whose recorded routing it needs."""
        if not self._replays_routing:
            return set()
        return {layer.layer for layer in self._all_layer_replays()}

    def _set_routing(self, chunk: int, micro_batch: MicroBatch) -> None:
        layers = self.layer_replays[chunk]
        if not layers:
            return
        if micro_batch.trie.routes is None:
            raise ReplayError(
                "routing_replay.enabled needs recorded routing, and no step of the batch has any"
            )
        own_layers = slice(layers[0].layer, layers[-1].layer + 1)
        routing = own_routing(micro_batch, own_layers)
        routing_replay.set_routing(layers, routing, own_layers.start)

    def _all_layer_replays(self) -> list[routing_replay.LayerReplay]:
        return [layer for layers in self.layer_replays for layer in layers]

    def _loss(self, micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, LossMetrics]:
        rows = loss_rows(micro_batch.trie.loss, parallel.device())
        logprob, entropy = output
        loss, metrics = policy_loss(self.loss, logprob, entropy, rows)
        num_tokens = torch.tensor(1, dtype=torch.int, device=loss.device)
        return loss, num_tokens, metrics

    def _scale_router_losses(self, tokens: int) -> None:
        """Set the coefficients per token of the mini-batch, see router_losses.py."""
        policy = self.config.policy
        self._megatron.moe_aux_loss_coeff = policy.moe_aux_loss_coef / tokens
        self._megatron.moe_z_loss_coeff = policy.moe_z_loss_coef / tokens

    def _agreement(self) -> dict[str, float]:
        """The fraction of replayed choices that the live routers make too.

        Raises below `routing_replay.min_agreement`.
        """
        agreed, recorded = routing_replay.agreement(self._all_layer_replays())
        if not recorded:
            return {}
        fraction = agreed / recorded
        minimum = self.config.routing_replay.min_agreement
        if agreed < minimum * recorded:
            raise ReplayError(
                f"the live routers agree with {fraction:.1%} of the recorded routing, less than "
                f"routing_replay.min_agreement = {minimum}: it was recorded for other tokens or "
                "other weights"
            )
        return {"routing_replay/agreement": fraction}

    def _find_nonfinite(
        self, micro_batches: list[MicroBatch], loss_metrics: list[LossMetrics], norm: float
    ) -> str | None:
        """Why the optimizer step must be skipped, the same text on every rank; None: apply it."""
        own_losses = []
        if parallel.place().tensor == 0:
            own_losses = _nonfinite_losses(micro_batches, loss_metrics)
        if not _any_rank(bool(own_losses) or not math.isfinite(norm)):
            return None
        names = _of_all_ranks(own_losses or self._nonfinite_gradients())
        # Losses before gradients: they are the cause.
        names.sort(key=lambda name: name.startswith("gradient"))
        return f"gradient norm {norm}; not finite: {_first_names(names)}"

    def _nonfinite_gradients(self) -> list[str]:
        named = [(n, p) for chunk in self.chunks for n, p in chunk.named_parameters()]
        return [f"gradient of {n}" for n, p in named if not p.main_grad.isfinite().all()]

    def _check_weights(self, after: str) -> None:
        """Raise on every rank if any rank has a weight that is not finite."""
        names = self._nonfinite_weights()
        if _any_rank(bool(names)):
            raise TrainingError(
                f"after {after} weights are not finite: {_first_names(_of_all_ranks(names))}; "
                f"lower optimizer.lr = {self.config.optimizer.lr:g}"
            )

    def _nonfinite_weights(self) -> list[str]:
        """This rank's, by their names in the whole model."""
        named = [
            (chunk, name, p.detach())
            for chunk in self.chunks
            for name, p in chunk.named_parameters()
        ]
        # The infinity norm is finite iff all elements are, and needs no copy.
        largest = torch.stack([torch.linalg.vector_norm(p, math.inf).float() for _, _, p in named])
        finite = largest.isfinite().tolist()
        return [
            global_name(name, chunk, self.arch)
            for (chunk, name, _), is_finite in zip(named, finite)
            if not is_finite
        ]

    def _parameters(self) -> list[Tensor]:
        return [p for chunk in self.chunks for p in chunk.parameters()]

    @contextmanager
    def _swapped_weights(self, weights: list[Tensor]) -> Iterator[None]:
        """Replace the policy's weights, and restore them at the end."""
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

    # ------------------------------------------------------------ colocated engines

    def offload(self) -> None:
        """Free the gradients, move Adam's state to CPU memory; the weights stay.

        With `optimizer.cpu_offload_fraction` Adam's state does not move: Megatron would onload all
        of it, and would detach the hybrid optimizer's weights from their buffer.
        """
        for chunk in self.chunks:
            chunk.offload_grad_buffers()
        if self.config.optimizer.cpu_offload_fraction == 0:
            self.optimizer.offload_to_cpu()

    def onload(self) -> None:
        """Allocate the gradients, move Adam's state back."""
        for chunk in self.chunks:
            chunk.restore_grad_buffers()
        if self.config.optimizer.cpu_offload_fraction == 0:
            self.optimizer.restore_from_cpu()

    # ------------------------------------------------------------ disk

    def save(self, root: str | Path, loop: LoopState) -> None:
        """Write `root/step_N`; with `checkpoint.asynchronous` in the background."""
        self._check_weights(f"training step {loop.step}, before saving,")
        settings = self.config.checkpoint
        self._saver.save(root, self, loop, keep=settings.keep, in_background=settings.asynchronous)

    def seal_written(self) -> None:
        self._saver.seal_written()

    def finish_saving(self) -> None:
        self._saver.finish()

    def load(self, folder: str | Path) -> None:
        """Load a checkpoint of any parallel layout."""
        saver.load(folder, self)

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model under its HF name, on rank 0; all ranks must exhaust it."""
        return export_hf(self.chunks, self.arch)

    def export(self, destination: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
        """Write a Hugging Face folder, with the config and tokenizer of `model.path`."""
        self._check_weights(f"optimizer step {self.step}")
        if parallel.place().rank != 0:
            for _ in self.hf_tensors():
                pass
        else:
            with written_atomically(destination) as folder:
                copy_companions(self.config.model.path, folder)
                write_shards(folder, self.hf_tensors(), shard_bytes)
        dist.barrier()


def _finalize_sums(model, num_tokens=None, **kwargs) -> None:
    """Without Megatron's division by a token count: the losses are already weighted."""
    finalize_model_grads(model, None, **kwargs)


def _reduce_metrics(loss_metrics: list[LossMetrics]) -> dict[str, float]:
    """Of the whole mini-batch, on every rank."""
    place = parallel.place()
    device = parallel.device()
    sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
    maxima = torch.zeros(len(MAXIMA), dtype=torch.float64, device=device)
    # Tensor- and context-parallel ranks have the same metrics: the first of each group counts.
    if place.tensor == place.context == 0:
        for metrics in loss_metrics:
            sums += metrics.sums
            maxima = torch.maximum(maxima, metrics.maxima)
    dist.all_reduce(sums)
    dist.all_reduce(maxima, dist.ReduceOp.MAX)
    return means(dict(zip(SUMS, sums.tolist())), dict(zip(MAXIMA, maxima.tolist())))


def _any_rank(condition: bool) -> bool:
    count = torch.tensor(float(condition), device=parallel.device())
    dist.all_reduce(count)
    return count.item() > 0


def _of_all_ranks(names: list[str]) -> list[str]:
    """The distinct names."""
    by_rank: list = [None] * parallel.place().world
    dist.all_gather_object(by_rank, names)
    return list(dict.fromkeys(name for rank_names in by_rank for name in rank_names))


def _first_names(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return "; ".join(names[:5]) + more


def _nonfinite_losses(
    micro_batches: list[MicroBatch], loss_metrics: list[LossMetrics]
) -> list[str]:
    """The steps whose loss is not finite."""
    names = []
    for micro_batch, metrics in zip(micro_batches, loss_metrics):
        nonfinite = metrics.nonfinite.cpu().numpy()
        if nonfinite.any():
            table = micro_batch.trie.loss.take(nonfinite)
            names += [
                f"loss of group {group}, trajectory {trajectory}, step {step}"
                for group, trajectory, step in zip(table.group, table.trajectory, table.step)
            ]
    return list(dict.fromkeys(names))
