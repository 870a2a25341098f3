"""Every check of a configuration, in one call each.

    validate            all commands: values, the model, parallelism, placement, this machine
    training_problems   `train` alone: what rollouts and evaluations allow and training does not
    training_warnings   accepted, but rarely intended

Constraints of single fields are in schema.py. Each problem is one line: key = value: what is right.
"""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megastep import redaction
from megastep.config import megatron
from megastep.config.schema import (
    FLOAT_LIMIT,
    FP8_RECIPES,
    GPU_BACKENDS,
    INT_LIMIT,
    RANKS_TIMEOUT_S,
    AdvantageConfig,
    Config,
    EngineConfig,
    LossConfig,
    ParallelConfig,
    PolicyConfig,
    estimator_problem,
    open_keys,
    settings,
    value_of,
    written,
)
from megastep.errors import ArchitectureError
from megastep.models.architecture import VOCAB_MULTIPLE, Architecture, read_architecture
from megastep.text import shown

_RAY_STORE_MB = 75
_LEAST_TEMPERATURE = 0.01
_MAX_TEXT = 4096  # characters: the longest path
_MAX_NAME = 200  # bytes: file systems allow 255, and suffixes follow
_TRITON_HEAD_DIM = 128  # at most: the blocks of more do not fit into a GPU's shared memory
SET_BY_ENDPOINT = (
    "OPENAI_BASE_URL",
    "OPENAI_API_KEY",
    "ANTHROPIC_BASE_URL",
    "ANTHROPIC_API_KEY",
)
_RECOMPUTED = ("full", "core_attn", "mlp", "moe", "moe_act", "layernorm")


def validate(
    config: Config, has_cuda: bool | None = None, model_as_written: Any = None
) -> list[str]:
    """Every problem, one line each; empty if there is none.

    has_cuda: for a machine other than this one.
    model_as_written: model.path before it was resolved against the config's folder.
    """
    problems = _Problems(has_cuda)
    _check_limits(config, problems)
    _check_texts(config, problems)
    _check_estimator(config.advantage, problems)
    _check_fields(config, problems)
    _check_rollout(config, problems)
    _check_agent(config, problems)
    _check_attention(config.policy, problems)
    _check_recomputation(config.policy, problems)
    _check_megatron(config, problems)
    _check_fp8(config, problems)
    _check_optimizer(config, problems)
    _check_loss(config.loss, problems)
    _check_run(config, problems)
    _check_cluster(config, problems)
    _check_sync(config, problems)
    try:
        arch = read_architecture(config.model.path)
    except ArchitectureError as error:
        if "model.path" not in problems.rejected:
            hint = _download_hint(config.model.path, model_as_written)
            problems.lines.append(f"model.path: {error}{hint}")
    else:
        _check_model(config, arch, problems)
        _check_teacher(config, arch, problems)
        _check_engine(config.engine, arch, problems)
    _check_parallelism(config, problems)
    _check_placement(config, problems)
    return problems.lines


class _Problems:
    def __init__(self, has_cuda: bool | None = None):
        self.lines: list[str] = []
        self.rejected: set[str] = set()  # keys whose value is meaningless: further checks mislead
        self.of_this_machine = has_cuda is None
        self._has_cuda = has_cuda

    def reject(self, key: str, value: Any, right: str) -> None:
        self.check(False, key, value, right)
        self.rejected.add(key)

    def need_cuda(self, key: str, value: Any, right: str) -> None:
        if self._has_cuda is None:
            import torch  # late: only this check needs it

            self._has_cuda = torch.cuda.is_available()
        self.check(self._has_cuda, key, value, right)

    def check(self, ok: bool, key: str, value: Any, right: str) -> None:
        if not ok and key not in self.rejected:
            self.lines.append(f"{written(key)} = {shown(value)}: {right}")


# ---------------------------------------------------------------- single fields


def _check_limits(config: Config, problems: _Problems) -> None:
    """Finite numbers, not larger than any that makes sense."""
    for key, found in settings().items():
        value = value_of(config, key)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            by_type = INT_LIMIT if isinstance(number, int) else FLOAT_LIMIT
            limit = found.metadata["limit"] or by_type
            if not math.isfinite(number):
                problems.reject(key, value, "must be a finite number")
                break
            if number > limit:
                problems.reject(key, value, f"must be {limit:.0f} or less")
                break


def _check_texts(config: Config, problems: _Problems) -> None:
    for key in settings():
        if key in open_keys():
            continue
        for text in texts(value_of(config, key)):
            if not text.isprintable() or len(text) > _MAX_TEXT:
                problems.reject(
                    key, text, f"must be printable text of at most {_MAX_TEXT} characters"
                )
    for key in ("model.path", "run.dir"):
        value = value_of(config, key)
        problems.check(value.strip() != "", key, repr(value), "must not be empty")
    name = config.run.name
    if name is not None:
        problems.check(
            _is_folder_name(name),
            "run.name",
            repr(name),
            "must be the name of one folder, "
            f"without / or \\, not .. and of at most {_MAX_NAME} bytes; run.dir is its parent",
        )


def _is_folder_name(name: str) -> bool:
    if name.strip() != name or name in ("", ".", "..") or set(name) & set("/\\"):
        return False
    return len(name.encode(errors="replace")) <= _MAX_NAME


def texts(value: Any) -> Iterator[str]:
    """Every string in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        for part in parts:
            yield from texts(part)


def _check_fields(config: Config, problems: _Problems) -> None:
    """The constraints next to the fields in schema.py."""
    for key, found in settings().items():
        value = value_of(config, key)
        choices = found.metadata["choices"]
        if choices is not None and value is not None:
            problems.check(value in choices, key, value, f"must be one of {', '.join(choices)}")
        bounds = found.metadata["bounds"]
        if value is not None and any(bound is not None for bound in bounds.values()):
            problems.check(is_within(value, **bounds), key, value, bounds_text(**bounds))


def _check_estimator(advantage: AdvantageConfig, problems: _Problems) -> None:
    """Before the list of choices: estimators of other trainers are rejected with a reason."""
    wrong = estimator_problem(advantage.estimator)
    if wrong is not None:
        problems.reject("advantage.estimator", advantage.estimator, wrong)


def is_within(value: float, ge=None, gt=None, le=None, lt=None) -> bool:
    return (
        (ge is None or value >= ge)
        and (gt is None or value > gt)
        and (le is None or value <= le)
        and (lt is None or value < lt)
    )


def bounds_text(ge=None, gt=None, le=None, lt=None) -> str:
    if ge is not None and le is not None:
        return f"must lie in {ge} to {le}"
    if gt is not None and le is not None:
        return f"must lie in ({gt}, {le}]"
    if gt is not None and lt is not None:
        return f"must lie between {gt} and {lt}"
    if gt is not None:
        return f"must be more than {gt}"
    return "must not be negative" if ge == 0 else f"must be {ge} or more"


# ---------------------------------------------------------------- sections


def _check_rollout(config: Config, problems: _Problems) -> None:
    for key in ("rollout.temperature", "eval.temperature"):
        temperature = value_of(config, key)
        problems.check(
            temperature <= 0 or temperature >= _LEAST_TEMPERATURE,
            key,
            temperature,
            f"must be 0 (greedy), or {_LEAST_TEMPERATURE} or more: vLLM samples with no less",
        )
    response = config.rollout.max_response_tokens
    problems.check(
        response >= 2,
        "rollout.max_response_tokens",
        response,
        "must be 2 or more: one sampled token and the end of the turn",
    )


def _check_agent(config: Config, problems: _Problems) -> None:
    agent = config.agent
    if not config.has_agent:
        return
    problems.check(
        config.env.name is None,
        "env.name",
        config.env.name,
        "an agent takes the place of the environment; remove one of the two",
    )
    problems.check(
        agent.function is None or agent.command is None,
        "agent.command",
        agent.command,
        "agent.function is given too; remove one of the two",
    )
    problems.check(
        agent.function is None or _is_function(agent.function),
        "agent.function",
        agent.function,
        "is not of the form module:function",
    )
    problems.check(
        agent.command is None or (len(agent.command) > 0 and agent.command[0].strip() != ""),
        "agent.command",
        agent.command,
        "must begin with a program",
    )
    for name in agent.environment:
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
            problems.check(False, "agent.environment", name, "is not the name of a variable")
        elif name in SET_BY_ENDPOINT:
            problems.check(False, "agent.environment", name, "is set by the endpoint")
        else:
            problems.check(name in os.environ, "agent.environment", name, "is not set")


def _is_function(name: str) -> bool:
    module, _, function = name.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), function))


def _check_recomputation(policy: PolicyConfig, problems: _Problems) -> None:
    recompute = policy.recompute
    offloaded = policy.activation_offload_layers
    problems.check(
        set(recompute) <= set(_RECOMPUTED),
        "policy.recompute",
        recompute,
        f"must be a list of {', '.join(_RECOMPUTED)}",
    )
    problems.check(
        "full" not in recompute or len(recompute) == 1,
        "policy.recompute",
        recompute,
        "full already covers everything; write [full]",
    )
    for module in {"moe_act", "layernorm"} & set(recompute):
        problems.need_cuda(
            "policy.recompute",
            recompute,
            f"{module} needs Transformer Engine's layers, and there is no GPU here",
        )
    if offloaded == 0:
        return
    key = "policy.activation_offload_layers"
    problems.need_cuda(
        key, offloaded, "needs Transformer Engine, and there is no GPU here; must be 0"
    )
    problems.check(
        not recompute, key, offloaded, "cannot be combined with policy.recompute; choose one"
    )
    problems.check(
        policy.parallel.pipeline == 1,
        key,
        offloaded,
        "Megatron offloads activations without pipeline parallelism only",
    )


def _check_megatron(config: Config, problems: _Problems) -> None:
    """Names that break an invariant; the installed Megatron is asked by megatron_settings.py."""
    policy = config.policy
    for name, value in policy.megatron.items():
        key = f"policy.megatron.{name}"
        if name in megatron.REJECTED:
            problems.reject(key, value, f"not accepted: {megatron.REJECTED[name]}")
        if name == "moe_router_fusion" and value and config.routing_replay.enabled:
            problems.reject(
                key,
                value,
                "a fused router selects its experts without asking for the recorded ones; needs "
                "routing_replay.enabled=false",
            )
        if name in megatron.NEEDS_CUDA and value:
            problems.need_cuda(key, value, "there is no GPU here; leave it out")
        problems.check(
            policy.fp8 is not None or not name.startswith("fp8_"), key, value, "needs policy.fp8"
        )
    if policy.megatron.get("moe_token_dispatcher_type") == "flex":
        key = "policy.megatron.moe_token_dispatcher_type"
        problems.need_cuda(key, "flex", "needs DeepEP or HybridEP, and there is no GPU here")
        ranks = policy.parallel.expert * policy.parallel.expert_tensor_size
        problems.check(ranks > 1, key, "flex", "needs policy.parallel.expert > 1")


def _check_fp8(config: Config, problems: _Problems) -> None:
    policy = config.policy
    if policy.fp8 in FP8_RECIPES:
        problems.need_cuda(
            "policy.fp8", policy.fp8, "needs Transformer Engine, and there is no GPU here"
        )
        problems.check(
            policy.precision == "bf16", "policy.fp8", policy.fp8, "needs policy.precision=bf16"
        )
        problems.check(
            policy.parallel.context == 1,
            "policy.fp8",
            policy.fp8,
            "needs policy.parallel.context = 1: shards of sequences are not whole FP8 blocks",
        )
    if config.engine.quantization == "fp8":
        problems.need_cuda(
            "engine.quantization", "fp8", "needs vLLM's GPU kernels, and there is no GPU here"
        )


def _check_attention(policy: PolicyConfig, problems: _Problems) -> None:
    if policy.attention == "auto":
        return
    problems.need_cuda(
        "policy.attention",
        policy.attention,
        "chooses a kernel for CUDA, and there is no GPU here; must be auto",
    )
    problems.check(
        policy.parallel.context == 1,
        "policy.attention",
        policy.attention,
        "context parallelism needs Transformer Engine's attention; must be auto",
    )


def _check_optimizer(config: Config, problems: _Problems) -> None:
    optimizer = config.optimizer
    betas = optimizer.betas
    problems.check(
        len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        "optimizer.betas",
        betas,
        "must be two numbers of [0, 1)",
    )
    mini_batch = config.train.mini_batch_prompts
    if mini_batch is None or mini_batch >= 1:
        problems.check(
            optimizer.warmup_steps < max(config.optimizer_steps, 1),
            "optimizer.warmup_steps",
            optimizer.warmup_steps,
            f"must be less than the {config.optimizer_steps} optimizer steps",
        )
    problems.check(
        not optimizer.min_lr > optimizer.lr,
        "optimizer.min_lr",
        optimizer.min_lr,
        f"must not exceed optimizer.lr = {optimizer.lr}",
    )
    fraction = optimizer.cpu_offload_fraction
    if fraction == 0:
        return
    key = "optimizer.cpu_offload_fraction"
    problems.need_cuda(key, fraction, "there is no GPU here to offload from; must be 0")
    # Megatron-Core 0.16's hybrid optimizer, when it loads, looks for fp32 copies of fp32 weights.
    problems.check(
        config.policy.precision == "bf16",
        key,
        fraction,
        "Megatron could not load its checkpoints; needs policy.precision=bf16",
    )


def _check_loss(loss: LossConfig, problems: _Problems) -> None:
    if loss.clip_low is not None:
        problems.check(
            0 <= loss.clip_low <= 1,
            "loss.clip_low",
            loss.clip_low,
            "must lie in 0 to 1: a ratio is not negative, 1 is no lower bound",
        )
    if loss.clip_high is not None:
        problems.check(
            loss.clip_high >= 0, "loss.clip_high", loss.clip_high, "must not be negative"
        )
    problems.check(
        loss.dual_clip == 0 or loss.dual_clip > 1,
        "loss.dual_clip",
        loss.dual_clip,
        "must be more than 1, or 0 for none",
    )
    sampling = loss.importance_sampling
    problems.check(
        not sampling.low >= sampling.high,
        "loss.importance_sampling.low",
        sampling.low,
        f"must be less than loss.importance_sampling.high = {sampling.high}",
    )
    problems.check(
        sampling.mode in ("auto", "none") or loss.old_logprobs == "policy",
        "loss.importance_sampling.mode",
        sampling.mode,
        "compares with the trainer's logprobs; needs loss.old_logprobs = policy",
    )


def _check_run(config: Config, problems: _Problems) -> None:
    for key, value, name in redaction.unset_variables(config.env.options):
        problems.check(
            False, f"env.options.{key}", value, f"the environment variable {name} is not set"
        )
    for key in redaction.hidden_keys(asdict(config)):
        problems.check(
            False,
            key,
            redaction.HIDDEN,
            "a secret was removed when this file was written; give it, in env.options best as "
            "${env:NAME}",
        )
    wandb_id = config.run.wandb_id
    problems.check(
        wandb_id is None or re.fullmatch(r"[\w.-]{1,64}", wandb_id) is not None,
        "run.wandb_id",
        wandb_id,
        "must be 1 to 64 letters, digits, or any of _ . -",
    )
    problems.check(
        not config.run.tensorboard or find_spec("tensorboard") is not None,
        "run.tensorboard",
        True,
        "needs the package tensorboard, and it is not installed: pip install tensorboard",
    )


def _check_cluster(config: Config, problems: _Problems) -> None:
    cluster = config.cluster
    if cluster.address is not None:
        wrong = address_problem(cluster.address)
        problems.check(wrong is None, "cluster.address", cluster.address, wrong or "")
    problems.check(
        cluster.cpus_per_process >= 1e-4,
        "cluster.cpus_per_process",
        cluster.cpus_per_process,
        "must be more than 0, and Ray counts in steps of 0.0001",
    )
    problems.check(
        cluster.object_store_mb >= _RAY_STORE_MB,
        "cluster.object_store_mb",
        cluster.object_store_mb,
        f"must be {_RAY_STORE_MB} or more: Ray starts with no less",
    )
    if cluster.address or os.environ.get("RAY_ADDRESS"):
        return  # the resources of other machines are unknown here
    if config.sync.backend in GPU_BACKENDS:
        problems.need_cuda(
            "sync.backend", config.sync.backend, "there is no GPU here; use shm, or auto"
        )
    if problems.of_this_machine:
        _check_memory(config, problems)


def _check_sync(config: Config, problems: _Problems) -> None:
    """The ranks wait for rank 0 while it waits for engines (sync/engines.py)."""
    waits_s = config.sync.timeout_s + 2 * config.engine.health_timeout_s  # until after an abort
    if not math.isfinite(waits_s):
        return  # reported already
    problems.check(
        waits_s < RANKS_TIMEOUT_S,
        "sync.timeout_s",
        config.sync.timeout_s,
        f"with two of engine.health_timeout_s = {config.engine.health_timeout_s:g} it must be less "
        f"than the {RANKS_TIMEOUT_S} s that ranks wait for each other",
    )


def _check_memory(config: Config, problems: _Problems) -> None:
    memory = machine_memory()
    problems.check(
        config.cluster.object_store_mb << 20 <= memory,
        "cluster.object_store_mb",
        config.cluster.object_store_mb,
        f"this machine has {memory >> 20} MB of memory",
    )
    problems.check(
        config.engine.cpu_kv_gb * 2**30 <= memory,
        "engine.cpu_kv_gb",
        config.engine.cpu_kv_gb,
        f"this machine has {memory >> 30} GB of memory",
    )


def machine_memory() -> int:
    """Bytes of memory of this machine, or of its container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        return min(total, int(text))
    return total


def address_problem(address: str) -> str | None:
    """Why `ray.init` would not accept the address of a cluster."""
    if address in ("auto", "local"):
        return None
    if "://" in address:
        return (
            "Ray's client and HTTP addresses are not supported; give HOST:PORT of the head, "
            "such as 10.0.0.7:6379"
        )
    host, _, port = address.rpartition(":")
    is_host = re.fullmatch(r"[\w.-]+|\[[0-9A-Fa-f:.]+\]", host)
    if not is_host or not re.fullmatch(r"[0-9]{1,5}", port):
        return "must be HOST:PORT of the head, such as 10.0.0.7:6379, or auto"
    return None if 1 <= int(port) <= 65535 else "its port must be from 1 to 65535"


# ---------------------------------------------------------------- the model


def _download_hint(folder: str, as_written: Any) -> str:
    if not os.path.isdir(folder) and Path(folder).name == "smollm2-135m":
        return f"; write it with tools/get_model.py smollm2-135m {folder}"
    name = as_written if isinstance(as_written, str) else folder
    is_hub_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name)
    if os.path.isdir(folder) or not is_hub_name:
        return ""
    local = f"models/{name.rpartition('/')[2]}"
    fetch = f"`hf download {name} --local-dir {local}`, then model.path={local}"
    return f". If it is a name on the Hugging Face hub: {fetch}"


def _check_model(config: Config, arch: Architecture, problems: _Problems) -> None:
    parallel = config.policy.parallel
    _check_tensor_shards(parallel, arch, "model", problems)
    if parallel.tensor >= 1:
        problems.check(
            VOCAB_MULTIPLE % parallel.tensor == 0,
            "policy.parallel.tensor",
            parallel.tensor,
            f"must divide {VOCAB_MULTIPLE}, the multiple that the vocabulary is padded to",
        )
    _check_experts(parallel, arch, "model", problems)
    _check_stages(parallel, arch, "model", problems)
    for name, value in config.policy.megatron.items():
        problems.check(
            arch.experts is not None or not name.startswith("moe_"),
            f"policy.megatron.{name}",
            value,
            "the model has no experts; leave it out",
        )
    _check_head_dim(config.policy, arch, "model", problems)
    offloaded = config.policy.activation_offload_layers
    problems.check(
        offloaded < arch.layers,
        "policy.activation_offload_layers",
        offloaded,
        f"must be less than the model's {arch.layers} layers",
    )
    _check_context(config, arch, problems)


def _check_tensor_shards(
    parallel: ParallelConfig, arch: Architecture, whose: str, problems: _Problems
) -> None:
    if parallel.tensor < 1:
        return
    divided = {
        "attention heads": arch.heads,
        "key/value heads": arch.kv_heads,
        "feed-forward width": arch.ffn_hidden,
    }
    for what, size in divided.items():
        problems.check(
            size % parallel.tensor == 0,
            "policy.parallel.tensor",
            parallel.tensor,
            f"does not divide the {whose}'s {size} {what}; {_divisors(size)} would",
        )


def _check_head_dim(
    policy: PolicyConfig, arch: Architecture, whose: str, problems: _Problems
) -> None:
    problems.check(
        policy.attention != "triton" or arch.head_dim <= _TRITON_HEAD_DIM,
        "policy.attention",
        policy.attention,
        f"has heads of at most {_TRITON_HEAD_DIM} dimensions, and the {whose}'s have "
        f"{arch.head_dim}; use flex, or auto",
    )


def _check_teacher(config: Config, arch: Architecture, problems: _Problems) -> None:
    """The teacher has the policy's parallel layout."""
    loss = config.loss
    if loss.type != "distill":
        problems.check(
            loss.teacher is None,
            "loss.teacher",
            loss.teacher,
            f"loss.type = {loss.type} has no teacher; did you mean loss.type = distill?",
        )
        return
    if loss.teacher is None:
        problems.lines.append("loss.teacher: must be given for loss.type = distill")
        return
    try:
        teacher = read_architecture(loss.teacher)
    except ArchitectureError as error:
        problems.lines.append(f"loss.teacher: {error}")
        return
    problems.check(
        teacher.vocab == arch.vocab,
        "loss.teacher",
        loss.teacher,
        f"has a vocabulary of {teacher.vocab}, the model one of {arch.vocab}; they must be equal",
    )
    _check_tensor_shards(config.policy.parallel, teacher, "teacher", problems)
    _check_stages(config.policy.parallel, teacher, "teacher", problems)
    _check_head_dim(config.policy, teacher, "teacher", problems)
    if teacher.experts is not None:
        _check_experts(config.policy.parallel, teacher, "teacher", problems)
    context = config.context_tokens(arch)
    problems.check(
        teacher.max_positions >= context,
        "loss.teacher",
        loss.teacher,
        f"has {teacher.max_positions} positions, a model call up to {context} tokens",
    )


def _check_stages(
    parallel: ParallelConfig, arch: Architecture, whose: str, problems: _Problems
) -> None:
    stages = parallel.pipeline * parallel.virtual
    counts = parallel.layers_per_stage
    if counts is None:
        if stages >= 1:
            problems.check(
                arch.layers % stages == 0,
                "policy.parallel.pipeline",
                parallel.pipeline,
                f"pipeline × virtual = {stages} does not divide the {whose}'s {arch.layers} "
                "layers; choose another or give policy.parallel.layers_per_stage",
            )
        return
    key = "policy.parallel.layers_per_stage"
    problems.check(
        len(counts) == stages, key, counts, f"needs pipeline × virtual = {stages} numbers"
    )
    problems.check(
        sum(counts) == arch.layers,
        key,
        counts,
        f"adds up to {sum(counts)}, the {whose} has {arch.layers} layers",
    )
    problems.check(min(counts, default=0) >= 1, key, counts, "each stage needs a layer")


def _check_experts(
    parallel: ParallelConfig, arch: Architecture, whose: str, problems: _Problems
) -> None:
    if arch.experts is None:
        problems.check(
            parallel.expert == 1,
            "policy.parallel.expert",
            parallel.expert,
            "the model has no experts; must be 1",
        )
        problems.check(
            parallel.expert_tensor is None,
            "policy.parallel.expert_tensor",
            parallel.expert_tensor,
            "the model has no experts; leave it out",
        )
        return
    count = arch.experts.count
    if parallel.expert >= 1:
        problems.check(
            count % parallel.expert == 0,
            "policy.parallel.expert",
            parallel.expert,
            f"does not divide the {whose}'s {count} experts; {_divisors(count)} would",
        )
    inside = parallel.expert_tensor_size
    if inside >= 1:
        problems.check(
            arch.experts.hidden % inside == 0,
            "policy.parallel.expert_tensor",
            inside,
            f"does not divide the experts' width {arch.experts.hidden}",
        )
    # Megatron-Core 0.16 sums expert gradients over the ranks of dense layers unless expert > 1:
    # with another split the replicas of an expert would diverge.
    problems.check(
        parallel.expert > 1 or inside == parallel.tensor,
        "policy.parallel.expert_tensor",
        inside,
        f"must be the tensor size {parallel.tensor} while policy.parallel.expert = 1",
    )


def _check_context(config: Config, arch: Architecture, problems: _Problems) -> None:
    rollout = config.rollout
    context = config.context_tokens(arch)
    source = (
        "engine.max_model_len is" if config.engine.max_model_len else "the model's positions are"
    )
    room = context - rollout.max_response_tokens
    problems.check(
        room >= 1,
        "rollout.max_response_tokens",
        rollout.max_response_tokens,
        f"{source} {context}, and a prompt needs one",
    )
    problems.check(
        room < 1 or config.prompt_tokens(arch) <= room,
        "rollout.max_prompt_tokens",
        rollout.max_prompt_tokens,
        f"{source} {context}, of which a response may take {rollout.max_response_tokens}; "
        f"must be {room} or less",
    )
    longest = min(config.prompt_tokens(arch), room) + rollout.max_response_tokens
    problems.check(
        config.budget_tokens >= longest,
        "train.micro_batch_tokens",
        config.train.micro_batch_tokens,
        f"must hold the longest model call, {longest} tokens",
    )


def _check_engine(engine: EngineConfig, arch: Architecture, problems: _Problems) -> None:
    if engine.max_model_len is not None:
        problems.check(
            2 <= engine.max_model_len <= arch.max_positions,
            "engine.max_model_len",
            engine.max_model_len,
            f"must be from 2 to the model's {arch.max_positions} positions",
        )
    if engine.tensor_parallel >= 1:
        problems.check(
            arch.heads % engine.tensor_parallel == 0,
            "engine.tensor_parallel",
            engine.tensor_parallel,
            f"does not divide the model's {arch.heads} attention heads; "
            f"{_divisors(arch.heads)} would",
        )


def _divisors(n: int) -> str:
    found = [d for d in range(1, min(n, 64) + 1) if n % d == 0]
    return ", ".join(map(str, found))


# ---------------------------------------------------------------- processes


def _check_parallelism(config: Config, problems: _Problems) -> None:
    parallel = config.policy.parallel
    ranks = config.policy.ranks
    expert_tensor = parallel.expert_tensor_size
    sizes = (parallel.tensor, parallel.pipeline, parallel.virtual, parallel.context)
    if min(*sizes, parallel.expert, expert_tensor, ranks) < 1:
        return  # reported already
    dense = parallel.tensor * parallel.pipeline * parallel.context
    expert = parallel.expert * expert_tensor * parallel.pipeline
    problems.check(
        ranks % dense == 0,
        "policy.ranks",
        ranks,
        f"must be a multiple of tensor × pipeline × context = {dense}",
    )
    problems.check(
        ranks % expert == 0,
        "policy.ranks",
        ranks,
        f"must be a multiple of expert × expert_tensor × pipeline = {expert}",
    )
    problems.check(
        parallel.virtual == 1 or parallel.pipeline > 1,
        "policy.parallel.virtual",
        parallel.virtual,
        "needs policy.parallel.pipeline > 1",
    )
    if parallel.context > 1:
        problems.check(
            config.train.pack_layout != "trie",
            "policy.parallel.context",
            parallel.context,
            "needs sequences that do not branch: train.pack_layout = merge or flat",
        )
        problems.need_cuda(
            "policy.parallel.context",
            parallel.context,
            "needs Transformer Engine's attention, and there is no GPU here; must be 1",
        )


def _check_placement(config: Config, problems: _Problems) -> None:
    _check_staleness(config, problems)
    backend = config.sync.backend
    if not config.cluster.colocate:
        problems.check(
            backend != "ipc",
            "sync.backend",
            backend,
            "shares memory of one GPU; needs cluster.colocate=true",
        )
        return
    problems.check(
        backend != "nccl",
        "sync.backend",
        backend,
        "needs a GPU on each side; with cluster.colocate=true use ipc",
    )
    needed = config.engine.num_engines * config.engine.tensor_parallel
    problems.check(
        needed <= config.policy.ranks,
        "engine.num_engines",
        config.engine.num_engines,
        f"engines need num_engines × tensor_parallel = {needed} places, cluster.colocate=true "
        f"offers them the {config.policy.ranks} of the policy's ranks",
    )


def _check_staleness(config: Config, problems: _Problems) -> None:
    key = "asynchronous.max_staleness"
    staleness = config.asynchronous.max_staleness
    problems.check(
        staleness <= 0 or 1 <= staleness * config.rollout.prompts < math.inf,
        key,
        staleness,
        f"must be 0, or enough for one of the {config.rollout.prompts} prompts of a batch",
    )
    has_no_ratio = config.loss.type == "reinforce" and config.loss.old_logprobs == "rollout"
    problems.check(
        staleness == 0 or not has_no_ratio,
        key,
        staleness,
        "loss.type = reinforce has no ratio that would correct for stale weights; needs "
        "loss.old_logprobs = policy",
    )
    problems.check(
        staleness == 0 or not config.cluster.colocate,
        key,
        staleness,
        "colocated engines cannot generate while the policy trains; needs cluster.colocate=false",
    )


# ---------------------------------------------------------------- training


def training_problems(config: Config) -> list[str]:
    """What rollouts and evaluations allow and training does not."""
    problems = _Problems()
    rollout = config.rollout
    reason = "training needs logprobs of the whole distribution that was sampled from"
    problems.check(
        rollout.temperature != 0, "rollout.temperature", 0, f"{reason}; must be more than 0"
    )
    problems.check(rollout.top_p == 1, "rollout.top_p", rollout.top_p, f"{reason}; must be 1")
    problems.check(rollout.top_k == 0, "rollout.top_k", rollout.top_k, f"{reason}; must be 0")
    return problems.lines


def group_problems(config: Config) -> list[str]:
    """Every estimator compares the trajectories of a prompt.

    gigpo also compares steps from one state, which a single trajectory may visit twice; half of its
    advantage and most of its steps would still be 0.
    """
    samples = config.rollout.samples_per_prompt
    if samples >= 2 or not config.loss.uses_rewards:
        return []
    return [
        f"rollout.samples_per_prompt = {samples}: advantage.estimator = "
        f"{config.advantage.estimator} compares the trajectories of a prompt, and one alone has "
        "advantage 0; must be 2 or more, such as 8"
    ]


def training_warnings(config: Config) -> list[str]:
    """Settings that training accepts and that are rarely intended."""
    found = []
    loss = config.loss
    if loss.type == "gspo" and loss.reduction == "token":
        found.append(
            "loss.reduction = token: loss.type = gspo has one ratio per model call, so that long "
            "calls weigh more; the paper weighs calls equally: loss.reduction = step"
        )
    if config.engine.quantization and config.policy_loss.importance_sampling.mode == "none":
        found.append(
            f"engine.quantization = {config.engine.quantization}: rollouts sample from other "
            "probabilities than the trainer's; loss.importance_sampling.mode = truncate corrects "
            "for them"
        )
    mini_batch = config.mini_batch_prompts
    batch = config.rollout.prompts
    if loss.type == "reinforce" and mini_batch < batch:
        found.append(
            f"train.mini_batch_prompts = {mini_batch}: loss.type = reinforce has no ratio, so "
            "mini-batches after the first are off-policy without a correction; use "
            f"train.mini_batch_prompts = {batch}, or loss.type = ppo_clip"
        )
    return found
