"""A plan as text."""

from megastep.plan.planning import ENGINE_WORK_GIB, RESERVE_GIB, Plan, Stage, gib

# Settings of policy.megatron whose memory the plan knows; 0 for most.
COUNTED = {
    "overlap_grad_reduce",
    "overlap_param_gather",
    "align_param_gather",
    "bucket_size",
    "pad_buckets_for_high_nccl_busbw",
    "gradient_accumulation_fusion",
    "disable_parameter_transpose_cache",
    "moe_token_dispatcher_type",
    "moe_deepep_num_sms",
    "deterministic_mode",
}


def text(plan: Plan) -> str:
    sections = [_heading(plan), _ranks(plan), _engine(plan), _batch(plan), _verdict(plan)]
    return "\n\n".join("\n".join(lines) for lines in sections)


def _heading(plan: Plan) -> list[str]:
    config = plan.config
    policy = config.policy
    engine = config.engine
    where = "the same GPUs"
    if not config.cluster.colocate:
        where = f"{engine.num_engines * engine.tensor_parallel} other GPUs"
    recompute = "no recomputation"
    if policy.recompute:
        recompute = f"recompute {', '.join(policy.recompute)}"
    return [
        f"{config.model.path}: {plan.arch.family}, {plan.arch.layers} layers, "
        f"{plan.parameters / 1e9:.1f}e9 parameters, {_precision(plan)}",
        f"policy on {policy.ranks} GPUs of {gib(plan.gpu_bytes)} GiB ({_parallelism(plan)}), "
        f"{engine.num_engines} engines × {engine.tensor_parallel} on {where}",
        f"micro-batches of {config.train.micro_batch_tokens} tokens, {recompute}",
        *_not_counted(plan),
    ]


def _not_counted(plan: Plan) -> list[str]:
    """Settings of Megatron whose memory, if any, is not in the plan."""
    names = [name for name in plan.config.policy.megatron if name not in COUNTED]
    return [f"policy.megatron: memory not counted: {', '.join(names)}"] if names else []


def _precision(plan: Plan) -> str:
    fp8 = plan.config.policy.fp8
    precision = plan.config.policy.precision
    return f"{precision} with FP8 ({fp8})" if fp8 else precision


def _parallelism(plan: Plan) -> str:
    p = plan.config.policy.parallel
    sizes = {"tensor": p.tensor, "pipeline": p.pipeline, "expert": p.expert, "context": p.context}
    shown = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    return ", ".join([*(shown or ["no model parallelism"]), f"data {plan.config.data_ranks}"])


def _ranks(plan: Plan) -> list[str]:
    """A column per stage; consecutive stages with equal columns share one."""
    groups: list[list[Stage]] = []
    for stage in plan.stages:
        if groups and _column(plan, groups[-1][0]) == _column(plan, stage):
            groups[-1].append(stage)
        else:
            groups.append([stage])
    columns = [_column(plan, group[0]) for group in groups]
    rows = [["GiB per GPU", *(_name(group) for group in groups)]]
    rows += [[label, *(column[label] for column in columns)] for label in columns[0]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for label, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:])]
        lines.append("  ".join([label.ljust(widths[0]), *padded]))
    return lines


def _name(stages: list[Stage]) -> str:
    first = stages[0].number + 1
    last = stages[-1].number + 1
    return f"stage {first}" if first == last else f"stages {first}-{last}"


def _column(plan: Plan, stage: Stage) -> dict[str, str]:
    states = stage.states
    holds = f"{sum(states.layers)} layers"
    if states.has_embedding:
        holds += " + embedding"
    if states.has_head:
        holds += " + head"
    further = {
        "teacher's weights": stage.teacher,
        "FP8 copies of weights": stage.fp8_copies,
        "fused gradients": stage.placeholders,
        "DeepEP": stage.dispatcher,
    }
    column = {
        "holds": holds,
        "parameters, 1e9": f"{states.parameters / 1e9:.2f}",
        "weights": gib(states.weights),
        "gradients": gib(states.gradients),
        "optimizer": gib(stage.optimizer),
        **{name: gib(size) for name, size in further.items() if size},
        "activations, peak": gib(stage.activations),
        "  kept for backward": gib(stage.kept),
        "  micro-batches in flight": f"{stage.in_flight:g}",
        "  backward of one layer": gib(stage.layer_peak),
        "  or logits and head": gib(stage.head_peak),
        "reserve": gib(plan.training_bytes(stage) - stage.policy),
        "training, total": gib(plan.training_bytes(stage)),
    }
    if plan.config.cluster.colocate:
        column["rollout, total"] = gib(plan.rollout_bytes(stage))
    column["weight sync, total"] = gib(plan.weight_sync_bytes(stage))
    column["CPU memory per rank"] = gib(stage.host)
    return column


def _engine(plan: Plan) -> list[str]:
    engine = plan.engine
    utilization = plan.config.engine.gpu_memory_utilization
    calls = engine.kv_tokens / engine.context_tokens
    return [
        f"engine, GiB per GPU: {gib(engine.budget)} "
        f"(engine.gpu_memory_utilization = {utilization}), weights {gib(engine.weights)}, "
        f"work {ENGINE_WORK_GIB:g}, KV cache {gib(max(engine.kv_cache, 0))}: "
        f"{engine.kv_tokens} tokens, {calls:.1f} calls of {engine.context_tokens}"
    ]


def _batch(plan: Plan) -> list[str]:
    rollout = plan.config.rollout
    lines = [
        f"a batch of trajectories of {plan.trajectory_tokens} tokens without shared prefixes: "
        f"{rollout.prompts} prompts × {rollout.samples_per_prompt} trajectories = "
        f"{plan.batch_tokens / 1e6:.1f}e6 tokens",
        f"an optimizer step: {plan.micro_batches} micro-batches per rank, "
        f"pipeline bubble {plan.bubble:.0%}",
        _weight_sync(plan),
        _sync_traffic(plan),
    ]
    if plan.routing_bytes:
        lines.append(f"routing of a batch: {gib(plan.routing_bytes)} GiB")
    return lines


def _weight_sync(plan: Plan) -> str:
    line = f"a weight sync: {gib(plan.sync_bytes)} GiB into each engine"
    if plan.sync.buffer:
        line += (
            f", buffers of {gib(plan.sync.buffer)} GiB (sync.bucket_mb = "
            f"{plan.config.sync.bucket_mb}, largest tensor {gib(plan.sync.largest_tensor)} GiB)"
        )
    return f"{line}; {gib(plan.sync.engine)} GiB more on its GPUs meanwhile"


def _sync_traffic(plan: Plan) -> str:
    """By the rank with the most bytes."""
    traffic = plan.sync_traffic
    return (
        f"  a rank sends at most {gib(max(traffic.sent))} GiB and receives "
        f"{gib(max(traffic.gathered))}; {traffic.seconds:.2g} s at the nominal rates of the links"
    )


def _verdict(plan: Plan) -> list[str]:
    problems = plan.problems()
    if problems:
        return ["does not fit:", *(f"  {line}" for line in problems)]
    return [
        f"fits: the policy's fullest GPU has {gib(plan.free_bytes)} GiB free, "
        f"plus {RESERVE_GIB:g} in reserve"
    ]
