"""The configuration: a typed schema, YAML files that hold only what differs, `key=value` on top.

    defaults (the dataclasses below)  ←  base: other.yaml  ←  CONFIG.yaml  ←  key=value ...

`load()` reads all of them and `validate()` looks at the result; both collect every problem instead of
stopping at the first, and each problem is one line: the key, the bad value, what would be right.
Nothing derived is ever written back: what follows from the values is computed where it is needed.
"""

import difflib
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megastep.architecture import VOCAB_MULTIPLE, Architecture, ArchitectureError, read_architecture

REQUIRED = "???"  # OmegaConf's mark for "must be given"


@dataclass
class ModelConfig:
    path: str = REQUIRED  # Hugging Face folder: config.json and, for init=hf, safetensors
    init: str = "hf"  # hf: weights of `path`; random: fresh weights of that shape


@dataclass
class ParallelConfig:
    tensor: int = 1  # heads and matrix columns; sequence parallelism comes with it
    pipeline: int = 1  # consecutive layers
    virtual: int = 1  # interleaved chunks of layers per pipeline rank
    layers_per_stage: list[int] | None = None  # uneven stages: pipeline × virtual numbers, in order of depth
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


@dataclass
class OptimizerConfig:
    lr: float = 1e-6
    schedule: str = "constant"  # constant | linear | cosine, after the warm-up
    warmup_steps: int = 0
    min_lr: float = 0.0  # where linear and cosine end
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0  # 0: no clipping


@dataclass
class TrainConfig:
    steps: int = 100
    batch_sequences: int = 32  # per optimizer step, over all ranks
    micro_batch_sequences: int = 8  # per forward pass of one rank
    sequence_tokens: int = 32
    seed: int = 0


@dataclass
class CheckpointConfig:
    every_steps: int = 0  # 0: only at the end
    keep: int = 2  # older ones are removed
    asynchronous: bool = False  # write in the background while training goes on


@dataclass
class RunConfig:
    dir: str = "runs"
    name: str | None = None  # default: the config's name and the time
    resume: str = "auto"  # auto: continue what is in the run directory; never; or a checkpoint folder
    wandb: str = "auto"  # auto: online with a key, else offline; online; offline; disabled


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run: RunConfig = field(default_factory=RunConfig)


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one line each."""

    def __init__(self, problems: list[str]):
        super().__init__("\n".join(problems))
        self.problems = problems


def load(path: str | Path, overrides: list[str] = ()) -> Config:
    """Read, merge, type-check and validate. Raises ConfigError with every problem found."""
    problems: list[str] = []
    config = OmegaConf.structured(Config)
    for source in _chain(Path(path)):
        _apply(config, _leaves(_read_yaml(source)), f"{source}: ", problems)
    _apply(config, _parse_overrides(overrides, problems), "", problems)
    missing = sorted(OmegaConf.missing_keys(config))
    problems += [f"{key}: must be given" for key in missing]
    if not missing:
        # Also beside other problems: a refused value has left its default, everything else can be looked at.
        result = OmegaConf.to_object(config)
        problems += validate(result)
    if problems:
        raise ConfigError(problems)
    return result


def to_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))


# ---------------------------------------------------------------- reading


def _chain(path: Path, seen: tuple[Path, ...] = ()) -> list[Path]:
    """The file and the files it is based on, base first."""
    if path.resolve() in seen:
        raise ConfigError([f"{path}: base: leads back to the file itself"])
    base = _read_yaml(path).get("base")
    if base is None:
        return [path]
    return _chain(path.parent / str(base), (*seen, path.resolve())) + [path]


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror})"]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError([f"{path}: not readable as YAML: {reason}"]) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError([f"{path}: holds a {type(content).__name__}; `key: value` lines are needed"])
    return content


def _leaves(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """{"a": {"b": 1}} → [("a.b", 1)]; the `base` key of a file is not part of the configuration."""
    result = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name == "base":
            continue
        if isinstance(value, dict):
            result += _leaves(value, f"{name}.")
        else:
            result.append((name, value))
    return result


def _parse_overrides(overrides: list[str], problems: list[str]) -> list[tuple[str, Any]]:
    result = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            problems.append(f"{text}: not of the form key=value, such as train.steps=10")
            continue
        try:
            result.append((key, yaml.safe_load(value)))
        except yaml.YAMLError:
            problems.append(f"{key} = {value}: not readable as a YAML value")
    return result


def _apply(config, leaves: list[tuple[str, Any]], source: str, problems: list[str]) -> None:
    for key, value in leaves:
        unknown = _unknown(key)
        if unknown:
            problems.append(source + unknown)
            continue
        try:
            # "1e-3" is a string to YAML 1.1; OmegaConf turns it into the field's type.
            OmegaConf.update(config, key, value)
        except OmegaConfBaseException:
            problems.append(f"{source}{key} = {value!r}: wrong type, {_wanted(key)} is needed")


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


def _unknown(key: str) -> str | None:
    known = _known()
    if key in known and not is_dataclass(known[key]):
        return None
    if key in known:
        return f"{key}: is a section; give one of its keys: " + ", ".join(k for k in known if k.startswith(f"{key}."))
    leaves = [k for k, t in known.items() if not is_dataclass(t)]
    # The nearest key by spelling, else one of that name in another section.
    near = difflib.get_close_matches(key, leaves, n=1, cutoff=0.6) or [
        k for k in leaves if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]
    ]
    hint = f"did you mean {near[0]}?" if near else "known sections: " + ", ".join(f.name for f in fields(Config))
    return f"{key}: unknown key; {hint}"


def _wanted(key: str) -> str:
    kind = _known()[key]
    return getattr(kind, "__name__", str(kind)) if isinstance(kind, type) else str(kind)


# ---------------------------------------------------------------- validation


def validate(config: Config) -> list[str]:
    """Every problem with the values, one line each; an empty list when there is none."""
    problems = _Problems()
    _check_values(config, problems)
    try:
        arch = read_architecture(config.model.path)
    except ArchitectureError as error:
        problems.lines.append(f"model.path: {error}")
    else:
        _check_model(config, arch, problems)
    _check_layout(config, problems)
    return problems.lines


class _Problems:
    def __init__(self):
        self.lines: list[str] = []

    def check(self, ok: bool, key: str, value: Any, right: str) -> None:
        if not ok:
            self.lines.append(f"{key} = {value}: {right}")


_CHOICES = {
    "model.init": ("hf", "random"),
    "policy.precision": ("fp32", "bf16"),
    "optimizer.schedule": ("constant", "linear", "cosine"),
    "run.wandb": ("auto", "online", "offline", "disabled"),
}
_AT_LEAST_ONE = (
    "policy.ranks", "policy.parallel.tensor", "policy.parallel.pipeline", "policy.parallel.virtual",
    "policy.parallel.expert", "policy.parallel.expert_tensor_size", "policy.parallel.context",
    "train.steps", "train.batch_sequences", "train.micro_batch_sequences", "checkpoint.keep",
)
_NOT_NEGATIVE = (
    "optimizer.lr", "optimizer.min_lr", "optimizer.warmup_steps", "optimizer.weight_decay", "optimizer.clip_grad",
    "checkpoint.every_steps", "train.seed",
)


def _get(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _check_values(config: Config, problems: _Problems) -> None:
    for key, choices in _CHOICES.items():
        value = _get(config, key)
        problems.check(value in choices, key, value, f"must be one of {', '.join(choices)}")
    for key in _AT_LEAST_ONE:
        problems.check(_get(config, key) >= 1, key, _get(config, key), "must be 1 or more")
    for key in _NOT_NEGATIVE:
        problems.check(_get(config, key) >= 0, key, _get(config, key), "must not be negative")
    betas = config.optimizer.betas
    problems.check(len(betas) == 2 and all(0 <= b < 1 for b in betas), "optimizer.betas", betas,
                   "must be two numbers of [0, 1)")
    problems.check(config.optimizer.warmup_steps < config.train.steps, "optimizer.warmup_steps",
                   config.optimizer.warmup_steps, f"must be less than train.steps = {config.train.steps}")
    problems.check(config.optimizer.min_lr <= config.optimizer.lr, "optimizer.min_lr", config.optimizer.min_lr,
                   f"must not exceed optimizer.lr = {config.optimizer.lr}")
    problems.check(config.train.sequence_tokens >= 2, "train.sequence_tokens", config.train.sequence_tokens,
                   "must be 2 or more: one token predicts the next")


def _check_model(config: Config, arch: Architecture, problems: _Problems) -> None:
    p = config.policy.parallel
    if p.tensor >= 1:
        for what, size in (("attention heads", arch.heads), ("key/value heads", arch.kv_heads),
                           ("feed-forward width", arch.ffn_hidden)):
            problems.check(size % p.tensor == 0, "policy.parallel.tensor", p.tensor,
                           f"does not divide the model's {size} {what}; {_divisors(size)} would")
        problems.check(VOCAB_MULTIPLE % p.tensor == 0, "policy.parallel.tensor", p.tensor,
                       f"must divide {VOCAB_MULTIPLE}, the multiple that the vocabulary is padded to")
    _check_experts(p, arch, problems)
    stages = p.pipeline * p.virtual
    if p.layers_per_stage is not None:
        problems.check(len(p.layers_per_stage) == stages, "policy.parallel.layers_per_stage", p.layers_per_stage,
                       f"needs pipeline × virtual = {stages} numbers")
        problems.check(sum(p.layers_per_stage) == arch.layers, "policy.parallel.layers_per_stage", p.layers_per_stage,
                       f"adds up to {sum(p.layers_per_stage)}, the model has {arch.layers} layers")
        problems.check(min(p.layers_per_stage, default=0) >= 1, "policy.parallel.layers_per_stage",
                       p.layers_per_stage, "each stage needs a layer")
    elif stages >= 1:
        problems.check(arch.layers % stages == 0, "policy.parallel.pipeline", p.pipeline,
                       f"pipeline × virtual = {stages} does not divide the model's {arch.layers} layers; "
                       "choose another or give policy.parallel.layers_per_stage")
    problems.check(config.train.sequence_tokens <= arch.max_positions, "train.sequence_tokens",
                   config.train.sequence_tokens, f"the model has {arch.max_positions} positions")


def _check_experts(p: ParallelConfig, arch: Architecture, problems: _Problems) -> None:
    if arch.experts is None:
        problems.check(p.expert == 1, "policy.parallel.expert", p.expert, "the model has no experts; must be 1")
        problems.check(p.expert_tensor is None, "policy.parallel.expert_tensor", p.expert_tensor,
                       "the model has no experts; leave it out")
        return
    if p.expert >= 1:
        problems.check(arch.experts.count % p.expert == 0, "policy.parallel.expert", p.expert,
                       f"does not divide the model's {arch.experts.count} experts; "
                       f"{_divisors(arch.experts.count)} would")
    if p.expert_tensor_size >= 1:
        problems.check(arch.experts.hidden % p.expert_tensor_size == 0, "policy.parallel.expert_tensor",
                       p.expert_tensor_size, f"does not divide the experts' width {arch.experts.hidden}")
    # Megatron-Core 0.16 sums expert gradients over the ranks of dense layers unless expert > 1: with
    # another split the replicas of an expert would drift apart.
    problems.check(p.expert > 1 or p.expert_tensor_size == p.tensor, "policy.parallel.expert_tensor",
                   p.expert_tensor_size, f"must be the tensor size {p.tensor} while policy.parallel.expert = 1")


def _check_layout(config: Config, problems: _Problems) -> None:
    p, ranks = config.policy.parallel, config.policy.ranks
    if min(p.tensor, p.pipeline, p.virtual, p.context, p.expert, p.expert_tensor_size, ranks) < 1:
        return  # said already
    dense, expert = p.tensor * p.pipeline * p.context, p.expert * p.expert_tensor_size * p.pipeline
    problems.check(ranks % dense == 0, "policy.ranks", ranks,
                   f"must be a multiple of tensor × pipeline × context = {dense}")
    problems.check(ranks % expert == 0, "policy.ranks", ranks,
                   f"must be a multiple of expert × expert_tensor × pipeline = {expert}")
    problems.check(p.virtual == 1 or p.pipeline > 1, "policy.parallel.virtual", p.virtual,
                   "needs policy.parallel.pipeline > 1")
    problems.check(p.context == 1, "policy.parallel.context", p.context,
                   "context parallelism is not supported yet; must be 1")
    if ranks % dense == 0 and config.train.micro_batch_sequences >= 1:
        _check_batch(config, ranks // dense, problems)


def _check_batch(config: Config, data_ranks: int, problems: _Problems) -> None:
    train, p = config.train, config.policy.parallel
    unit = data_ranks * train.micro_batch_sequences
    problems.check(train.batch_sequences % unit == 0, "train.batch_sequences", train.batch_sequences,
                   f"must be a multiple of data-parallel ranks × micro_batch_sequences = {unit}")
    problems.check(train.sequence_tokens % p.tensor == 0, "train.sequence_tokens", train.sequence_tokens,
                   f"must be a multiple of policy.parallel.tensor = {p.tensor} (sequence parallelism)")
    problems.check(p.virtual == 1 or train.batch_sequences // unit % p.pipeline == 0, "train.batch_sequences",
                   train.batch_sequences, f"a virtual pipeline needs a multiple of {p.pipeline} micro-batches")


def _divisors(n: int) -> str:
    found = [d for d in range(1, n + 1) if n % d == 0 and d <= 64]
    return ", ".join(map(str, found))
