"""The environment, data and renderer of a configuration, all checked before a process starts.

task = Task.load(config)
groups = await task.pool(generate).run(task.stream().take(config.rollout.prompts))
held_out = await task.eval_pool(generate).run(task.eval_prompts())
"""

from dataclasses import dataclass
from typing import Any

from megastep.config import Config, EvalConfig, RolloutConfig
from megastep.errors import ConfigError, DataError, EnvError, RenderError, RolloutError
from megastep.models.architecture import read_architecture
from megastep.rollout import blocking
from megastep.rollout.agent import Agent, Limits
from megastep.rollout.conversations import read_conversations
from megastep.rollout.data import Prompt, PromptStream, load_data
from megastep.rollout.endpoint import Endpoint
from megastep.rollout.env import BUILT_IN, Env, check_options, find_env
from megastep.rollout.generation import Generate, Sampling
from megastep.rollout.parsers import AUTO, Parsers
from megastep.rollout.pool import LocalPool, Pool
from megastep.rollout.program import Program, ProgramPool, find_program, rows_of
from megastep.rollout.recording import Model
from megastep.rollout.renderer import Renderer, load_tokenizer
from megastep.samples.packing import check_lengths
from megastep.samples.validation import validate
from megastep.text import describe, one_line, shorten
from megastep.types import Group


@dataclass
class Task:
    config: Config
    env: type[Env]  # with an agent: its rows only
    renderer: Renderer
    train_rows: list[dict[str, Any]]
    eval_rows: list[dict[str, Any]]
    program: Program | None = None  # runs the episodes in place of the environment

    @classmethod
    def of_worker(cls, config: Config) -> "Task":
        """For a process that gets its prompts from another one, which has checked the config."""
        env, program = _environment(config)
        renderer = Renderer.for_model(
            config.model.path, config.rollout.mode, config.rollout.template
        )
        return cls(config, env, renderer, [], [], program)

    @classmethod
    def load(cls, config: Config) -> "Task":
        """Raises ConfigError, EnvError, DataError or RenderError, one line per problem."""
        env, program = _environment(config)
        if program is None:
            check_options(env, config.env.options)
        train_rows, eval_rows = load_data(config.data, env, config.train.seed)
        renderer = Renderer.for_model(
            config.model.path, config.rollout.mode, config.rollout.template
        )
        check_vocabulary(renderer, config)
        check_teacher(config)
        if {config.agent.tool_parser, config.agent.reasoning_parser} - {AUTO}:
            _parsers(config, renderer).check()
        return cls(config, env, renderer, train_rows, eval_rows, program)

    def stream(self) -> PromptStream:
        return PromptStream(self.train_rows, self.config.train.seed, self.config.data.shuffle)

    def eval_prompts(self) -> list[Prompt]:
        if not self.eval_rows:
            raise DataError(
                "data.held_out = 0: there is nothing to evaluate on; "
                "hold out rows or give data.eval"
            )
        return [Prompt(i, row) for i, row in enumerate(self.eval_rows[: self.config.eval.prompts])]

    def demonstrations(self) -> list[Group]:
        """Raises EnvError if the environment has none, or returns invalid ones."""
        settings = self.config.warm_start
        if settings.data is not None:
            return conversations(self.config, self.renderer)
        count = settings.trajectories
        if not count:
            return []
        method = f"warm_start.trajectories = {count}: {self.env.__name__}.demonstrations"
        try:
            groups = self.env.demonstrations(count, self.config.train.seed, self.renderer)
        except EnvError as error:
            raise EnvError(one_line(error)) from None
        except (Exception, SystemExit) as error:  # the environment's own code
            raise EnvError(f"{method} raised {describe(error)}") from None
        self._check_demonstrations(groups, method)
        return groups

    def _check_demonstrations(self, groups: Any, method: str) -> None:
        is_list = isinstance(groups, list) and len(groups) > 0
        if not is_list or not all(isinstance(group, Group) for group in groups):
            raise EnvError(
                f"{method} returned {shorten(groups)}; a list of megastep.types.Group is needed"
            )
        try:
            validate(groups, vocab=read_architecture(self.config.model.path).vocab)
        except RolloutError as error:
            raise EnvError(f"{method}: {error.summary()}") from None
        except Exception as error:  # a field of the wrong type
            raise EnvError(
                f"{method} returned groups that cannot be read: {describe(error)}"
            ) from None

    def pool(self, generate: Generate) -> Pool:
        return self._pool(generate, self.config.rollout, "train")

    def eval_pool(self, generate: Generate) -> Pool:
        return self._pool(generate, self.config.eval, "eval")

    def _pool(self, generate: Generate, settings: RolloutConfig | EvalConfig, label: str) -> Pool:
        config = self.config
        rollout = config.rollout
        blocking.calls.limit = rollout.env_threads
        limits = limits_of(config)
        sampling = sampling_of(config, settings)
        # Training and evaluation prompts are both numbered from 0: the label separates their seeds.
        seed = f"{label}/{config.train.seed}"
        keeps_routing = label == "train"
        if self.program is not None:
            return ProgramPool(
                answering(config, self.renderer, generate, limits, sampling, seed),
                self.program,
                Endpoint(config.agent.host, config.agent.max_body_mb),
                config.agent.timeout_s,
                settings.samples_per_prompt,
                rollout.concurrency,
                label,
                keeps_routing=keeps_routing,
            )
        agent = Agent(generate, self.renderer, limits, sampling, seed=seed)
        return LocalPool(
            agent,
            self.env,
            settings.samples_per_prompt,
            rollout.concurrency,
            config.env.options,
            label,
            keeps_routing=keeps_routing,
        )


def _environment(config: Config) -> tuple[type[Env], Program | None]:
    if config.has_agent:
        program = find_program(config.agent)
        return rows_of(program), program
    if config.env.name is None:
        raise ConfigError(
            f"env.name: must be given; one of {', '.join(sorted(BUILT_IN))}, or module:Class"
        )
    return find_env(config.env.name), None


def limits_of(config: Config) -> Limits:
    rollout = config.rollout
    return Limits(
        max_turns=rollout.max_turns,
        max_prompt_tokens=config.prompt_tokens(read_architecture(config.model.path)),
        max_response_tokens=rollout.max_response_tokens,
        env_timeout_s=rollout.env_timeout_s,
        max_observation_chars=rollout.max_observation_chars,
    )


def sampling_of(config: Config, settings: RolloutConfig | EvalConfig) -> Sampling:
    return Sampling(
        max_tokens=config.rollout.max_response_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
    )


def answering(
    config: Config,
    renderer: Renderer,
    generate: Generate,
    limits: Limits,
    sampling: Sampling,
    seed: str,
) -> Model:
    """What answers the calls of agent programs."""
    return Model(
        generate,
        renderer,
        _parsers(config, renderer),
        limits,
        sampling,
        seed,
        vocab=read_architecture(config.model.path).vocab,
        max_tokens=config.agent.max_tokens,
        roles=tuple(config.agent.roles),
    )


def _parsers(config: Config, renderer: Renderer) -> Parsers:
    agent = config.agent
    return Parsers(renderer.tokenizer, agent.tool_parser, agent.reasoning_parser)


def conversations(config: Config, renderer: Renderer) -> list[Group]:
    """Of `warm_start.data`; raises DataError for a row that cannot be trained."""
    source = config.warm_start.data
    assert source is not None
    groups = read_conversations(source, renderer, config.warm_start.trajectories)
    try:
        check_lengths(groups, config.budget_tokens, config.policy.align_tokens)
    except ValueError as error:
        raise DataError(f"{source}: {error}") from None
    return groups


def check_vocabulary(renderer: Renderer, config: Config) -> None:
    """A token id outside the embedding would fail in a rank or an engine during the run."""
    vocab = read_architecture(config.model.path).vocab
    highest = max(renderer.tokenizer.get_vocab().values())
    if highest >= vocab:
        raise RenderError(
            f"model.path = {config.model.path}: its tokenizer has token ids up to {highest}, "
            f"vocab_size in config.json is {vocab}; the tokenizer is another model's"
        )


def check_teacher(config: Config) -> None:
    """The teacher scores the student's token ids: they must mean the same tokens."""
    teacher = config.loss.teacher
    if teacher is None:
        return
    student_vocab = load_tokenizer(config.model.path).get_vocab()
    if load_tokenizer(teacher, key="loss.teacher").get_vocab() != student_vocab:
        raise RenderError(
            f"loss.teacher = {teacher}: its tokenizer has other tokens than that of model.path = "
            f"{config.model.path}"
        )
