"""Megatron's distributed Adam and its learning-rate schedule.

The learning rate of update n of N, with a warm-up of w updates (w = 0 equals w = 1: no warm-up):

    n <= w                lr × n / w
    constant              lr
    linear, cosine        from lr at n = w to min_lr at n = N + 1: the last update is above min_lr

Megatron uses FusedAdam from Transformer Engine or apex if installed, torch's AdamW otherwise. With
`cpu_offload_fraction` torch's AdamW updates that fraction of the parameters on the CPU.
"""

import gc

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megastep.config import OptimizerConfig, PolicyConfig
from megastep.policy import model
from megastep.policy.megatron_settings import optimizer_settings


def build_optimizer(
    chunks: list[DistributedDataParallel],
    config: OptimizerConfig,
    policy: PolicyConfig,
    total_steps: int,
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
            bf16=policy.precision == "bf16",
            params_dtype=model.PRECISIONS[policy.precision],
            use_distributed_optimizer=True,
            optimizer_cpu_offload=config.cpu_offload_fraction > 0,
            optimizer_offload_fraction=config.cpu_offload_fraction,
            # Without it Megatron keeps a second fp32 copy of all weights on the GPU, and the hybrid
            # optimizer cannot load a checkpoint.
            use_precision_aware_optimizer=config.cpu_offload_fraction > 0,
            **optimizer_settings(policy, model.has_cuda()),
        ),
        chunks,
    )
    if config.cpu_offload_fraction > 0:
        # Megatron first builds a hybrid optimizer of the unsharded weights; a reference cycle
        # keeps it alive.
        gc.collect()
    _allocate_adam_state(optimizer)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=max(config.warmup_steps, 1),
        lr_decay_steps=total_steps + 1,
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


def clip_and_step(optimizer: MegatronOptimizer, norm: float) -> None:
    """The rest of `optimizer.step`, which would prepare the gradients and their norm again."""
    for part in optimizer.chained_optimizers:
        parameters = part.get_parameters()
        if parameters and part.config.clip_grad > 0:
            clip_grad_by_total_norm_fp32(
                parameters,
                max_norm=part.config.clip_grad,
                total_norm=norm,
                use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
    optimizer.step_with_ready_grads()


def _allocate_adam_state(optimizer: MegatronOptimizer) -> None:
    """Allocate the state that Adam would allocate at its first step.

    Megatron reads it to plan a checkpoint, also when it loads one before the first step.
    """
    for part in optimizer.chained_optimizers:
        hybrid = isinstance(part.optimizer, HybridDeviceOptimizer)
        adams = part.optimizer.sub_optimizers if hybrid else [part.optimizer]
        for adam in adams:
            for group in adam.param_groups:
                for param in group["params"]:
                    adam.state[param] = {
                        "exp_avg": torch.zeros_like(param),
                        "exp_avg_sq": torch.zeros_like(param),
                    }
                    if isinstance(adam, torch.optim.AdamW):  # FusedAdam counts steps by group
                        adam.state[param]["step"] = torch.tensor(0.0)
        if hybrid:
            part.optimizer._sync_sub_optimizers_state_to_hdo()
