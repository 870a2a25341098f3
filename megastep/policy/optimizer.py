"""Megatron's distributed Adam and its learning-rate schedule.

Megatron takes FusedAdam from Transformer Engine or apex where one is installed, torch's AdamW otherwise.
"""

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megastep.config import OptimizerConfig
from megastep.policy.model import PRECISIONS


def build_optimizer(
    chunks: list[DistributedDataParallel], config: OptimizerConfig, precision: str, total_steps: int
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            weight_decay=config.weight_decay,
            clip_grad=config.clip_grad,
            bf16=precision == "bf16",
            params_dtype=PRECISIONS[precision],
            use_distributed_optimizer=True,
            optimizer_cpu_offload=config.offload_fraction > 0,
            optimizer_offload_fraction=config.offload_fraction,
        ),
        chunks,
    )
    _allocate_torch_adam_state(optimizer)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=total_steps,
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=total_steps,
        wd_incr_style="constant",
        # A resumed run takes its position from the checkpoint and its shape from the config.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return optimizer, scheduler


def _allocate_torch_adam_state(optimizer: MegatronOptimizer) -> None:
    """What torch's AdamW would allocate at its first step, now.

    Megatron reads the state when it plans a checkpoint, also for loading one before the first step.
    """
    for part in optimizer.chained_optimizers:
        adam = part.optimizer
        if not isinstance(adam, torch.optim.AdamW):
            continue
        for group in adam.param_groups:
            for param in group["params"]:
                adam.state[param] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }
