"""Expected: logprobs of the Transformer Engine policy within 2e-2 of transformers in bf16, for
packed sequences (Transformer Engine's kernel) and branching tries (FlexAttention). Not run yet.
"""

import numpy as np
import pytest
import torch


@pytest.mark.parametrize("pack_layout", ["flat", "trie"])
@pytest.mark.parametrize("name", ["llama", "qwen2_tied", "qwen3_yarn", "qwen3_moe", "mixtral"])
def test_logprobs_equal_transformers(name, pack_layout, models):
    from megastep.distributed import parallel
    from tests import cases, ranks
    from tests.policy.updates import make_groups, micro_batches, plain_logprobs

    folder, reference = models(name)
    groups = make_groups(replay=False)
    ranks.current = (0, 1, "127.0.0.1:29533")
    worker = cases.make_worker(folder, {}, {"policy.precision": "bf16"})
    try:
        batches = micro_batches(groups, 1, 4096, pack_layout)[0]
        assert batches[0].trie.branches == (pack_layout == "trie")
        found = cases.by_step(batches, worker.logprobs(batches))
    finally:
        parallel.stop()
    for group in groups:
        for trajectory in group.trajectories:
            for step in trajectory.steps:
                with torch.no_grad():
                    expected, _ = plain_logprobs(reference, step, replay=False)
                key = (group.id, trajectory.index, step.index)
                np.testing.assert_allclose(
                    found[key], expected.numpy()[step.loss_mask], atol=2e-2, rtol=2e-2
                )
