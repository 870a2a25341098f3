import pytest


@pytest.fixture(scope="session", autouse=True)
def imported():
    """Imports take seconds, which must not count for the time limit of a command."""
    import ray  # noqa: F401
    from transformers import AutoConfig, AutoTokenizer  # noqa: F401

    import megastep.plan.suggest  # noqa: F401
    import megastep.trainer.collect  # noqa: F401
    import megastep.trainer.loop  # noqa: F401
    import megastep.trainer.saved_rollouts  # noqa: F401
