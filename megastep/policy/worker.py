"""One rank of the policy: a Megatron model, its optimizer and what can be done with them.

Every public method is collective: all ranks call it with the same arguments.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor

from megastep.architecture import read_architecture
from megastep.config import Config
from megastep.policy import checkpoint, parallel
from megastep.policy.model import build_model, wrap_for_training
from megastep.policy.optimizer import build_optimizer
from megastep.sync.hf_files import HFReader, copy_companions, write_shards, written_beside
from megastep.sync.live import export_hf, load_hf


class PolicyWorker:
    """`parallel.start` must have run in this process."""

    def __init__(self, config: Config):
        self.config = config
        self.arch = read_architecture(config.model.path)
        self.step = 0  # optimizer steps taken
        policy = config.policy
        parallel.seed_everything(config.train.seed)
        chunks = build_model(self.arch, policy.parallel, policy.precision)
        if config.model.init == "hf":
            load_hf(chunks, self.arch, HFReader(config.model.path))
        self.chunks = wrap_for_training(chunks, policy.precision)
        self.optimizer, self.scheduler = build_optimizer(
            self.chunks, config.optimizer, policy.precision, config.train.steps
        )
        self._saver = checkpoint.Saver()
        megatron = chunks[0].config
        megatron.grad_scale_func = self.optimizer.scale_loss
        megatron.finalize_model_grads_func = _finalize_sums

    # ------------------------------------------------------------ compute

    def train_step(self, tokens: Tensor) -> dict[str, float]:
        """One optimizer step of next-token prediction on tokens [sequences, length]."""
        weight = 1.0 / (tokens.shape[0] * (tokens.shape[1] - 1))
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self._run(tokens, lambda per_token: _weighted_sum(per_token, weight))
        self.scheduler.step(1)  # before the update: the first one has a learning rate above 0
        _, grad_norm, _ = self.optimizer.step()
        self.step += 1
        return {
            "loss": _sum_over_ranks(sum(losses)),
            "grad_norm": float(grad_norm),
            "lr": self.optimizer.param_groups[0]["lr"],
        }

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor | None:
        """Logits [sequences, length, vocabulary] of this data-parallel rank's part; None before the last stage."""

        def gather(output: Tensor, non_loss_data: bool = True) -> Tensor:
            return gather_from_tensor_model_parallel_region(output)[..., : self.arch.vocab].float()

        parts = self._run(tokens, gather, forward_only=True)
        return torch.cat(parts) if parts else None

    def _run(self, tokens: Tensor, finish, forward_only: bool = False) -> list:
        """Megatron's schedule over this data-parallel rank's micro-batches; what `finish` returned for each."""
        place, size = parallel.place(), self.config.train.micro_batch_sequences
        micro_batches = tokens.chunk(place.data_size)[place.data].to(parallel.device()).split(size)
        return get_forward_backward_func()(
            forward_step_func=lambda data, model: _forward(next(data), model, finish, with_labels=not forward_only),
            data_iterator=[iter(micro_batches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(micro_batches),
            seq_length=tokens.shape[1],
            micro_batch_size=size,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    # ------------------------------------------------------------ disk

    def save(self, root: str | Path) -> None:
        """Write `root/step_N`; with `checkpoint.asynchronous` the files are written while training goes on."""
        settings = self.config.checkpoint
        self._saver.save(root, self, keep=settings.keep, in_background=settings.asynchronous)

    def finish_saving(self) -> None:
        self._saver.finish()

    def load(self, folder: str | Path) -> None:
        """Continue from a checkpoint, of whatever layout."""
        checkpoint.load(folder, self)

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model under its HF name, on rank 0; all ranks must run through it."""
        return export_hf(self.chunks, self.arch)

    def export(self, destination: str | Path, shard_bytes: int = 5 * 10**9) -> None:
        """Write a Hugging Face folder, with the config and tokenizer of `model.path`."""
        if parallel.place().rank != 0:
            for _ in self.hf_tensors():
                pass
        else:
            with written_beside(destination) as folder:
                copy_companions(self.config.model.path, folder)
                write_shards(folder, self.hf_tensors(), shard_bytes)
        dist.barrier()


def _forward(tokens: Tensor, model, finish, with_labels: bool):
    """A forward step as Megatron's schedules want it: the output and the function that ends the micro-batch."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    labels = tokens.roll(-1, dims=1) if with_labels else None
    return model(tokens, positions, None, labels=labels), finish


def _finalize_sums(model, num_tokens=None, **kwargs) -> None:
    """Losses come weighted: Megatron's division by a token count must not happen."""
    finalize_model_grads(model, None, **kwargs)


def _weighted_sum(per_token: Tensor, weight: float):
    """The last position of a sequence has nothing to predict."""
    loss = per_token[:, :-1].sum() * weight
    return loss, torch.tensor(1, dtype=torch.int, device=loss.device), loss.detach()


def _sum_over_ranks(value) -> float:
    """Sum of a number that the last pipeline stage has, each tensor-parallel group once."""
    counts = parallel.on_last_stage() and parallel.place().tensor == 0
    total = torch.tensor(float(value) if counts else 0.0, dtype=torch.float64, device=parallel.device())
    dist.all_reduce(total)
    return total.item()
