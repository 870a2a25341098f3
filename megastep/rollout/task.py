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
from megastep.rollout.env import BUILT_IN, Env, check_options, find_env
from megastep.rollout.generation import Generate, Sampling
from megastep.rollout.pool import LocalPool
from megastep.rollout.renderer import Renderer, load_tokenizer
from megastep.samples.packing import check_lengths
from megastep.samples.validation import validate
from megastep.text import describe, one_line, shorten
from megastep.types import Group


@dataclass
class Task:
    config: Config
    env: type[Env]
    renderer: Renderer
    train_rows: list[dict[str, Any]]
    eval_rows: list[dict[str, Any]]

    @classmethod
    def of_worker(cls, config: Config) -> "Task":
        """For a process that gets its prompts from another one, which has checked the config."""
        assert config.env.name is not None
        renderer = Renderer.for_model(
            config.model.path, config.rollout.mode, config.rollout.template
        )
        return cls(config, find_env(config.env.name), renderer, [], [])

    @classmethod
    def load(cls, config: Config) -> "Task":
        """Raises ConfigError, EnvError, DataError or RenderError, one line per problem."""
        if config.env.name is None:
            raise ConfigError(
                f"env.name: must be given; one of {', '.join(sorted(BUILT_IN))}, or module:Class"
            )
        env = find_env(config.env.name)
        check_options(env, config.env.options)
        train_rows, eval_rows = load_data(config.data, env, config.train.seed)
        renderer = Renderer.for_model(
            config.model.path, config.rollout.mode, config.rollout.template
        )
        check_vocabulary(renderer, config)
        check_teacher(config)
        return cls(config, env, renderer, train_rows, eval_rows)

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

    def pool(self, generate: Generate) -> LocalPool:
        return self._pool(generate, self.config.rollout, "train")

    def eval_pool(self, generate: Generate) -> LocalPool:
        return self._pool(generate, self.config.eval, "eval")

    def _pool(
        self, generate: Generate, settings: RolloutConfig | EvalConfig, label: str
    ) -> LocalPool:
        config = self.config
        rollout = config.rollout
        blocking.calls.limit = rollout.env_threads
        limits = Limits(
            max_turns=rollout.max_turns,
            max_prompt_tokens=config.prompt_tokens(read_architecture(config.model.path)),
            max_response_tokens=rollout.max_response_tokens,
            env_timeout_s=rollout.env_timeout_s,
            max_observation_chars=rollout.max_observation_chars,
        )
        sampling = Sampling(
            max_tokens=rollout.max_response_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
        )
        # Training and evaluation prompts are both numbered from 0: the label separates their seeds.
        agent = Agent(
            generate, self.renderer, limits, sampling, seed=f"{label}/{config.train.seed}"
        )
        return LocalPool(
            agent,
            self.env,
            settings.samples_per_prompt,
            rollout.concurrency,
            config.env.options,
            label,
            keeps_routing=label == "train",
        )


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
