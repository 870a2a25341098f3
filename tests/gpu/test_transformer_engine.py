"""To run first on a machine with a GPU: launch/test.sh is for CPUs, so `python -m pytest tests/gpu` there.

Expected: logits of the Transformer Engine policy within 2e-2 of transformers in bf16, and every parameter of
its layers found in the tables. Not run yet.
"""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and Transformer Engine"),
]


@pytest.mark.parametrize("name", ["llama", "qwen2_tied", "qwen3_yarn", "qwen3_moe", "mixtral"])
def test_logits_equal_transformers(name, models):
    from tests import cases, ranks
    from tests.models import some_tokens

    folder, reference = models(name)
    ranks.current = (0, 1, "127.0.0.1:29533")
    worker = cases.make_worker(folder, {}, precision="bf16")
    logits = worker.logits(some_tokens()).cpu()
    with torch.no_grad():
        expected = reference.to(torch.bfloat16)(some_tokens()).logits.float()
    torch.testing.assert_close(logits, expected, atol=2e-2, rtol=2e-2)
