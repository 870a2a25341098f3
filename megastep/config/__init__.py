"""The configuration: a typed schema, YAML files that hold only what differs, `key=value` on top.

    defaults (the dataclasses below)  ←  base: other.yaml  ←  CONFIG.yaml  ←  key=value ...

Relative paths in a file are relative to that file, those on the command line to the working directory (config/paths.py).
`load()` reads all of them and `validate()` looks at the result; both collect every problem instead of
stopping at the first, and each problem is one line: the key, the bad value, what would be right.
Nothing derived is ever written back: what follows from the values is computed where it is needed.
"""

import difflib
import math
import os
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megastep import redaction
from megastep.config import bounds, paths
from megastep.config.yaml_file import parse, read_yaml
from megastep.errors import ArchitectureError, ConfigError, YAMLFileError
from megastep.models.architecture import VOCAB_MULTIPLE, Architecture, read_architecture

GPU_BACKENDS = ("nccl", "ipc")  # of sync.backend
REQUIRED = "???"  # OmegaConf's mark for "must be given"
_ASYNC, _FIELD = (
    "async",
    "asynchronous",
)  # the section, and its field: Python keeps the word for itself
_MAX_BASES = 16


@dataclass
class ModelConfig:
    path: str = REQUIRED  # Hugging Face folder: config.json and, for init=hf, safetensors; not a name on the hub
    init: str = "hf"  # hf: weights of `path`; random: fresh weights of that shape


@dataclass
class ParallelConfig:
    tensor: int = 1  # heads and matrix columns; sequence parallelism comes with it
    pipeline: int = 1  # consecutive layers
    virtual: int = 1  # interleaved chunks of layers per pipeline rank
    layers_per_stage: list[int] | None = (
        None  # uneven stages: pipeline × virtual numbers, in order of depth
    )
    expert: int = 1  # experts
    expert_tensor: int | None = None  # matrix columns inside each expert; see expert_tensor_size
    context: int = 1  # tokens of one sequence

    @property
    def expert_tensor_size(self) -> int:
        """Unless it is given: whole experts where they are spread over ranks, else split as all layers are."""
        if self.expert_tensor is not None:
            return self.expert_tensor
        return 1 if self.expert > 1 else self.tensor


@dataclass
class PolicyConfig:
    ranks: int = 1  # processes; data parallelism is what the layout leaves over
    precision: str = "fp32"  # fp32 | bf16 (fp32 master weights)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    # Activations that backward computes again instead of keeping: [full] for whole layers, or some of Megatron's
    # modules, such as [core_attn, moe].
    recompute: list[str] = field(default_factory=list)
    activation_offload_layers: int = (
        0  # layers whose activations wait in CPU memory (Transformer Engine)
    )
    logits_chunk_rows: int = (
        1024  # tokens whose softmax is kept for backward; that of more is computed again, in chunks
    )
    # Router losses, see README: their sum depends on which tokens share a micro-batch, so they are off by default.
    moe_aux_loss_coef: float = 0.0  # coefficient of the load-balancing loss
    moe_z_loss_coef: float = 0.0  # coefficient of the z-loss


@dataclass
class DataConfig:
    train: str = "generated"  # FILE.jsonl, FILE.parquet, hf:PLACE[:SPLIT], or generated: by the environment itself
    eval: str | None = None  # the same; default: rows held out of data.train
    held_out: int = 64  # rows of data.train that training never sees, where data.eval is not given
    generated_rows: int = 4096  # of a generated data set
    shuffle: bool = True  # anew each epoch, by train.seed


@dataclass
class EnvConfig:
    # chase, guess, sql, search, skyrl, an entry point of megastep.envs, or module:Class. `plan` and `replay` need none.
    name: str | None = None
    # Keywords of that environment. ${env:NAME}: an environment variable, read when it is used and written nowhere.
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class RolloutConfig:
    mode: str = "tokens"  # tokens: append to what was sampled; chat: render history anew each turn
    template: dict[str, Any] = field(
        default_factory=dict
    )  # keywords of the chat template, such as enable_thinking
    prompts: int = 16  # per batch
    samples_per_prompt: int = 8  # trajectories per prompt
    max_turns: int = 8  # model calls of a trajectory
    max_prompt_tokens: int | None = (
        None  # of one model call; default: what a response leaves of the engine's context
    )
    max_response_tokens: int = (
        256  # of one model call, with the end-of-turn token that a cut-off one gets appended
    )
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    concurrency: int = (
        256  # episodes at a time; an evaluation beside training has as many of its own
    )
    env_timeout_s: float = 60.0  # for one step of the environment
    max_observation_chars: int = (
        200_000  # of what a step of the environment says; more is its error, nothing is cut
    )


@dataclass
class EvalConfig:
    prompts: int = 64  # the first of the held-out rows
    samples_per_prompt: int = 4  # trajectories per prompt; pass@k is reported up to this many
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0


@dataclass
class EngineConfig:
    num_engines: int = 1
    tensor_parallel: int = 1  # GPUs (on a CPU: processes) that share one engine's model
    max_model_len: int | None = (
        None  # tokens of prompt and response; default: the model's positions
    )
    max_sequences: int = 64  # answered at a time by one engine
    gpu_memory_utilization: float = 0.6  # share of each GPU's memory, for weights and KV cache
    cpu_kv_gb: int = 1  # KV cache on a machine without GPU
    start_timeout_s: int = 600
    request_timeout_s: int = 600  # a call that takes longer means that its engine hangs
    health_every_s: float = 10.0
    health_timeout_s: float = 60.0
    restarts: int = 3  # of each engine


@dataclass
class SyncConfig:
    backend: str = "auto"  # auto: shm without GPU, else ipc where colocated and nccl apart
    bucket_mb: int = 64  # weights on their way at a time; a larger tensor goes alone
    verify: bool = False  # compare checksums at both ends

    def backend_for(self, has_gpu: bool, colocate: bool) -> str:
        if self.backend != "auto":
            return self.backend
        return ("ipc" if colocate else "nccl") if has_gpu else "shm"


@dataclass
class ClusterConfig:
    address: str | None = (
        None  # of a running Ray cluster; default: $RAY_ADDRESS, else Ray is started here
    )
    colocate: bool = (
        False  # engines on the GPUs of the policy, taking turns; else on GPUs of their own
    )
    cpus_per_process: float = (
        0.25  # of Ray's count, for each rank and engine; threads are not bound to cores
    )
    object_store_mb: int = 512  # of the Ray that is started here
    timeout_s: int = 120  # to wait for resources that others use


@dataclass
class AsyncConfig:
    """Written `async` in configs. Episodes go on while training works."""

    # How many batches ahead of training prompts may begin; 0: synchronous, 0.5: half a batch. No trained token is more
    # versions old than that, rounded up; a version is a policy that the engines have had.
    max_staleness: float = 0.0
    on_stale: str = "wait"  # a group that would become too old: wait for it, or drop it
    finish_calls: bool = (
        False  # model calls end before new weights come; else they go on under the new ones
    )


@dataclass
class OptimizerConfig:
    lr: float = 1e-6
    schedule: str = "constant"  # constant | linear | cosine, after the warm-up
    warmup_steps: int = 0  # optimizer steps, the last of which has lr
    min_lr: float = 0.0  # where linear and cosine would be one step after the last
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0  # 0: no clipping
    cpu_offload_fraction: float = 0.0  # of Adam's state and work to the CPU


@dataclass
class RoutingReplayConfig:
    enabled: bool = True  # MoE layers use the experts that the rollout used
    on_conflict: str = (
        "owner"  # steps that disagree on a shared token: owner: who sampled it; split: compute both
    )
    min_agreement: float = (
        0.8  # of the live routers with the recorded experts; less is an error: routes are shifted
    )


# loss.type → (clip_low, clip_high) where the config gives none; a clip_low of 1 is no lower bound.
CLIP_BOUNDS = {
    "ppo_clip": (0.2, 0.2),  # Schulman et al. 2017
    "gspo": (
        3e-4,
        4e-4,
    ),  # Zheng et al. 2025, section 5.1: ratios of whole sequences stay much nearer to 1
    "cispo": (
        1.0,
        4.0,
    ),  # MiniMax-M1: no lower bound; Khatri et al. 2025 (ScaleRL): a weight of at most 5
}


@dataclass
class ImportanceSamplingConfig:
    mode: str = "auto"  # none | truncate | mask; auto: truncate if asynchronous
    level: str = "token"  # token | step
    low: float = 0.5  # mask: importance below it
    high: float = 2.0  # truncate, mask: importance above it


@dataclass
class LossConfig:
    type: str = "ppo_clip"  # ppo_clip | gspo | cispo | reinforce | nll
    reduction: str = "token"  # token | step | trajectory | prompt: what counts the same
    clip_low: float | None = (
        None  # the ratio is at least 1 - clip_low; default: by loss.type, see CLIP_BOUNDS
    )
    clip_high: float | None = None  # the ratio is at most 1 + clip_high; the same
    dual_clip: float = 0.0  # bound of the term where the advantage is negative, such as 3; 0: none
    old_logprobs: str = (
        "policy"  # policy: logprobs before the update, by the trainer; rollout: the engine's own
    )
    kl_coef: float = 0.0  # coefficient of the KL to the reference, the initial model
    kl_estimator: str = "k3"  # k2 | k3
    entropy_coef: float = 0.0  # coefficient of the entropy bonus
    importance_sampling: ImportanceSamplingConfig = field(default_factory=ImportanceSamplingConfig)


@dataclass
class AdvantageConfig:
    estimator: str = "grpo"  # grpo | grpo_nostd | rloo | maxrl, of outcomes; step_returns | gigpo, of rewards per step
    gamma: float = 1.0  # of later rewards: step_returns, gigpo
    step_coef: float = 1.0  # gigpo: of the comparison between steps


@dataclass
class FiltersConfig:
    truncated: str = "keep"  # trajectories that hit a length limit: keep | mask (train nothing, still compared) | drop
    zero_variance: bool = False  # leave out prompts from which advantage.estimator learns nothing: all advantages are 0
    dynamic_sampling: bool = (
        False  # ... and play others in their place, until rollout.prompts remain
    )
    max_batches: int = 8  # dynamic_sampling: give up after so many batches for one step


@dataclass
class TrainConfig:
    steps: int = 100  # batches of rollout.prompts prompts
    mini_batch_prompts: int | None = None  # prompts per optimizer step; default: the whole batch
    pack_layout: str = "trie"  # trie: every distinct token of a prompt once; merge: linear prefixes only; flat: each step
    micro_batch_tokens: int = 16384  # budget of one forward pass of one rank
    eval_every: int = (
        0  # steps between evaluations; 0: only before the first step and after the last
    )
    seed: int = 0


@dataclass
class WarmStartConfig:
    """Supervised training on the environment's own demonstrations, before the first step of a new run."""

    trajectories: int = 0  # 0: none
    epochs: int = 1
    batch: int = 64  # trajectories per optimizer step
    lr: float = (
        1e-4  # of the first optimizer step; falls linearly, and would be 0 one step after the last
    )

    @property
    def optimizer_steps(self) -> int:
        return self.epochs * -(-self.trajectories // self.batch)


@dataclass
class CheckpointConfig:
    every_steps: int = 0  # 0: only at the end
    keep: int = 2  # older ones are removed
    asynchronous: bool = False  # write in the background while training goes on


@dataclass
class RunConfig:
    dir: str = "runs"
    name: str | None = None  # of its folder in run.dir; default: the config's name and the time
    resume: str = (
        "auto"  # auto: continue what is in the run directory; never; or a checkpoint folder
    )
    rollouts_every: int = (
        0  # steps between rollouts that are kept on disk, whole and with routing; 0: none
    )
    report_prompts: int = (
        4  # prompts of the newest step whose trajectories are kept for the report; 0: none
    )
    wandb: str = "offline"  # offline: files in the run directory; online: uploaded; disabled
    wandb_project: str = "megastep"
    wandb_entity: str | None = None  # user or team; default: that of the key
    wandb_id: str | None = (
        None  # of the run there; default: a new one, kept in the run directory for going on
    )
    tensorboard: bool = False  # event files into the run directory; needs the package tensorboard


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
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
    def data_ranks(self) -> int:
        """Data parallelism: what the layout leaves over."""
        layout = self.policy.parallel
        return self.policy.ranks // (layout.tensor * layout.pipeline * layout.context)

    @property
    def budget_tokens(self) -> int:
        """Of a micro-batch: that of one rank, times the ranks that share its tokens."""
        return self.train.micro_batch_tokens * self.policy.parallel.context

    @property
    def policy_loss(self) -> LossConfig:
        """The loss with its clip bounds and its correction decided."""
        low, high = CLIP_BOUNDS.get(self.loss.type, (None, None))
        low = low if self.loss.clip_low is None else self.loss.clip_low
        high = high if self.loss.clip_high is None else self.loss.clip_high
        stale = self.asynchronous.max_staleness > 0 and self.loss.old_logprobs == "policy"
        decided = (
            ("truncate" if stale else "none")
            if self.loss.importance_sampling.mode == "auto"
            else self.loss.importance_sampling.mode
        )
        sampling = replace(self.loss.importance_sampling, mode=decided)
        return replace(self.loss, clip_low=low, clip_high=high, importance_sampling=sampling)

    @property
    def mini_batch_prompts(self) -> int:
        return self.train.mini_batch_prompts or self.rollout.prompts

    @property
    def optimizer_steps(self) -> int:
        """Of the whole run; it depends on prompts alone, and filters that drop prompts can only lower it."""
        return self.train.steps * -(-self.rollout.prompts // self.mini_batch_prompts)

    def context_tokens(self, arch: Architecture) -> int:
        """Of one model call, prompt and response."""
        return self.engine.max_model_len or arch.max_positions

    def prompt_tokens(self, arch: Architecture) -> int:
        """The most that one model call may have as prompt."""
        if self.rollout.max_prompt_tokens is not None:
            return self.rollout.max_prompt_tokens
        return self.context_tokens(arch) - self.rollout.max_response_tokens


def load(path: str | Path, overrides: list[str] = (), has_cuda: bool | None = None) -> Config:
    """Read, merge, type-check and validate. Raises ConfigError with every problem found.

    has_cuda: for a machine other than this one.
    """
    problems: list[str] = []
    values = _Values()
    for source, tree in _chain(Path(path)):
        for key, value in _leaves(_rename(tree)):
            values.set(key, value, source, problems)
    for key, value in _parse_overrides(overrides, problems):
        values.set(key, value, None, problems)
    missing = sorted(OmegaConf.missing_keys(values.typed))
    problems += [f"{key}: must be given" for key in missing]
    if not missing:
        # Also beside other problems: a refused value has left its default, everything else can be looked at.
        result = values.result()
        problems += validate(result, has_cuda, values.model_as_written)
    if problems:
        raise ConfigError([problem.replace(f"{_FIELD}.", f"{_ASYNC}.") for problem in problems])
    return result


def folders(path: str | Path) -> list[Path]:
    """Those of a config and of the files it is based on, its own first."""
    return list(
        dict.fromkeys(source.resolve().parent for source, _ in reversed(_chain(Path(path))))
    )


def to_yaml(config: Config) -> str:
    """As it may be written to a file: without secrets, and read back from any folder."""
    tree = redaction.redacted(asdict(paths.absolute(config)))
    tree = {_ASYNC if name == _FIELD else name: section for name, section in tree.items()}
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


# ---------------------------------------------------------------- reading


def _chain(path: Path, seen: tuple[Path, ...] = ()) -> list[tuple[Path, dict[str, Any]]]:
    """The file and the files it is based on, base first, with what they hold."""
    try:
        tree = read_yaml(path)
    except YAMLFileError as error:
        raise ConfigError([f"{shown(str(path), 200)}: {error}"]) from None
    if path.resolve() in seen:
        raise ConfigError([f"{path}: base: leads back to the file itself"])
    if len(seen) > _MAX_BASES:
        raise ConfigError([f"{path}: base: a chain of more than {_MAX_BASES} files"])
    base = tree.get("base")
    if base is None:
        return [(path, tree)]
    if not isinstance(base, str) or not base.isprintable():
        raise ConfigError([f"{path}: base = {shown(base)}: must be the path of another config"])
    return _chain(path.parent / base, (*seen, path.resolve())) + [(path, tree)]


def _rename(tree: dict[str, Any]) -> dict[str, Any]:
    return {_FIELD if key == _ASYNC else key: value for key, value in tree.items()}


def _leaves(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """{"a": {"b": 1}} → [("a.b", 1)]; the `base` key of a file is not part of the configuration."""
    result = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name == "base":
            continue
        if isinstance(value, dict) and name not in _open_keys():
            result += _leaves(value, f"{name}.")
        else:
            result.append((name, value))
    return result


def _parse_overrides(overrides: list[str], problems: list[str]) -> list[tuple[str, Any]]:
    result = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            problems.append(f"{shown(text)}: not of the form key=value, such as train.steps=10")
            continue
        section, dot, rest = key.partition(".")
        key = f"{_FIELD}{dot}{rest}" if section == _ASYNC else key
        try:
            result.append((key, parse(value)))
        except YAMLFileError as error:
            problems.append(f"{shown(key)} = {shown(value)}: {error}")
    return result


@cache
def _schema() -> DictConfig:
    return OmegaConf.structured(Config)


class _Values:
    """What files and overrides say, later ones over earlier ones, in the types of the schema."""

    def __init__(self):
        self.typed = deepcopy(_schema())
        self.open: dict[str, dict[str, Any]] = {key: {} for key in _open_keys()}
        self.model_as_written: Any = None

    def set(self, key: str, value: Any, source: Path | None, problems: list[str]) -> None:
        """`source`: the file that says so; None: the command line."""
        problem = _unknown(key) or _interpolation(key, value)
        if problem is None:
            if key == "model.path":
                self.model_as_written = value
            value = (
                paths.in_file(key, value, source.parent)
                if source
                else paths.on_command_line(key, value)
            )
            problem = (
                self._set_open(key, value) if _open_key_of(key) else self._set_typed(key, value)
            )
        if problem is not None:
            problems.append(f"{source}: {problem}" if source else problem)

    def _set_typed(self, key: str, value: Any) -> str | None:
        try:
            if isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
                raise TypeError  # OmegaConf would keep them
            # "1e-3" is a string to YAML 1.1; OmegaConf turns it into the field's type.
            OmegaConf.update(self.typed, key, value)
        except (OmegaConfBaseException, ArithmeticError, ValueError, TypeError):
            return f"{key} = {_clipped(repr(value))}: wrong type, {_wanted(key)} is needed"
        return None

    def _set_open(self, key: str, value: Any) -> str | None:
        """OmegaConf would read meanings into keys and strings of others."""
        name = _open_key_of(key)
        for part in reversed(key[len(name) + 1 :].split(".") if key != name else []):
            if not part:
                return f"{shown(key)}: not a key; {name}.NAME is needed"
            value = {part: value}
        if not isinstance(value, dict):
            return f"{key} = {_clipped(repr(value))}: wrong type, {_wanted(name)} is needed"
        for option, given in value.items():
            if not isinstance(option, str):
                return f"{name}: {shown(option)} is not a name; write it in quotes if it is meant to be one"
            if not _is_plain(given):
                return (
                    f"{name}.{option} = {shown(given)}: must be text, a number, true, false, null, a list or a "
                    "mapping; write other things in quotes"
                )
        self.open[name] = _merged(self.open[name], value)
        return None

    def result(self) -> Config:
        result = OmegaConf.to_object(self.typed)
        for name, options in self.open.items():
            section, _, entry = name.rpartition(".")
            setattr(value_of(result, section), entry, options)
        return result


def _merged(ours: dict, theirs: dict) -> dict:
    both = {
        key: _merged(ours[key], theirs[key])
        for key in theirs
        if isinstance(ours.get(key), dict) and isinstance(theirs[key], dict)
    }
    return ours | theirs | both


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, [*value.keys(), *value.values()]))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def _texts(value: Any) -> Iterator[str]:
    """Every string in it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        for part in parts:
            yield from _texts(part)


def _interpolation(key: str, value: Any) -> str | None:
    """`${...}` means something to OmegaConf and shells; here only `${env:NAME}` does, in env.options."""
    in_options = _open_key_of(key) == paths.OPTIONS
    for text in _texts(value):
        if "${" in (redaction.without_variables(text) if in_options else text):
            instead = (
                "${env:NAME} takes a value from the environment"
                if in_options
                else "write the value itself"
            )
            return f"{key} = {shown(text)}: ${{...}} is not replaced here; {instead}"
    return None


def shown(value: Any, most: int = 80) -> str:
    """For a line: short, without control characters."""
    return _clipped(value if isinstance(value, str) and value.isprintable() else repr(value), most)


def _clipped(text: str, most: int = 80) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


@cache
def _known() -> dict[str, Any]:
    """Every key of the schema, sections included, with its type."""

    def walk(schema, prefix):
        for f in fields(schema):
            name = f"{prefix}{f.name}"
            found[name] = f.type
            if is_dataclass(f.type):
                walk(f.type, f"{name}.")

    found: dict[str, Any] = {}
    walk(Config, "")
    return found


@cache
def _open_keys() -> list[str]:
    """Those that hold keys of somebody else's choice."""
    return [key for key, kind in _known().items() if get_origin(kind) is dict]


def _open_key_of(key: str) -> str | None:
    """The key of that kind that this one is, or belongs to."""
    return next((name for name in _open_keys() if key == name or key.startswith(f"{name}.")), None)


def _unknown(key: str) -> str | None:
    known = _known()
    if _open_key_of(key):
        return None
    if key in known and not is_dataclass(known[key]):
        return None
    if key in known:
        return f"{key}: is a section; give one of its keys: " + ", ".join(
            k for k in known if k.startswith(f"{key}.")
        )
    key = shown(key)
    leaves = [k for k, t in known.items() if not is_dataclass(t)]
    # A key that this one begins, else the nearest by spelling, else one of that name in another section.
    near = (
        [k for k in leaves if k.startswith(key)]
        or difflib.get_close_matches(key, leaves, n=1, cutoff=0.6)
        or [k for k in leaves if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    )
    hint = (
        f"did you mean {near[0]}?"
        if near
        else "known sections: " + ", ".join(f.name for f in fields(Config))
    )
    return f"{key}: unknown key; {hint}"


def _wanted(key: str) -> str:
    kind = _known().get(key, "another value")
    return getattr(kind, "__name__", str(kind)) if isinstance(kind, type) else str(kind)


# ---------------------------------------------------------------- validation


def validate(
    config: Config, has_cuda: bool | None = None, model_as_written: Any = None
) -> list[str]:
    """Every problem with the values, one line each; an empty list when there is none.

    model_as_written: model.path before it was seen from the working directory.
    """
    problems = _Problems(has_cuda)
    for key, value, right in bounds.beyond(config):
        problems.refuse(key, value, right)
    _check_texts(config, problems)
    _check_values(config, problems)
    _check_cluster(config, problems)
    try:
        arch = read_architecture(config.model.path)
    except ArchitectureError as error:
        if "model.path" not in problems.refused:
            problems.lines.append(
                f"model.path: {error}{_how_to_fetch(config.model.path, model_as_written)}"
            )
    else:
        _check_model(config, arch, problems)
        _check_engine(config.engine, arch, problems)
    _check_layout(config, problems)
    _check_placement(config, problems)
    return problems.lines


class _Problems:
    def __init__(self, has_cuda: bool | None):
        self.lines: list[str] = []
        self.refused: set[str] = (
            set()
        )  # keys whose value is none at all: other checks would mislead
        self.of_this_machine = has_cuda is None
        self._has_cuda = has_cuda

    def refuse(self, key: str, value: Any, right: str) -> None:
        self.check(False, key, value, right)
        self.refused.add(key)

    def need_cuda(self, key: str, value: Any, right: str) -> None:
        if self._has_cuda is None:
            import torch  # late: only this question needs it

            self._has_cuda = torch.cuda.is_available()
        self.check(self._has_cuda, key, value, right)

    def check(self, ok: bool, key: str, value: Any, right: str) -> None:
        if not ok and key not in self.refused:
            self.lines.append(f"{key} = {shown(value)}: {right}")


def _how_to_fetch(folder: str, as_written: Any) -> str:
    name = as_written if isinstance(as_written, str) else folder
    if os.path.isdir(folder) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name):
        return ""
    local = f"models/{name.rpartition('/')[2]}"
    fetch = f"`hf download {name} --local-dir {local}`, then model.path={local}"
    return f". If it is a name on the Hugging Face hub: {fetch}"


_CHOICES = {
    "model.init": ("hf", "random"),
    "rollout.mode": ("tokens", "chat"),
    "policy.precision": ("fp32", "bf16"),
    "sync.backend": ("auto", "shm", "nccl", "ipc"),
    "optimizer.schedule": ("constant", "linear", "cosine"),
    "train.pack_layout": ("trie", "merge", "flat"),
    "routing_replay.on_conflict": ("owner", "split"),
    "loss.type": ("ppo_clip", "gspo", "cispo", "reinforce", "nll"),
    "loss.reduction": ("token", "step", "trajectory", "prompt"),
    "loss.old_logprobs": ("policy", "rollout"),
    "loss.kl_estimator": ("k2", "k3"),
    "loss.importance_sampling.mode": ("auto", "none", "truncate", "mask"),
    "asynchronous.on_stale": ("wait", "drop"),
    "loss.importance_sampling.level": ("token", "step"),
    "run.wandb": ("online", "offline", "disabled"),
}
_AT_LEAST_ONE = (
    "policy.ranks",
    "policy.parallel.tensor",
    "policy.parallel.pipeline",
    "policy.parallel.virtual",
    "policy.parallel.expert",
    "policy.parallel.context",
    "engine.num_engines",
    "engine.tensor_parallel",
    "engine.max_sequences",
    "engine.cpu_kv_gb",
    "sync.bucket_mb",
    "policy.logits_chunk_rows",
    "train.steps",
    "train.micro_batch_tokens",
    "checkpoint.keep",
    "filters.max_batches",
    "warm_start.epochs",
    "warm_start.batch",
    "data.generated_rows",
    "rollout.prompts",
    "rollout.samples_per_prompt",
    "rollout.max_turns",
    "rollout.concurrency",
    "rollout.max_observation_chars",
    "eval.prompts",
    "eval.samples_per_prompt",
)
_ABOVE_ZERO = (
    "engine.start_timeout_s",
    "engine.request_timeout_s",
    "engine.health_every_s",
    "engine.health_timeout_s",
    "cluster.timeout_s",
    "optimizer.eps",
)
_NOT_NEGATIVE = (
    "optimizer.lr",
    "optimizer.min_lr",
    "optimizer.warmup_steps",
    "optimizer.weight_decay",
    "optimizer.clip_grad",
    "policy.activation_offload_layers",
    "policy.moe_aux_loss_coef",
    "policy.moe_z_loss_coef",
    "loss.dual_clip",
    "loss.kl_coef",
    "loss.entropy_coef",
    "loss.importance_sampling.low",
    "checkpoint.every_steps",
    "train.seed",
    "train.eval_every",
    "run.rollouts_every",
    "run.report_prompts",
    "warm_start.trajectories",
    "warm_start.lr",
    "advantage.step_coef",
    "engine.restarts",
    "asynchronous.max_staleness",
    "data.held_out",
    "rollout.temperature",
    "rollout.top_k",
    "eval.temperature",
    "eval.top_k",
)
_FRACTIONS = ("optimizer.cpu_offload_fraction", "routing_replay.min_agreement", "advantage.gamma")
_RAY_STORE_MB = 75
_LEAST_TEMPERATURE = 0.01
_MAX_TEXT = 4096  # characters: a path may be as long
_MAX_NAME = 200  # bytes: file systems take 255, and suffixes follow
_RECOMPUTED = ("full", "core_attn", "mlp", "moe", "moe_act", "layernorm")


def value_of(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _check_values(config: Config, problems: _Problems) -> None:
    for key, choices in _CHOICES.items():
        value = value_of(config, key)
        problems.check(value in choices, key, value, f"must be one of {', '.join(choices)}")
    for key in _AT_LEAST_ONE:
        problems.check(value_of(config, key) >= 1, key, value_of(config, key), "must be 1 or more")
    for key in _ABOVE_ZERO:
        problems.check(value_of(config, key) > 0, key, value_of(config, key), "must be more than 0")
    for key in _NOT_NEGATIVE:
        problems.check(
            value_of(config, key) >= 0, key, value_of(config, key), "must not be negative"
        )
    for key in _FRACTIONS:
        problems.check(
            0 <= value_of(config, key) <= 1, key, value_of(config, key), "must lie in 0 to 1"
        )
    inside = config.policy.parallel.expert_tensor
    problems.check(
        inside is None or inside >= 1, "policy.parallel.expert_tensor", inside, "must be 1 or more"
    )
    _check_recomputation(config.policy, problems)
    _check_offloading(config, problems)
    _check_loss(config.loss, problems)
    betas = config.optimizer.betas
    problems.check(
        len(betas) == 2 and all(0 <= b < 1 for b in betas),
        "optimizer.betas",
        betas,
        "must be two numbers of [0, 1)",
    )
    mini = config.train.mini_batch_prompts
    if mini is None or mini >= 1:
        problems.check(
            config.optimizer.warmup_steps < max(config.optimizer_steps, 1),
            "optimizer.warmup_steps",
            config.optimizer.warmup_steps,
            f"must be less than the {config.optimizer_steps} optimizer steps",
        )
    problems.check(mini is None or mini >= 1, "train.mini_batch_prompts", mini, "must be 1 or more")
    problems.check(
        not config.optimizer.min_lr > config.optimizer.lr,
        "optimizer.min_lr",
        config.optimizer.min_lr,
        f"must not exceed optimizer.lr = {config.optimizer.lr}",
    )
    _check_rollout(config, problems)
    _check_secrets(config, problems)
    problems.check(
        not config.run.tensorboard or find_spec("tensorboard") is not None,
        "run.tensorboard",
        True,
        "needs the package tensorboard, and it is not installed: pip install tensorboard",
    )


def _check_texts(config: Config, problems: _Problems) -> None:
    for key, kind in _known().items():
        if is_dataclass(kind) or key in _open_keys():
            continue
        for text in _texts(value_of(config, key)):
            if not text.isprintable() or len(text) > _MAX_TEXT:
                problems.refuse(
                    key, text, f"must be printable text of at most {_MAX_TEXT} characters"
                )
    for key in ("model.path", "run.dir"):
        problems.check(
            value_of(config, key).strip() != "",
            key,
            repr(value_of(config, key)),
            "must not be empty",
        )
    name = config.run.name
    if name is not None:
        ok = name.strip() == name and name not in ("", ".", "..") and not set(name) & set("/\\")
        ok = ok and len(name.encode(errors="replace")) <= _MAX_NAME
        problems.check(
            ok,
            "run.name",
            repr(name),
            "must be the name of one folder, "
            f"without / or \\, not .. and of at most {_MAX_NAME} bytes; run.dir says where it is",
        )


def _check_cluster(config: Config, problems: _Problems) -> None:
    cluster = config.cluster
    wrong = cluster.address is not None and address_problem(cluster.address)
    problems.check(not wrong, "cluster.address", cluster.address, wrong)
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
        return  # what other machines have is not known here
    if config.sync.backend in GPU_BACKENDS:
        problems.need_cuda(
            "sync.backend", config.sync.backend, "there is no GPU here; use shm, or auto"
        )
    if problems.of_this_machine:
        memory = bounds.machine_memory()
        problems.check(
            cluster.object_store_mb << 20 <= memory,
            "cluster.object_store_mb",
            cluster.object_store_mb,
            f"this machine has {memory >> 20} MB of memory",
        )
        problems.check(
            config.engine.cpu_kv_gb << 30 <= memory,
            "engine.cpu_kv_gb",
            config.engine.cpu_kv_gb,
            f"this machine has {memory >> 30} GB of memory",
        )


def address_problem(address: str) -> str | None:
    """Of a Ray cluster: why `ray.init` would not take it."""
    if address in ("auto", "local"):
        return None
    if "://" in address:
        return "Ray's client and HTTP addresses are not supported; give HOST:PORT of the head, such as 10.0.0.7:6379"
    host, _, port = address.rpartition(":")
    if not re.fullmatch(r"[\w.-]+|\[[0-9A-Fa-f:.]+\]", host) or not re.fullmatch(
        r"[0-9]{1,5}", port
    ):
        return "must be HOST:PORT of the head, such as 10.0.0.7:6379, or auto"
    return None if 1 <= int(port) <= 65535 else "its port must be from 1 to 65535"


def _check_secrets(config: Config, problems: _Problems) -> None:
    for key, value, name in redaction.unset_variables(config.env.options):
        problems.check(
            False, f"env.options.{key}", value, f"the environment variable {name} is not set"
        )
    for key in redaction.hidden_keys(asdict(config)):
        problems.check(
            False,
            key,
            redaction.HIDDEN,
            "a secret was left out when this file was written; give it, in "
            "env.options best as ${env:NAME}",
        )
    wandb_id = config.run.wandb_id
    problems.check(
        wandb_id is None or re.fullmatch(r"[\w.-]{1,64}", wandb_id) is not None,
        "run.wandb_id",
        wandb_id,
        "must be 1 to 64 letters, digits, or any of _ . -",
    )


def _check_rollout(config: Config, problems: _Problems) -> None:
    rollout = config.rollout
    for key in ("rollout.temperature", "eval.temperature"):
        temperature = value_of(config, key)
        problems.check(
            temperature <= 0 or temperature >= _LEAST_TEMPERATURE,
            key,
            temperature,
            f"must be 0 (greedy), or {_LEAST_TEMPERATURE} or more: vLLM samples with no less",
        )
    for key in ("rollout.top_p", "eval.top_p"):
        problems.check(
            0 < value_of(config, key) <= 1, key, value_of(config, key), "must lie in (0, 1]"
        )
    problems.check(
        rollout.env_timeout_s > 0,
        "rollout.env_timeout_s",
        rollout.env_timeout_s,
        "must be more than 0",
    )
    problems.check(
        rollout.max_response_tokens >= 2,
        "rollout.max_response_tokens",
        rollout.max_response_tokens,
        "must be 2 or more: one sampled, and the end of the turn",
    )
    problems.check(
        rollout.max_prompt_tokens is None or rollout.max_prompt_tokens >= 1,
        "rollout.max_prompt_tokens",
        rollout.max_prompt_tokens,
        "must be 1 or more",
    )


def _check_recomputation(policy: PolicyConfig, problems: _Problems) -> None:
    recompute = policy.recompute
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
    if policy.activation_offload_layers:
        problems.need_cuda(
            "policy.activation_offload_layers",
            policy.activation_offload_layers,
            "needs Transformer Engine, and there is no GPU here; must be 0",
        )
    problems.check(
        policy.activation_offload_layers == 0 or not recompute,
        "policy.activation_offload_layers",
        policy.activation_offload_layers,
        "cannot go with policy.recompute; choose one",
    )
    problems.check(
        policy.activation_offload_layers == 0 or policy.parallel.pipeline == 1,
        "policy.activation_offload_layers",
        policy.activation_offload_layers,
        "Megatron offloads activations without pipeline parallelism only",
    )


def _check_offloading(config: Config, problems: _Problems) -> None:
    fraction = config.optimizer.cpu_offload_fraction
    if fraction == 0:
        return
    problems.need_cuda(
        "optimizer.cpu_offload_fraction",
        fraction,
        "there is no GPU here to take it from; must be 0",
    )
    # Megatron-Core 0.16's hybrid optimizer looks for fp32 copies of fp32 weights when it loads, and there are none.
    problems.check(
        config.policy.precision == "bf16",
        "optimizer.cpu_offload_fraction",
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
    problems.check(
        not loss.importance_sampling.low >= loss.importance_sampling.high,
        "loss.importance_sampling.low",
        loss.importance_sampling.low,
        f"must be less than loss.importance_sampling.high = {loss.importance_sampling.high}",
    )
    problems.check(
        loss.importance_sampling.mode in ("auto", "none") or loss.old_logprobs == "policy",
        "loss.importance_sampling.mode",
        loss.importance_sampling.mode,
        "compares with the trainer's own logprobs; needs loss.old_logprobs = policy",
    )


def training_warnings(config: Config) -> list[str]:
    """What training accepts and is rarely meant, one line each."""
    found, loss = [], config.loss
    if loss.type == "gspo" and loss.reduction == "token":
        found.append(
            "loss.reduction = token: loss.type = gspo has one ratio per model call, and weighs calls by their length "
            "so; the objective of the paper weighs them alike: loss.reduction = step"
        )
    mini, batch = config.mini_batch_prompts, config.rollout.prompts
    if loss.type == "reinforce" and mini < batch:
        found.append(
            f"train.mini_batch_prompts = {mini}: loss.type = reinforce has no ratio, so mini-batches after the first "
            f"train on samples of an older policy uncorrected; use train.mini_batch_prompts = {batch}, or "
            "loss.type = ppo_clip"
        )
    return found


def _check_model(config: Config, arch: Architecture, problems: _Problems) -> None:
    p = config.policy.parallel
    if p.tensor >= 1:
        for what, size in (
            ("attention heads", arch.heads),
            ("key/value heads", arch.kv_heads),
            ("feed-forward width", arch.ffn_hidden),
        ):
            problems.check(
                size % p.tensor == 0,
                "policy.parallel.tensor",
                p.tensor,
                f"does not divide the model's {size} {what}; {_divisors(size)} would",
            )
        problems.check(
            VOCAB_MULTIPLE % p.tensor == 0,
            "policy.parallel.tensor",
            p.tensor,
            f"must divide {VOCAB_MULTIPLE}, the multiple that the vocabulary is padded to",
        )
    _check_experts(p, arch, problems)
    stages = p.pipeline * p.virtual
    if p.layers_per_stage is not None:
        problems.check(
            len(p.layers_per_stage) == stages,
            "policy.parallel.layers_per_stage",
            p.layers_per_stage,
            f"needs pipeline × virtual = {stages} numbers",
        )
        problems.check(
            sum(p.layers_per_stage) == arch.layers,
            "policy.parallel.layers_per_stage",
            p.layers_per_stage,
            f"adds up to {sum(p.layers_per_stage)}, the model has {arch.layers} layers",
        )
        problems.check(
            min(p.layers_per_stage, default=0) >= 1,
            "policy.parallel.layers_per_stage",
            p.layers_per_stage,
            "each stage needs a layer",
        )
    elif stages >= 1:
        problems.check(
            arch.layers % stages == 0,
            "policy.parallel.pipeline",
            p.pipeline,
            f"pipeline × virtual = {stages} does not divide the model's {arch.layers} layers; "
            "choose another or give policy.parallel.layers_per_stage",
        )
    problems.check(
        config.policy.activation_offload_layers < arch.layers,
        "policy.activation_offload_layers",
        config.policy.activation_offload_layers,
        f"must be less than the model's {arch.layers} layers",
    )
    _check_context(config, arch, problems)


def _check_context(config: Config, arch: Architecture, problems: _Problems) -> None:
    rollout, context = config.rollout, config.context_tokens(arch)
    what = "engine.max_model_len is" if config.engine.max_model_len else "the model's positions are"
    room = context - rollout.max_response_tokens
    problems.check(
        room >= 1,
        "rollout.max_response_tokens",
        rollout.max_response_tokens,
        f"{what} {context}, and a prompt needs one",
    )
    problems.check(
        room < 1 or config.prompt_tokens(arch) <= room,
        "rollout.max_prompt_tokens",
        rollout.max_prompt_tokens,
        f"{what} {context}, of which a response may take "
        f"{rollout.max_response_tokens}; must be {room} or less",
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
            f"does not divide the model's {arch.heads} attention heads; {_divisors(arch.heads)} would",
        )
    problems.check(
        0 < engine.gpu_memory_utilization < 1,
        "engine.gpu_memory_utilization",
        engine.gpu_memory_utilization,
        "must lie between 0 and 1",
    )


def _check_placement(config: Config, problems: _Problems) -> None:
    ahead = config.asynchronous.max_staleness
    problems.check(
        ahead <= 0 or 1 <= ahead * config.rollout.prompts < math.inf,
        "asynchronous.max_staleness",
        ahead,
        f"must be 0, or enough for one of the {config.rollout.prompts} prompts of a batch",
    )
    uncorrected = config.loss.type == "reinforce" and config.loss.old_logprobs == "rollout"
    problems.check(
        ahead == 0 or not uncorrected,
        "asynchronous.max_staleness",
        ahead,
        "loss.type = reinforce has no ratio that would correct for older policies; needs loss.old_logprobs = policy",
    )
    problems.check(
        ahead == 0 or not config.cluster.colocate,
        "asynchronous.max_staleness",
        ahead,
        "engines that share their GPUs with the policy cannot work while it does; needs "
        "cluster.colocate=false",
    )
    if not config.cluster.colocate:
        problems.check(
            config.sync.backend != "ipc",
            "sync.backend",
            config.sync.backend,
            "hands over memory of a shared GPU; needs cluster.colocate=true",
        )
        return
    problems.check(
        config.sync.backend != "nccl",
        "sync.backend",
        config.sync.backend,
        "needs a GPU on each side; with cluster.colocate=true use ipc",
    )
    needed = config.engine.num_engines * config.engine.tensor_parallel
    problems.check(
        needed <= config.policy.ranks,
        "engine.num_engines",
        config.engine.num_engines,
        f"engines need count × tensor = {needed} places, cluster.colocate=true offers them the "
        f"{config.policy.ranks} of the policy's ranks",
    )


def _check_experts(p: ParallelConfig, arch: Architecture, problems: _Problems) -> None:
    if arch.experts is None:
        problems.check(
            p.expert == 1, "policy.parallel.expert", p.expert, "the model has no experts; must be 1"
        )
        problems.check(
            p.expert_tensor is None,
            "policy.parallel.expert_tensor",
            p.expert_tensor,
            "the model has no experts; leave it out",
        )
        return
    if p.expert >= 1:
        problems.check(
            arch.experts.count % p.expert == 0,
            "policy.parallel.expert",
            p.expert,
            f"does not divide the model's {arch.experts.count} experts; "
            f"{_divisors(arch.experts.count)} would",
        )
    if p.expert_tensor_size >= 1:
        problems.check(
            arch.experts.hidden % p.expert_tensor_size == 0,
            "policy.parallel.expert_tensor",
            p.expert_tensor_size,
            f"does not divide the experts' width {arch.experts.hidden}",
        )
    # Megatron-Core 0.16 sums expert gradients over the ranks of dense layers unless expert > 1: with
    # another split the replicas of an expert would drift apart.
    problems.check(
        p.expert > 1 or p.expert_tensor_size == p.tensor,
        "policy.parallel.expert_tensor",
        p.expert_tensor_size,
        f"must be the tensor size {p.tensor} while policy.parallel.expert = 1",
    )


def _check_layout(config: Config, problems: _Problems) -> None:
    p, ranks = config.policy.parallel, config.policy.ranks
    if min(p.tensor, p.pipeline, p.virtual, p.context, p.expert, p.expert_tensor_size, ranks) < 1:
        return  # said already
    dense, expert = p.tensor * p.pipeline * p.context, p.expert * p.expert_tensor_size * p.pipeline
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
        p.virtual == 1 or p.pipeline > 1,
        "policy.parallel.virtual",
        p.virtual,
        "needs policy.parallel.pipeline > 1",
    )
    if p.context > 1:
        problems.check(
            config.train.pack_layout != "trie",
            "policy.parallel.context",
            p.context,
            "needs sequences that do not branch: train.pack_layout = merge or flat",
        )
        problems.need_cuda(
            "policy.parallel.context",
            p.context,
            "needs Transformer Engine's attention, and there is no GPU here; must be 1",
        )


def _divisors(n: int) -> str:
    found = [d for d in range(1, min(n, 64) + 1) if n % d == 0]
    return ", ".join(map(str, found))
