"""The configuration schema: every key with its type, default, meaning and constraint.

`megastep config --list` and docs/configuration.md are printed from it. Constraints that concern one
field are next to the field; those that relate several fields are in checks.py. Nothing derived is
stored: properties compute it.
"""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, get_origin

from megastep.models.architecture import Architecture

REQUIRED = "???"  # OmegaConf's mark for a value that must be given
GPU_BACKENDS = ("nccl", "ipc")  # of sync.backend
FP8_RECIPES = ("blockwise", "mxfp8", "tensorwise", "delayed")  # TransformerConfig.fp8_recipe

# Sanity limits. Larger values are typing errors or would hang; the real limits are those of the
# model and of the cluster, which other checks and `megastep plan` know.
INT_LIMIT = 2**31 - 1  # accepted by torch, numpy and vLLM, for seeds too
FLOAT_LIMIT = 1e9
SECONDS = 10_000_000  # 115 days; waiting primitives overflow beyond
RANKS = 16_384

RANKS_TIMEOUT_S = 600  # a collective call of the policy's ranks that takes longer ends the run


def setting(
    default: Any = MISSING,
    meaning: str = "",
    *,
    factory: Callable[[], Any] | None = None,
    choices: tuple[str, ...] | None = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    limit: float | None = None,
) -> Any:
    """A field with its meaning and its constraints: `ge`, `gt`, `le`, `lt` as in inequalities.

    limit: the sanity limit, if it differs from that of the type.
    """
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    metadata = {"meaning": meaning, "choices": choices, "bounds": bounds, "limit": limit}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ModelConfig:
    path: str = setting(
        REQUIRED,
        "Hugging Face folder: config.json, tokenizer and, for init=hf, safetensors; no hub name",
    )
    init: str = setting(
        "hf",
        "hf: the weights in model.path; random: fresh weights of that shape",
        choices=("hf", "random"),
    )


@dataclass
class DataConfig:
    train: str = setting(
        "generated",
        "FILE.jsonl, FILE.parquet, hf:PLACE[:SPLIT], or generated: rows made by the environment",
    )
    eval: str | None = setting(
        None, "held-out rows, same forms; default: rows split off data.train"
    )
    held_out: int = setting(
        64, "rows of data.train excluded from training, if data.eval is not set", ge=0, limit=10**6
    )
    generated_rows: int = setting(4096, "size of a generated data set", ge=1, limit=10**6)
    shuffle: bool = setting(True, "shuffle each epoch, seeded by train.seed")


@dataclass
class EnvConfig:
    name: str | None = setting(
        None,
        "built-in environment (`megastep envs`), entry point of megastep.envs, or module:Class;"
        " required by train, eval and rollout",
    )
    options: dict[str, Any] = setting(
        factory=dict,
        meaning="keyword arguments of the environment; ${env:NAME} reads an environment variable"
        " at use and is never written to disk",
    )


@dataclass
class AgentConfig:
    """A program that calls the model over HTTP (docs/agents.md), in place of an environment."""

    function: str | None = setting(
        None,
        "module:function, called with the task and the address of the model;"
        " `agent: module:function` is short for it",
    )
    command: list[str] | None = setting(
        None,
        "a program and its arguments; it gets the task as JSON on stdin and the address of the"
        " model in its environment",
    )
    environment: list[str] = setting(
        factory=list,
        meaning="environment variables that the command gets besides PATH, HOME, LANG and the like",
    )
    timeout_s: float = setting(600.0, "time limit of an episode", gt=0, limit=SECONDS)
    max_tokens: int | None = setting(
        None, "sampled tokens per episode; default: no limit but rollout.max_turns calls", ge=1
    )
    roles: list[str] = setting(
        factory=list, meaning="roles whose calls are trained; empty: the calls of every role"
    )
    tool_parser: str = setting(
        "auto", "vLLM's parser of tool calls, by name; auto: by the chat template; none"
    )
    reasoning_parser: str = setting(
        "auto", "vLLM's parser of reasoning, by name; auto: by the chat template; none"
    )
    host: str = setting("127.0.0.1", "address that the endpoint listens on")
    max_body_mb: int = setting(32, "largest request", ge=1, limit=1024)


@dataclass
class RolloutConfig:
    mode: str = setting(
        "tokens",
        "tokens: append to the sampled tokens; chat: render the whole history each turn",
        choices=("tokens", "chat"),
    )
    template: dict[str, Any] = setting(
        factory=dict, meaning="keyword arguments of the chat template, such as enable_thinking"
    )
    prompts: int = setting(16, "prompts per training step", ge=1, limit=1 << 20)
    samples_per_prompt: int = setting(8, "trajectories per prompt", ge=1, limit=1 << 16)
    max_turns: int = setting(8, "model calls per trajectory", ge=1, limit=1 << 20)
    max_prompt_tokens: int | None = setting(
        None,
        "prompt tokens per model call; default: the engine's context minus max_response_tokens",
        ge=1,
    )
    max_response_tokens: int = setting(
        256, "response tokens per model call, including an appended end-of-turn token"
    )
    temperature: float = setting(1.0, "sampling temperature; 0: greedy", ge=0, limit=100)
    top_p: float = setting(1.0, "nucleus sampling", gt=0, le=1)
    top_k: int = setting(0, "sample from the k most likely tokens; 0: all", ge=0)
    concurrency: int = setting(
        256,
        "concurrent episodes; an evaluation alongside training has as many again",
        ge=1,
        limit=1 << 20,
    )
    workers: int | None = setting(
        None,
        "agent workers, processes that run episodes; 0: the driver runs them; default: 0 without a "
        "GPU, else by concurrency and spare CPUs",
        ge=0,
        limit=1 << 12,
    )
    env_timeout_s: float = setting(60.0, "time limit of one environment call", gt=0, limit=SECONDS)
    env_threads: int = setting(
        256, "threads of a process for blocking environment calls", ge=1, limit=1 << 14
    )
    max_observation_chars: int = setting(
        200_000, "characters of one observation; a longer one is an environment error", ge=1
    )


@dataclass
class EvalConfig:
    prompts: int = setting(64, "held-out prompts, from the first", ge=1, limit=1 << 20)
    samples_per_prompt: int = setting(
        4, "trajectories per prompt; pass@k is reported up to this k", ge=1, limit=1 << 16
    )
    temperature: float = setting(1.0, "sampling temperature; 0: greedy", ge=0, limit=100)
    top_p: float = setting(1.0, "nucleus sampling", gt=0, le=1)
    top_k: int = setting(0, "sample from the k most likely tokens; 0: all", ge=0)


@dataclass
class ParallelConfig:
    tensor: int = setting(1, "tensor parallelism, with sequence parallelism", ge=1, limit=RANKS)
    pipeline: int = setting(1, "pipeline stages", ge=1, limit=RANKS)
    virtual: int = setting(1, "interleaved model chunks per pipeline stage", ge=1, limit=RANKS)
    layers_per_stage: list[int] | None = setting(
        None, "uneven stages: pipeline × virtual layer counts, by depth"
    )
    expert: int = setting(1, "expert parallelism", ge=1, limit=RANKS)
    expert_tensor: int | None = setting(
        None,
        "tensor parallelism inside each expert; default: 1 if expert > 1, else tensor",
        ge=1,
        limit=RANKS,
    )
    context: int = setting(1, "context parallelism (needs a GPU)", ge=1, limit=RANKS)

    def stages(self, layers: int) -> list[tuple[int, ...]]:
        """The layers of each pipeline stage, from 0; not consecutive if interleaved.

        >>> ParallelConfig(pipeline=2, virtual=2).stages(8)
        [(0, 1, 4, 5), (2, 3, 6, 7)]
        """
        chunks = self.pipeline * self.virtual
        counts = [layers // chunks] * chunks
        if self.layers_per_stage is not None and self.pipeline > 1:
            counts = self.layers_per_stage
        stages: list[list[int]] = [[] for _ in range(self.pipeline)]
        first = 0
        for chunk, count in enumerate(counts):
            stages[chunk % self.pipeline] += range(first, first + count)
            first += count
        return [tuple(own_layers) for own_layers in stages]

    @property
    def expert_tensor_size(self) -> int:
        if self.expert_tensor is not None:
            return self.expert_tensor
        return 1 if self.expert > 1 else self.tensor


@dataclass
class PolicyConfig:
    ranks: int = setting(
        1, "processes; data parallelism is ranks / (tensor × pipeline × context)", ge=1, limit=RANKS
    )
    precision: str = setting(
        "fp32", "fp32, or bf16 with fp32 master weights", choices=("fp32", "bf16")
    )
    fp8: str | None = setting(
        None,
        "matrix products of the layers in FP8, by a recipe of Transformer Engine; weights stay in"
        " bf16 (needs a GPU; not run yet)",
        choices=FP8_RECIPES,
    )
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    attention: str = setting(
        "auto",
        "kernel on CUDA: flex (FlexAttention), triton (this project's), auto: Transformer Engine's "
        "for micro-batches without branches, else flex",
        choices=("auto", "flex", "triton"),
    )
    recompute: list[str] = setting(
        factory=list,
        meaning="activation recomputation: [full], or Megatron modules such as [core_attn, moe]",
    )
    activation_offload_layers: int = setting(
        0, "layers whose activations are offloaded to CPU memory (Transformer Engine)", ge=0
    )
    logits_chunk_rows: int = setting(
        1024,
        "tokens whose softmax is kept for backward; beyond that it is recomputed in chunks",
        ge=1,
        limit=1 << 30,
    )
    moe_aux_loss_coef: float = setting(
        0.0,
        "router load-balancing loss; it depends on which tokens share a micro-batch",
        ge=0,
        limit=1000,
    )
    moe_z_loss_coef: float = setting(0.0, "router z-loss", ge=0, limit=1000)
    megatron: dict[str, Any] = setting(
        factory=dict,
        meaning="fields of Megatron's TransformerConfig, DistributedDataParallelConfig and"
        " OptimizerConfig by their own names, such as {overlap_grad_reduce: true}; see"
        " docs/gpus.md",
    )

    @property
    def align_tokens(self) -> int:
        """Micro-batches have a multiple of this many tokens: equal shards, whole FP8 blocks."""
        block = {None: 1, "mxfp8": 32}.get(self.fp8, 16)
        return self.parallel.tensor * block


@dataclass
class EngineConfig:
    num_engines: int = setting(1, "vLLM engines", ge=1, limit=RANKS)
    tensor_parallel: int = setting(1, "GPUs (on a CPU: processes) per engine", ge=1, limit=RANKS)
    max_model_len: int | None = setting(
        None, "prompt and response tokens of one call; default: the model's maximum"
    )
    max_sequences: int = setting(64, "concurrent calls per engine", ge=1, limit=1 << 20)
    gpu_memory_utilization: float = setting(
        0.6, "fraction of each GPU's memory for weights and KV cache", gt=0, lt=1
    )
    quantization: str | None = setting(
        None,
        "fp8: vLLM quantizes the weights of every weight sync (needs a GPU; not run yet)",
        choices=("fp8",),
    )
    cpu_kv_gb: float = setting(1.0, "KV cache of an engine on a CPU, in GB", gt=0, limit=1 << 16)
    start_timeout_s: int = setting(600, "time limit of an engine's start", gt=0, limit=SECONDS)
    request_timeout_s: int = setting(
        3600,
        "time limit of one call, vLLM's queue included; beyond it the call is aborted and its "
        "trajectory fails",
        gt=0,
        limit=SECONDS,
    )
    progress_timeout_s: float = setting(
        300.0,
        "an engine that has calls and samples nothing for so long is restarted",
        gt=0,
        limit=SECONDS,
    )
    health_every_s: float = setting(10.0, "interval of health checks", gt=0, limit=SECONDS)
    health_timeout_s: float = setting(60.0, "time limit of a health check", gt=0, limit=SECONDS)
    restarts: int = setting(3, "restarts per engine and hour", ge=0, limit=10**6)


@dataclass
class SyncConfig:
    backend: str = setting(
        "auto",
        "weight transfer; auto: shm without GPU, ipc if colocated, nccl if disaggregated",
        choices=("auto", "shm", "nccl", "ipc"),
    )
    bucket_mb: int = setting(
        64,
        "size of a transfer bucket; a larger tensor has its own, which then is the size of the "
        "buffers of ipc and nccl",
        ge=1,
        limit=1 << 17,
    )
    verify: bool = setting(False, "compare checksums on both sides")
    timeout_s: int = setting(
        300,
        "time limit of all waits for engines in a transfer; engines beyond it are restarted",
        gt=0,
        limit=SECONDS,
    )

    def backend_for(self, has_gpu: bool, colocate: bool) -> str:
        if self.backend != "auto":
            return self.backend
        if not has_gpu:
            return "shm"
        return "ipc" if colocate else "nccl"


@dataclass
class ClusterConfig:
    address: str | None = setting(
        None, "HOST:PORT of a Ray cluster; default: $RAY_ADDRESS, else a local Ray"
    )
    colocate: bool = setting(
        False, "engines share the policy's GPUs; false: engines have their own (disaggregated)"
    )
    cpus_per_process: float = setting(
        0.25, "Ray CPUs per rank and per engine; threads are not pinned", limit=1024
    )
    threads_per_process: int | None = setting(
        None,
        "threads of a rank or an engine without a GPU; default: $OMP_NUM_THREADS, else the cores"
        " divided by the processes that compute at the same time",
        ge=1,
        limit=1024,
    )
    object_store_mb: int = setting(512, "object store of a local Ray", limit=1 << 24)
    timeout_s: int = setting(
        120, "time to wait for resources used by other jobs", gt=0, limit=SECONDS
    )


@dataclass
class AsyncConfig:
    """The section `async` of a config: rollouts run ahead of training."""

    max_staleness: float = setting(
        0.0,
        "batches that rollouts may run ahead of training; 0: synchronous, 0.5: half a batch."
        " No trained token is staler than this many weight syncs, rounded up",
        ge=0,
        limit=1000,
    )
    on_stale: str = setting(
        "wait",
        "a group that would become too stale: wait for it, or drop it",
        choices=("wait", "drop"),
    )
    finish_calls: bool = setting(
        False, "finish model calls before a weight sync; false: they continue with the new weights"
    )


@dataclass
class RoutingReplayConfig:
    enabled: bool = setting(True, "MoE layers use the routing of the rollout (R3)")
    on_conflict: str = setting(
        "owner",
        "steps with different routing of a shared token: owner: that of the step that sampled it;"
        " split: compute both",
        choices=("owner", "split"),
    )
    min_agreement: float = setting(
        0.8,
        "agreement of live routers with the recorded routing; less is an error (shifted routes)",
        ge=0,
        le=1,
    )


OUTCOME_ESTIMATORS = ("grpo", "grpo_nostd", "rloo", "maxrl")
STEP_ESTIMATORS = ("step_returns", "gigpo")
TEMPORAL_ESTIMATORS = ("gae", "reinforce++")  # of other trainers


def estimator_problem(name: str) -> str | None:
    """Why the name is no advantage estimator; None: it is one."""
    if name in OUTCOME_ESTIMATORS + STEP_ESTIMATORS:
        return None
    if name in TEMPORAL_ESTIMATORS:
        return (
            "temporal estimators give per-token values across steps, which one advantage per step "
            f"cannot represent; use one of {', '.join(OUTCOME_ESTIMATORS)}, or with rewards per "
            f"step {', '.join(STEP_ESTIMATORS)}"
        )
    return f"must be one of {', '.join(OUTCOME_ESTIMATORS + STEP_ESTIMATORS)}"


@dataclass
class AdvantageConfig:
    estimator: str = setting(
        "grpo",
        "grpo, grpo_nostd, rloo, maxrl: of outcomes; step_returns, gigpo: of rewards per step",
        choices=OUTCOME_ESTIMATORS + STEP_ESTIMATORS,
    )
    gamma: float = setting(1.0, "discount of step_returns and gigpo", ge=0, le=1)
    step_coef: float = setting(1.0, "gigpo: coefficient of the step-level advantage", ge=0)


@dataclass
class FiltersConfig:
    truncated: str = setting(
        "keep",
        "trajectories that hit a length limit: keep; mask: no loss, still in the baseline; drop",
        choices=("keep", "mask", "drop"),
    )
    zero_variance: bool = setting(False, "drop degenerate groups: all advantages are 0")
    dynamic_sampling: bool = setting(
        False, "replace degenerate groups until rollout.prompts groups remain"
    )
    max_batches: int = setting(
        8, "dynamic_sampling: fail after this many batches for one training step", ge=1
    )


@dataclass
class ImportanceSamplingConfig:
    """Correction of the mismatch between rollout and trainer logprobs."""

    mode: str = setting(
        "auto",
        "none; truncate (TIS); mask (masked IS); auto: truncate if async, else none",
        choices=("auto", "none", "truncate", "mask"),
    )
    level: str = setting("token", "ratio per token, or per step", choices=("token", "step"))
    low: float = setting(0.5, "mask: smallest importance ratio that is trained", ge=0)
    high: float = setting(2.0, "truncate, mask: largest importance ratio")


# loss.type → default (clip_low, clip_high); a clip_low of 1 is no lower bound.
CLIP_BOUNDS = {
    "ppo_clip": (0.2, 0.2),  # Schulman et al. 2017
    "gspo": (3e-4, 4e-4),  # Zheng et al. 2025, section 5.1: sequence ratios stay closer to 1
    "distill": (0.2, 0.2),
    "cispo": (1.0, 4.0),  # MiniMax-M1: no lower bound; Khatri et al. 2025 (ScaleRL): ratio ≤ 5
}


@dataclass
class LossConfig:
    type: str = setting(
        "ppo_clip",
        "policy loss; nll: supervised; distill: towards the teacher, without rewards",
        choices=("ppo_clip", "gspo", "cispo", "reinforce", "nll", "distill"),
    )
    teacher: str | None = setting(
        None, "distill: the teacher's Hugging Face folder, of the model's vocabulary"
    )
    reduction: str = setting(
        "token",
        "unit with equal weight in the mean",
        choices=("token", "step", "trajectory", "prompt"),
    )
    clip_low: float | None = setting(
        None, "lower clip bound 1 - clip_low; default: 0.2 (gspo 3e-4, cispo none)"
    )
    clip_high: float | None = setting(
        None, "upper clip bound 1 + clip_high; default: 0.2 (gspo 4e-4, cispo 4)"
    )
    dual_clip: float = setting(
        0.0, "bound of the loss for negative advantages, such as 3; 0: none", ge=0
    )
    old_logprobs: str = setting(
        "policy",
        "denominator of the ratio; policy: recomputed by the trainer; rollout: the engine's",
        choices=("policy", "rollout"),
    )
    kl_coef: float = setting(0.0, "KL to the reference, the initial model", ge=0, limit=1000)
    kl_estimator: str = setting("k3", "KL estimator", choices=("k2", "k3"))
    entropy_coef: float = setting(0.0, "entropy bonus", ge=0, limit=1000)
    importance_sampling: ImportanceSamplingConfig = field(default_factory=ImportanceSamplingConfig)

    @property
    def uses_rewards(self) -> bool:
        """Whether the advantages of the rewards matter: not in supervised training."""
        return self.type not in ("nll", "distill")


@dataclass
class OptimizerConfig:
    lr: float = setting(1e-6, "learning rate", ge=0, limit=1)
    schedule: str = setting(
        "constant",
        "learning rate after the warm-up",
        choices=("constant", "linear", "cosine"),
    )
    warmup_steps: int = setting(0, "optimizer steps of linear warm-up", ge=0)
    min_lr: float = setting(0.0, "learning rate one step after the last", ge=0, limit=1)
    betas: list[float] = setting(factory=lambda: [0.9, 0.95], meaning="Adam's betas")
    eps: float = setting(1e-8, "Adam's epsilon", gt=0, limit=1)
    weight_decay: float = setting(0.0, "decoupled weight decay", ge=0, limit=10)
    clip_grad: float = setting(1.0, "gradient-norm clipping; 0: none", ge=0)
    cpu_offload_fraction: float = setting(
        0.0, "fraction of Adam's state and update on the CPU", ge=0, le=1
    )


@dataclass
class WarmStartConfig:
    """Supervised training on demonstrations, before the first training step."""

    data: str | None = setting(
        None,
        "conversations with columns messages and tools: JSONL, Parquet or hf:PLACE; default: the"
        " environment's demonstrations",
    )
    trajectories: int = setting(
        0, "demonstrations; 0: all rows of data, without data no warm start", ge=0, limit=10**6
    )
    epochs: int = setting(1, "passes over the demonstrations", ge=1)
    batch: int = setting(64, "trajectories per optimizer step", ge=1)
    lr: float = setting(1e-4, "initial learning rate, with linear decay to 0", ge=0, limit=1)

    def optimizer_steps(self, demonstrations: int) -> int:
        return self.epochs * -(-demonstrations // self.batch)


@dataclass
class TrainConfig:
    steps: int = setting(100, "training steps of rollout.prompts prompts each", ge=1)
    mini_batch_prompts: int | None = setting(
        None, "prompts per optimizer step; default: rollout.prompts", ge=1
    )
    micro_batch_tokens: int = setting(
        16384, "token budget of one forward pass per rank", ge=1, limit=1 << 30
    )
    pack_layout: str = setting(
        "trie",
        "trie: each distinct token of a prompt once; merge: linear prefixes once; flat: each step",
        choices=("trie", "merge", "flat"),
    )
    eval_every: int = setting(
        0, "training steps between evaluations; 0: before the first and after the last", ge=0
    )
    seed: int = setting(0, "seed of data order, sampling and random initialization", ge=0)
    restarts: int = setting(
        2,
        "how often the run replaces lost ranks and continues from its newest checkpoint; every "
        "newer checkpoint allows as many again",
        ge=0,
        limit=10**6,
    )


@dataclass
class CheckpointConfig:
    every_steps: int = setting(10, "training steps between checkpoints; 0: no such limit", ge=0)
    every_minutes: float = setting(
        15.0, "minutes between checkpoints, at the end of a training step; 0: no such limit", ge=0
    )
    keep: int = setting(2, "checkpoints kept; older ones are removed", ge=1)
    asynchronous: bool = setting(False, "write in the background while training continues")


@dataclass
class RunConfig:
    dir: str = setting("runs", "parent folder of run directories")
    name: str | None = setting(None, "name of the run directory; default: config name and time")
    resume: str = setting(
        "auto",
        "auto: continue the run directory's newest checkpoint; never; or a checkpoint folder",
    )
    rollouts_every: int = setting(
        0, "training steps between rollout files, with routing; 0: none", ge=0
    )
    report_prompts: int = setting(
        4, "prompts of the newest training step whose trajectories the report shows; 0: none", ge=0
    )
    wandb: str = setting(
        "offline",
        "offline: files in the run directory; online: uploaded",
        choices=("online", "offline", "disabled"),
    )
    wandb_project: str = setting("megastep", "wandb project")
    wandb_entity: str | None = setting(None, "wandb user or team; default: that of the API key")
    wandb_id: str | None = setting(
        None, "wandb run id; default: a new one, stored in the run directory"
    )
    tensorboard: bool = setting(False, "write TensorBoard event files (package tensorboard)")


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    # `async` in files and on the command line: Python reserves the word.
    asynchronous: AsyncConfig = field(default_factory=AsyncConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    routing_replay: RoutingReplayConfig = field(default_factory=RoutingReplayConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    filters: FiltersConfig = field(default_factory=FiltersConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def has_agent(self) -> bool:
        """Whether episodes are run by an agent program, not by an environment."""
        return self.agent.function is not None or self.agent.command is not None

    @property
    def data_ranks(self) -> int:
        """Data-parallel size."""
        parallel = self.policy.parallel
        return self.policy.ranks // (parallel.tensor * parallel.pipeline * parallel.context)

    @property
    def budget_tokens(self) -> int:
        """Token budget of a micro-batch, over its context-parallel ranks."""
        return self.train.micro_batch_tokens * self.policy.parallel.context

    @property
    def policy_loss(self) -> LossConfig:
        """The loss with default clip bounds and importance_sampling.mode=auto resolved."""
        loss = self.loss
        low, high = CLIP_BOUNDS.get(loss.type, (None, None))
        sampling = loss.importance_sampling
        if sampling.mode == "auto":
            is_stale = self.asynchronous.max_staleness > 0 and loss.old_logprobs == "policy"
            sampling = replace(sampling, mode="truncate" if is_stale else "none")
        return replace(
            loss,
            clip_low=low if loss.clip_low is None else loss.clip_low,
            clip_high=high if loss.clip_high is None else loss.clip_high,
            importance_sampling=sampling,
        )

    @property
    def mini_batch_prompts(self) -> int:
        return self.train.mini_batch_prompts or self.rollout.prompts

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run; filters that drop groups can only lower the number."""
        return self.train.steps * -(-self.rollout.prompts // self.mini_batch_prompts)

    def context_tokens(self, arch: Architecture) -> int:
        """Prompt and response tokens of one model call."""
        return self.engine.max_model_len or arch.max_positions

    def prompt_tokens(self, arch: Architecture) -> int:
        """Largest prompt of one model call."""
        if self.rollout.max_prompt_tokens is not None:
            return self.rollout.max_prompt_tokens
        return self.context_tokens(arch) - self.rollout.max_response_tokens


# ---------------------------------------------------------------- the schema as a table

_FIELD, _SECTION = "asynchronous", "async"


def written(key: str) -> str:
    """A key as users write it: asynchronous.on_stale → async.on_stale."""
    first, dot, rest = key.partition(".")
    return f"{_SECTION}{dot}{rest}" if first == _FIELD else key


def stored(key: str) -> str:
    """The inverse of `written`."""
    first, dot, rest = key.partition(".")
    return f"{_FIELD}{dot}{rest}" if first == _SECTION else key


@cache
def sections() -> dict[str, type]:
    """Section → its dataclass; nested sections such as policy.parallel included."""
    return {key: kind for key, kind, _ in _walk(Config, "") if is_section(kind)}


@cache
def settings() -> dict[str, Field]:
    """Key → its field, without sections."""
    return {key: found for key, kind, found in _walk(Config, "") if not is_section(kind)}


@cache
def open_keys() -> list[str]:
    """Keys that hold mappings of any content, such as env.options."""
    return [key for key, found in settings().items() if get_origin(found.type) is dict]


def _walk(schema: Any, prefix: str) -> Iterator[tuple[str, Any, Field]]:
    for found in fields(schema):
        key = f"{prefix}{found.name}"
        yield key, found.type, found
        if is_section(found.type):
            yield from _walk(found.type, f"{key}.")


def is_section(kind: Any) -> bool:
    return is_dataclass(kind)


def default_of(found: Field) -> Any:
    return found.default if found.default_factory is MISSING else found.default_factory()


def type_name(found: Field) -> str:
    name = found.type.__name__ if isinstance(found.type, type) else str(found.type)
    return name.replace("typing.", "")


def value_of(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
