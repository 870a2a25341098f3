"""A plan as text."""

from megastep.plan.planning import ENGINE_WORK_GIB, RESERVE_GIB, Plan, Stage, gib


def text(plan: Plan) -> str:
    return "\n".join(
        [
            *_heading(plan),
            "",
            *_ranks(plan),
            "",
            *_engine(plan),
            "",
            *_batch(plan),
            "",
            *_verdict(plan),
        ]
    )


def _heading(plan: Plan) -> list[str]:
    config, arch = plan.config, plan.arch
    p, policy, engine = config.policy.parallel, config.policy, config.engine
    own = 0 if config.cluster.colocate else engine.num_engines * engine.tensor_parallel
    where = "the same GPUs" if config.cluster.colocate else f"{own} other GPUs"
    split = [
        f"{name} {size}"
        for name, size in (
            ("tensor", p.tensor),
            ("pipeline", p.pipeline),
            ("expert", p.expert),
            ("context", p.context),
        )
        if size > 1
    ] or ["no model parallelism"]
    again = f"recompute {', '.join(policy.recompute)}" if policy.recompute else "nothing recomputed"
    return [
        f"{config.model.path}: {arch.family}, {arch.layers} layers, {plan.parameters / 1e9:.1f}e9 parameters, "
        f"{policy.precision}",
        f"policy on {policy.ranks} GPUs of {gib(plan.gpu)} GiB ({', '.join(split)}, data {config.data_ranks}), "
        f"{engine.num_engines} engines × {engine.tensor_parallel} on {where}",
        f"micro-batches of {config.train.micro_batch_tokens} tokens, {again}",
    ]


def _ranks(plan: Plan) -> list[str]:
    """A column per kind of rank: stages that are alike share one."""
    kinds: list[list[Stage]] = []
    for stage in plan.stages:
        if kinds and _column(plan, kinds[-1][0]) == _column(plan, stage):
            kinds[-1].append(stage)
        else:
            kinds.append([stage])
    names = ["GiB per GPU", *(_stages(kind) for kind in kinds)]
    columns = [_column(plan, kind[0]) for kind in kinds]
    rows = [names] + [[label, *(column[label] for column in columns)] for label in columns[0]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths))
        )
        for row in rows
    ]


def _stages(kind: list[Stage]) -> str:
    first, last = kind[0].number + 1, kind[-1].number + 1
    return f"stage {first}" if first == last else f"stages {first}-{last}"


def _column(plan: Plan, stage: Stage) -> dict[str, str]:
    share = stage.share
    ends = "".join(
        f" + {what}"
        for what, has in (("embedding", share.has_embedding), ("head", share.has_head))
        if has
    )
    column = {
        "holds": f"{sum(share.layers)} layers{ends}",
        "parameters, 1e9": f"{share.parameters / 1e9:.2f}",
        "weights": gib(share.weights),
        "gradients": gib(share.gradients),
        "optimizer": gib(stage.optimizer),
        "activations, at most": gib(stage.activations),
        "  kept for backward": f"{gib(stage.kept)}",
        "  of micro-batches": f"{stage.in_flight:g}",
        "  work of one layer": gib(stage.in_layer),
        "  or logits and head": gib(stage.in_head),
        "reserve": gib(plan.training(stage) - stage.policy),
        "training, in all": gib(plan.training(stage)),
    }
    if plan.config.cluster.colocate:
        column["rollout, in all"] = gib(plan.rolling_out(stage))
    return column | {"CPU memory per rank": gib(stage.host)}


def _engine(plan: Plan) -> list[str]:
    engine = plan.engine
    calls = engine.kv_tokens / engine.context
    return [
        f"engine, GiB per GPU: {gib(engine.budget)} (engine.gpu_memory_utilization = {plan.config.engine.gpu_memory_utilization}), weights "
        f"{gib(engine.weights)}, work {ENGINE_WORK_GIB:g}, keys and values {gib(max(engine.kv_room, 0))}: "
        f"{engine.kv_tokens} tokens, {calls:.1f} calls of {engine.context}"
    ]


def _batch(plan: Plan) -> list[str]:
    rollout = plan.config.rollout
    lines = [
        f"a batch, if a trajectory has {plan.trajectory_tokens} tokens and shares none: {rollout.prompts} prompts × "
        f"{rollout.samples_per_prompt} trajectories = {plan.batch_tokens / 1e6:.1f}e6 tokens",
        f"an update of it: {plan.micro_batches} micro-batches per rank, pipeline bubble {plan.bubble:.0%}",
        f"a push of weights: {gib(plan.sync_bytes)} GiB into each engine",
    ]
    return lines + (
        [f"experts of a batch: {gib(plan.route_bytes)} GiB"] if plan.route_bytes else []
    )


def _verdict(plan: Plan) -> list[str]:
    troubles = plan.troubles()
    if troubles:
        return ["does not fit:", *(f"  {line}" for line in troubles)]
    return [
        f"fits: the policy's fullest GPU has {gib(plan.left)} GiB left, beside {RESERVE_GIB:g} in reserve"
    ]
