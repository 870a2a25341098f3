"""Megatron's router with losses of its own that padding does not reach.

Over the real tokens of a micro-batch, T of them, with E experts of which each token takes K:

    z          z × Σ logsumexp(logits)²                                   (ST-MoE, Zoph et al. 2022)
    balance    balance × T × E × Σ_e share_e × mean probability of e      (Switch Transformer, Fedus et al. 2021)
               share_e: of the T × K choices, those that fell on e

`z` and `balance` are coefficients per token of the mini-batch, which the worker sets before each update: the losses
are plain sums, so micro-batches and ranks can only add up to them, and one of padding alone adds 0.

Why not Megatron's own, which know a padding mask: they weigh the parts of tensor and context-parallel ranks as if each
had as many real tokens, and divide by 0 where a micro-batch has none.
"""

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class PolicyRouter(TopKRouter):
    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """logits [tokens, E]; padding_mask [tokens], True: padding."""
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or not self.training or not torch.is_grad_enabled():
            return logits
        squares = torch.logsumexp(logits.float(), dim=-1).square()
        return MoEAuxLossAutoScaler.apply(logits, coefficient * squares[~padding_mask].sum())

    def _apply_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """Scores and map [tokens, E] of the live router; the rows of padding are 0 in both."""
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        chosen = routing_map.sum(0)  # [E] tokens, of the whole micro-batch once they are added up
        dist.all_reduce(chosen, group=self.tp_cp_group)
        share = chosen / chosen.sum().clamp(min=1)
        loss = (
            coefficient * self.config.num_moe_experts * (share * scores_for_aux_loss.sum(0)).sum()
        )
        return MoEAuxLossAutoScaler.apply(probs, loss)
