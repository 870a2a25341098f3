"""A Megatron-Core GPTModel from an Architecture; selects the CPU or the CUDA layer spec.

    CUDA    Transformer Engine's layers, grouped expert GEMMs
    CPU     Megatron's local layers with our RMSNorm; also on the meta device, for shapes only
    both    attention over tries (attention.py), the output layer on loss rows only (logprobs.py)

Both have the same parameters under the same checkpoint keys.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megastep.config import Config, ParallelConfig, PolicyConfig
from megastep.distributed import parallel
from megastep.distributed.megatron_version import mlp_submodules
from megastep.errors import ConfigError
from megastep.models.architecture import Architecture, read_architecture, rope_type
from megastep.policy.attention import CudaTrieAttention, TrieAttention
from megastep.policy.batch import PolicyBatch
from megastep.policy.context import gather_rows
from megastep.policy.logprobs import VocabShard, row_logprobs
from megastep.policy.megatron_settings import check_settings, ddp_settings, transformer_settings
from megastep.policy.router_losses import PolicyRouter

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_model(arch: Architecture, policy: PolicyConfig) -> "list[PolicyModel]":
    """This rank's shard of the model, one PolicyModel per virtual pipeline stage.

    The weights are uninitialized: `load_hf` fills them. Under `with torch.device("meta")` nothing
    is allocated, with or without a GPU: the CPU spec is used, since Megatron passes a device to
    each of Transformer Engine's layers.
    """
    on_meta = torch.get_default_device().type == "meta"
    on_cuda = has_cuda() and not on_meta
    virtual_stages = policy.parallel.virtual
    inverse_frequencies, softmax_scale = _rope(arch)
    config = transformer_config(arch, policy, softmax_scale, on_cuda, mark_shards=not on_meta)
    if on_cuda:
        # layers.py:924: fused gradients of the output layer would need apex, but its own matrix
        # product never runs.
        layers._grad_accum_fusion_available = True
    chunks = []
    for stage in range(virtual_stages):
        virtual_stage = stage if virtual_stages > 1 else None
        chunk = PolicyModel(
            config=config,
            transformer_layer_spec=layer_spec(config, virtual_stage, on_cuda),
            vocab_size=arch.padded_vocab,
            max_sequence_length=arch.max_positions,
            pre_process=parallel.has_embedding(stage),
            post_process=parallel.has_head(stage),
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type="rope",
            vp_stage=virtual_stage,
        )
        chunk.rotary_pos_emb.inv_freq = inverse_frequencies
        chunk.shard = _vocab_shard(arch)
        chunks.append(chunk)
    return chunks


def has_cuda() -> bool:
    """Selects the CUDA layer spec; tests/te builds it without a GPU."""
    return torch.cuda.is_available()


class PolicyModel(GPTModel):
    """A GPTModel over tries; its last stage returns logprob and entropy of the loss rows."""

    shard: VocabShard

    def __init__(self, **arguments):
        super().__init__(**arguments)
        if self.post_process:
            # Called as a module: with overlap_param_gather a hook before its forward pass waits for
            # the weight.
            self.output_layer.forward = self._row_values

    def forward(self, batch: PolicyBatch) -> torch.Tensor:
        """Hidden states [T/tp, 1, h]; on the last stage [2, N]: logprobs and entropies."""
        embedded = None  # other stages take the input that the schedule has received
        if self.pre_process:
            embedded = self.embedding(input_ids=batch.tokens, position_ids=None)  # [T/tp, 1, h]
        # [rope_tokens, 1, 1, dim]
        frequencies = self.rotary_pos_emb(batch.rope_tokens, packed_seq=True)
        hidden = self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            rotary_pos_emb=frequencies[batch.position],
            packed_seq_params=batch.attention,
            padding_mask=batch.padding,
        )
        if not self.post_process:
            return hidden
        values = self.output_layer(hidden.squeeze(1), batch)
        if batch.table_rows is None:
            return values
        return gather_rows.apply(
            values, batch.table_rows, batch.table_size, parallel.context_group()
        )

    def _row_values(self, hidden: torch.Tensor, batch: PolicyBatch) -> torch.Tensor:
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        assert batch.rows is not None, "set by prepare where the stage has the output layer"
        logprob_and_entropy = row_logprobs(
            hidden, weight, batch.rows, self.shard, batch.temperature, batch.entropy_gradient
        )
        return torch.stack(logprob_and_entropy)


def _vocab_shard(arch: Architecture) -> VocabShard:
    place = parallel.place()
    rows = arch.padded_vocab // place.tensor_size
    first = place.tensor * rows
    real = min(max(arch.vocab - first, 0), rows)
    return VocabShard(first, real, parallel.tensor_group())


def wrap_for_training(
    chunks: list[GPTModel], policy: PolicyConfig
) -> list[DistributedDataParallel]:
    """Cast each chunk and wrap it in Megatron's data parallelism; gradients are summed in fp32."""
    config = chunks[0].config
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        average_in_collective=False,
        **ddp_settings(policy, has_cuda()),
    )
    is_bf16 = policy.precision == "bf16"
    cast = [Float16Module(config, chunk) if is_bf16 else chunk for chunk in chunks]
    wrapped = [
        DistributedDataParallel(
            config=config, ddp_config=ddp, module=chunk, disable_bucketing=i > 0
        )
        for i, chunk in enumerate(cast)
    ]
    if ddp.overlap_grad_reduce:  # gradients are communicated in the last backward pass only
        config.no_sync_func = _by_chunk([chunk.no_sync for chunk in wrapped])
    if ddp.overlap_param_gather and ddp.align_param_gather:
        config.param_sync_func = _by_chunk([chunk.start_param_sync for chunk in wrapped])
    return wrapped


def _by_chunk(functions: list[Callable]) -> Callable | list[Callable]:
    """Megatron's schedules take a function, the interleaved one a list of them."""
    return functions if len(functions) > 1 else functions[0]


def gather_weights(chunks: list[DistributedDataParallel]) -> None:
    """Complete the weights after an optimizer step, see `overlap_param_gather`.

    With it the step leaves each rank with its own shard of new weights; others arrive in the next
    forward pass.
    """
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def check_megatron(config: Config) -> None:
    """Megatron's own checks of policy.megatron, before any rank starts; raises ConfigError."""
    check_settings(config)
    arch = read_architecture(config.model.path)
    try:
        transformer_config(arch, config.policy, None, has_cuda(), mark_shards=True)
    except (AssertionError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError([f"policy.megatron: Megatron rejects it ({reason})"]) from None


def transformer_config(
    arch: Architecture,
    policy: PolicyConfig,
    softmax_scale: float | None,
    on_cuda: bool,
    mark_shards: bool,
) -> TransformerConfig:
    degrees = policy.parallel
    dtype = PRECISIONS[policy.precision]
    return TransformerConfig(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        ffn_hidden_size=arch.ffn_hidden,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        softmax_scale=softmax_scale,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        qk_layernorm=arch.qk_norm,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=arch.all_bias,
        add_qkv_bias=arch.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **_expert_settings(arch, policy, on_cuda),
        tensor_model_parallel_size=degrees.tensor,
        sequence_parallel=degrees.tensor > 1,
        pipeline_model_parallel_size=degrees.pipeline,
        virtual_pipeline_model_parallel_size=degrees.virtual if degrees.virtual > 1 else None,
        pipeline_model_parallel_layout=_pipeline_stages(degrees),
        # The dense teacher of a MoE policy is built under the policy's layout.
        expert_model_parallel_size=1 if arch.experts is None else degrees.expert,
        expert_tensor_parallel_size=degrees.expert_tensor_size,
        context_parallel_size=degrees.context,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=policy.precision == "bf16",
        **_recomputation(policy),
        cpu_offloading=policy.activation_offload_layers > 0,
        cpu_offloading_num_layers=policy.activation_offload_layers,
        # Losses are sums of weighted terms; Megatron must not divide them by tokens or
        # micro-batches.
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        # With interleaved stages two ranks exchange several tensors at once; only the unbatched
        # calls, which Megatron ties to overlap, keep them in order.
        overlap_p2p_comm=degrees.virtual > 1,
        batch_p2p_comm=degrees.virtual == 1,
        # Megatron marks tensor-parallel parameters during initialization, and gradient norms
        # depend on the mark: initialization runs with a method that draws nothing.
        perform_initialization=mark_shards,
        init_method=_leave_uninitialized,
        output_layer_init_method=_leave_uninitialized,
        embedding_init_method=_leave_uninitialized,
        # Keeps Megatron from selecting another device under the meta device.
        use_cpu_initialization=not on_cuda,
        # The fused rotary embedding takes frequencies by offset in a sequence, not by token.
        apply_rope_fusion=False,
        **transformer_settings(arch, policy, on_cuda),
    )


def _leave_uninitialized(weight: torch.Tensor) -> None:
    pass


def _recomputation(policy: PolicyConfig) -> dict:
    if "full" in policy.recompute:
        return dict(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        )
    if policy.recompute:
        return dict(recompute_granularity="selective", recompute_modules=list(policy.recompute))
    return {}


def _expert_settings(arch: Architecture, policy: PolicyConfig, on_cuda: bool) -> dict:
    if arch.experts is None:
        return {}
    return dict(
        num_moe_experts=arch.experts.count,
        moe_router_topk=arch.experts.top_k,
        moe_ffn_hidden_size=arch.experts.hidden,
        moe_layer_freq=[int(has) for has in arch.experts.layers],
        # Softmax over the top-k logits equals softmax over all, renormalized over the top-k.
        moe_router_pre_softmax=not arch.experts.normalize_top_k,
        # Before each update the worker divides both coefficients by the mini-batch's tokens
        # (router_losses.py).
        moe_router_load_balancing_type="aux_loss" if policy.moe_aux_loss_coef > 0 else "none",
        moe_aux_loss_coeff=policy.moe_aux_loss_coef,
        moe_z_loss_coeff=policy.moe_z_loss_coef or None,
        moe_grouped_gemm=on_cuda,
    )


def _pipeline_stages(degrees: ParallelConfig) -> list[list[str]] | None:
    """Megatron's description of an uneven pipeline; None: even."""
    if degrees.layers_per_stage is None or degrees.pipeline == 1:
        return None
    stages = [["decoder"] * n for n in degrees.layers_per_stage]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


# ---------------------------------------------------------------- layers


def layer_spec(
    config: TransformerConfig, virtual_stage: int | None, on_cuda: bool
) -> TransformerBlockSubmodules:
    """Transformer Engine's layers on CUDA (not run on a GPU yet), Megatron's local ones on CPU."""
    if on_cuda:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=True, vp_stage=virtual_stage
        )
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = CudaTrieAttention
            _set_router(layer)
        return spec
    moe_layers = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    specs = [_cpu_layer(config, config.num_moe_experts if moe else None) for moe in moe_layers]
    first = get_transformer_layer_offset(config, vp_stage=virtual_stage)
    count = get_num_layers_to_build(config, vp_stage=virtual_stage)
    return TransformerBlockSubmodules(layer_specs=specs[first : first + count], layer_norm=RMSNorm)


def _cpu_layer(config: TransformerConfig, experts: int | None) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer = spec.submodules
    layer.input_layernorm = RMSNorm
    layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = TrieAttention
    if attention.q_layernorm is not IdentityOp:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    # Checkpoint keys of Transformer Engine's layers, where a linear layer includes the norm before
    # it, except before experts.
    layer.sharded_state_dict_keys_map = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_"
    }
    if experts is None:
        layer.sharded_state_dict_keys_map["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    _set_router(spec)
    return spec


def _set_router(layer: ModuleSpec) -> None:
    mlp = mlp_submodules(layer)
    if isinstance(mlp, MoESubmodules):
        mlp.router = PolicyRouter


class RMSNorm(torch.nn.Module):
    """RMSNorm that supports sequence parallelism on CPU.

    Megatron's wrapper of torch's norm does not: its weight lacks the mark that makes Megatron sum
    the gradient over the ranks. Torch's norm for CPU is also a chain of eight small operations.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **unused):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    """y = x r w with r = 1 / sqrt(mean x² + eps), computed in fp32."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        x_fp32 = x.float()
        square_sum = torch.linalg.vector_norm(x_fp32, dim=-1, keepdim=True).square_()
        scale = torch.rsqrt(square_sum / x.shape[-1] + eps)
        ctx.save_for_backward(x, weight, scale)
        return (x_fp32 * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        grad = grad.float()
        normed = x.float() * scale
        product = (grad * normed).flatten(0, -2)
        inner = (product @ weight.float() / x.shape[-1]).view(scale.shape)
        d_x = (grad * weight).addcmul_(normed, inner, value=-1).mul_(scale)
        return d_x.to(x.dtype), product.sum(0).to(weight.dtype), None


def _rope(arch: Architecture) -> tuple[torch.Tensor, float | None]:
    """Inverse frequencies [head_dim / 2] and, for yarn, the softmax scale, as in transformers.

    transformers multiplies cos and sin by a factor. Queries and keys both carry it, so the scores
    carry its square, which Megatron takes as part of the softmax scale.
    """
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    with tempfile.TemporaryDirectory() as folder, torch.device("cpu"):
        Path(folder, "config.json").write_text(json.dumps(arch.hf))
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        kind = rope_type(arch.hf)
        if kind == "default":
            theta = config.rope_parameters["rope_theta"]
            exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.int64).float() / arch.head_dim
            return 1.0 / theta**exponents, None
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, device="cpu")
    softmax_scale = None if factor == 1.0 else factor**2 / arch.head_dim**0.5
    return frequencies, softmax_scale
