"""Every error that megastep raises for its users.

    MegastepError
    ├── UserError             the input is wrong: exit code 2, one line per problem
    │   ├── ConfigError       keys and values of a configuration
    │   ├── YAMLFileError     a YAML file that cannot be parsed
    │   ├── ArchitectureError a model folder or its config.json
    │   ├── RenderError       a tokenizer or a chat template
    │   ├── WeightsError      weights that do not fit the model
    │   ├── CheckpointError   a checkpoint that is damaged, incomplete or of another model
    │   ├── DataError         a data set
    │   ├── EnvError          an environment that cannot be loaded, or that breaks its protocol
    │   ├── CorpusError       a retrieval corpus
    │   ├── StoreError        a rollout file
    │   ├── RunDirError       a run directory
    │   ├── ReportError       a run directory without anything to report
    │   └── OutputError       an output file that cannot be written
    └── RunFailed             the run cannot continue: exit code 1, one line
        ├── ClusterError      Ray, or the resources of the cluster
        ├── RunLost           a process or node ended more often than train.restarts allows: exit
        │   │                 code 75
        │   ├── PolicyLost    a rank
        │   └── RoutingLost   recorded routing whose node, or the process that kept it, ended
        ├── EngineError       no engine can answer a call
        ├── RolloutFailed     every episode of a batch failed
        ├── RolloutError      trajectories that violate the data model
        └── TrainingError     a rank received or produced invalid data
            ├── ReplayError   routing that does not match its tokens
            └── SyncError     an engine without the weights that the policy sent

Anything else that escapes is a bug and keeps its traceback. `signals.Stopped` is no error: the run
was asked to stop.
"""


class MegastepError(Exception):
    """`problems` holds one line per problem."""

    def __init__(self, problems: str | list[str]):
        super().__init__(problems)  # as given: pickle calls the class with it again
        self.problems = [problems] if isinstance(problems, str) else list(problems)

    def __str__(self) -> str:
        return "\n".join(self.problems)

    def summary(self) -> str:
        """The first problem and the number of others: one line, even where thousands were found."""
        first, more = self.problems[0], len(self.problems) - 1
        first = first if len(first) <= 300 else first[:297] + "..."
        return first + (f" (and {more} more)" if more else "")


def _one_line(text: str, limit: int = 500) -> str:
    line = " ".join(text.replace("\0", "\\0").split())
    half = limit // 2
    return line if len(line) <= limit else f"{line[:half]} ... {line[-half:]}"


class UserError(MegastepError, ValueError):
    pass


class RunFailed(MegastepError, RuntimeError):
    pass


class ConfigError(UserError):
    pass


class YAMLFileError(UserError):
    pass


class ArchitectureError(UserError):
    pass


class RenderError(UserError):
    pass


class WeightsError(UserError):
    pass


class CheckpointError(UserError):
    pass


class DataError(UserError):
    """Problems are shortened to one line: file names and rows may hold anything."""

    def __init__(self, problems: str | list[str]):
        lines = [problems] if isinstance(problems, str) else problems
        super().__init__([_one_line(line) for line in lines])


class EnvError(UserError):
    pass


class CorpusError(UserError):
    pass


class StoreError(UserError):
    pass


class RunDirError(UserError):
    pass


class ReportError(UserError):
    pass


class OutputError(UserError):
    pass


class ClusterError(RunFailed):
    pass


class RunLost(RunFailed):
    """A process or a node ended, for a cause outside of the code: the run can continue from its
    newest checkpoint."""


class PolicyLost(RunLost):
    """A rank's process or node ended, for a cause outside of its code."""


class EngineError(RunFailed):
    pass


class RolloutFailed(RunFailed):
    pass


class RolloutError(RunFailed, ValueError):
    pass


class RoutingLost(RunLost):
    pass


class TrainingError(RunFailed):
    pass


class ReplayError(TrainingError):
    pass


class SyncError(TrainingError):
    pass
