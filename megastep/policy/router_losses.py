"""Megatron's router with auxiliary losses that exclude padding.

Over the T real tokens of a micro-batch, with E experts and top-K routing:

    z loss      z_coef × Σ logsumexp(logits)²                (ST-MoE, Zoph et al. 2022)
    aux loss    aux_coef × T × E × Σ_e f_e × P_e             (Switch Transformer, Fedus et al. 2021)
                f_e: fraction of the T × K choices that fell on expert e
                P_e: mean router probability of expert e

The coefficients are per token of the mini-batch; the worker sets them before each update. The
losses are plain sums, so micro-batches and ranks add up, and a padding micro-batch adds 0.

Megatron's own losses take a padding mask too, but weigh tensor- and context-parallel ranks as if
each had the same number of real tokens, and divide by 0 for a micro-batch without any.
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
        assert padding_mask is not None, "PolicyModel passes it"
        squares = torch.logsumexp(logits.float(), dim=-1).square()
        return MoEAuxLossAutoScaler.apply(logits, coefficient * squares[~padding_mask].sum())

    def _apply_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """Scores and map [tokens, E] of the live router; rows of padding are 0 in both."""
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        tokens_per_expert = routing_map.sum(0)  # [E]; after the reduction of the whole micro-batch
        dist.all_reduce(tokens_per_expert, group=self.tp_cp_group)
        fraction = tokens_per_expert / tokens_per_expert.sum().clamp(min=1)
        product = (fraction * scores_for_aux_loss.sum(0)).sum()
        loss = coefficient * self.config.num_moe_experts * product
        return MoEAuxLossAutoScaler.apply(probs, loss)
