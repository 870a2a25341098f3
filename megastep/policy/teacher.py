"""The teacher of on-policy distillation (loss.type=distill): another model, forward only.

It has the policy's vocabulary, parallel layout and precision, and any supported family and size.
Its routers route freely: the recorded routing is the student's.
"""

from dataclasses import replace

import numpy as np
import torch
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megastep.config import Config
from megastep.distributed import parallel
from megastep.models.architecture import read_architecture
from megastep.policy.batch import prepare
from megastep.policy.model import build_model
from megastep.policy.schedule import run_schedule
from megastep.types import MicroBatch
from megastep.weights.hf_files import HFReader
from megastep.weights.megatron import load_hf


class Teacher:
    def __init__(self, config: Config):
        assert config.loss.teacher is not None, "config/checks.py"
        self.arch = read_architecture(config.loss.teacher)
        self.temperature = config.rollout.temperature
        self.logits_chunk_rows = config.policy.logits_chunk_rows
        self.attention_setting = config.policy.attention
        forward_only = replace(config.policy, recompute=[], activation_offload_layers=0)
        chunks = build_model(self.arch, forward_only)
        load_hf(chunks, self.arch, HFReader(config.loss.teacher))
        is_bf16 = config.policy.precision == "bf16"
        self.chunks = [Float16Module(c.config, c) if is_bf16 else c for c in chunks]
        for chunk in self.chunks:
            chunk.requires_grad_(False)

    @torch.no_grad()
    def logprobs(self, micro_batches: list[MicroBatch]) -> list[np.ndarray]:
        """[N] of each loss table; empty on ranks without the output layer."""
        return run_schedule(self.chunks, self._forward_step, micro_batches, forward_only=True)

    def _forward_step(self, data, model):
        """The signature of Megatron's schedules: the output, and the function for the loss."""
        chunk, micro_batch = next(data)
        batch = prepare(
            micro_batch,
            self.arch.heads // self.arch.kv_heads,
            parallel.has_head(chunk),
            self.logits_chunk_rows,
            self.temperature,
            entropy_gradient=False,
            attention_setting=self.attention_setting,
        )
        return model(batch), _logprob


def _logprob(output: Tensor, non_loss_data: bool = True) -> np.ndarray:
    logprob, _ = output
    return logprob.cpu().numpy()
