"""What is played: the environment, its rows and the renderer of a configuration, all checked before anything starts.

task = Task.load(config)
groups = await task.pool(generate).run(task.stream().take(config.rollout.prompts))
held_out = await task.eval_pool(generate).run(task.eval_prompts())
"""

from dataclasses import dataclass
from typing import Any

from megastep.config import Config, EvalConfig, RolloutConfig
from megastep.errors import ConfigError, DataError, EnvError, RenderError, RolloutError
from megastep.models.architecture import read_architecture
from megastep.rollout.agent import Agent, Limits
from megastep.rollout.data import Prompt, PromptStream, load_data
from megastep.rollout.env import BUILT_IN, Env, check_options, find_env, one_line, short, told
from megastep.rollout.generation import Generate, Sampling
from megastep.rollout.pool import Pool
from megastep.rollout.renderer import Renderer
from megastep.samples.validation import validate
from megastep.types import Group


@dataclass
class Task:
    config: Config
    env: type[Env]
    renderer: Renderer
    train_rows: list[dict[str, Any]]
    eval_rows: list[dict[str, Any]]

    @classmethod
    def load(cls, config: Config) -> "Task":
        """Raises ConfigError, EnvError, DataError or RenderError, of a line each, for what cannot be played."""
        if config.env.name is None:
            raise ConfigError(
                [f"env.name: must be given; one of {', '.join(sorted(BUILT_IN))}, or module:Class"]
            )
        env = find_env(config.env.name)
        check_options(env, config.env.options)
        rows = load_data(config.data, env, config.train.seed)
        renderer = Renderer.for_model(
            config.model.path, config.rollout.mode, config.rollout.template
        )
        check_vocabulary(renderer, config)
        return cls(config, env, renderer, *rows)

    def stream(self) -> PromptStream:
        return PromptStream(self.train_rows, self.config.train.seed, self.config.data.shuffle)

    def eval_prompts(self) -> list[Prompt]:
        if not self.eval_rows:
            raise DataError(
                [
                    "data.held_out = 0: there is nothing to evaluate on; hold out rows or give data.eval"
                ]
            )
        return [Prompt(i, row) for i, row in enumerate(self.eval_rows[: self.config.eval.prompts])]

    def demonstrations(self) -> list[Group]:
        """Raises EnvError where the environment has none, or none that can be trained on."""
        count = self.config.warm_start.trajectories
        if not count:
            return []
        what = f"warm_start.trajectories = {count}: {self.env.__name__}.demonstrations"
        try:
            groups = self.env.demonstrations(count, self.config.train.seed, self.renderer)
        except EnvError as error:
            raise EnvError(one_line(error)) from None
        except (Exception, SystemExit) as error:  # whatever an environment does
            raise EnvError(f"{what} raised {told(error)}") from None
        self._check_demonstrations(groups, what)
        return groups

    def _check_demonstrations(self, groups: Any, what: str) -> None:
        if (
            not isinstance(groups, list)
            or not groups
            or not all(isinstance(group, Group) for group in groups)
        ):
            raise EnvError(
                f"{what} returned {short(groups)}; a list of megastep.types.Group is needed"
            )
        try:
            validate(groups, vocab=read_architecture(self.config.model.path).vocab)
        except RolloutError as error:
            raise EnvError(f"{what}: {error.summary()}") from None
        except Exception as error:  # fields of other types than theirs
            raise EnvError(f"{what} returned groups that cannot be read: {told(error)}") from None

    def pool(self, generate: Generate) -> Pool:
        return self._pool(generate, self.config.rollout, "train")

    def eval_pool(self, generate: Generate) -> Pool:
        return self._pool(generate, self.config.eval, "eval")

    def _pool(self, generate: Generate, sampled: RolloutConfig | EvalConfig, label: str) -> Pool:
        config, rollout = self.config, self.config.rollout
        limits = Limits(
            max_turns=rollout.max_turns,
            max_prompt_tokens=config.prompt_tokens(read_architecture(config.model.path)),
            max_response_tokens=rollout.max_response_tokens,
            env_timeout_s=rollout.env_timeout_s,
            max_observation_chars=rollout.max_observation_chars,
        )
        sampling = Sampling(
            max_tokens=rollout.max_response_tokens,
            temperature=sampled.temperature,
            top_p=sampled.top_p,
            top_k=sampled.top_k,
        )
        # Prompts of both are numbered from 0: the label keeps their seeds apart.
        agent = Agent(
            generate, self.renderer, limits, sampling, seed=f"{label}/{config.train.seed}"
        )
        return Pool(
            agent,
            self.env,
            sampled.samples_per_prompt,
            rollout.concurrency,
            config.env.options,
            label,
        )


def check_vocabulary(renderer: Renderer, config: Config) -> None:
    """A token without a row in the embedding fails in a rank or an engine, in the middle of a run."""
    vocab = read_architecture(config.model.path).vocab
    highest = max(renderer.tokenizer.get_vocab().values())
    if highest >= vocab:
        raise RenderError(
            f"model.path = {config.model.path}: its tokenizer has token ids up to {highest}, "
            f"vocab_size in config.json is {vocab}; the tokenizer is another model's"
        )
