"""X19: reloads of vLLM's expert layers, packed in place or by vLLM, as on a GPU."""

import json
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def reloads() -> dict[str, dict]:
    """In a subprocess: vLLM takes seconds to import, and changes global state."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.sync.vllm_experts"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


every_case = pytest.mark.parametrize("case", ["packed", "reloaded", "padded"])


@every_case
def test_x19_skyrl_1680_vllm_42821_experts_are_packed_again_in_every_weight_sync(case, reloads):
    """There, weights of a second load went unpacked into the memory of packed experts, and the
    engine generated noise. Here, after loads of the same, of other and again of the first weights,
    the memory is that of a layer that was loaded once."""
    assert reloads[case]["equal"] == [True, True, True]


@every_case
def test_x19_verl_7904_a_weight_sync_without_one_expert_is_an_error(case, reloads):
    """There, a layer that lacked experts was taken as loaded. Here it is named; the update can be
    abandoned, and the next one is complete."""
    error = reloads[case]["error"]
    assert error is not None and error.startswith("weights are missing in 1 layers, such as expert")
