"""make_samples, and the imports of the data path."""

import subprocess
import sys

from megastep.samples import make_samples

from .rollouts import group_of, trajectory

A, B, C = 1, 2, 3


def test_s1_s2_s3_every_step_is_a_sample_with_its_trajectorys_advantage():
    group = group_of(
        trajectory(([A], [B]), ([A, B, C], [B, B]), rewards=[0, 1]), trajectory(([A], [C])), id=4
    )
    samples = make_samples([group], "grpo_nostd", "token")
    assert [(s.group, s.trajectory, s.step.index, s.advantage) for s in samples] == [
        (4, 0, 0, 0.5),
        (4, 0, 1, 0.5),
        (4, 1, 0, -0.5),
    ]
    assert [s.weight for s in samples] == [0.25] * 3


def test_the_data_path_imports_neither_torch_ray_vllm_nor_megatron():
    modules = ["advantage", "weights", "trie", "packing", "filters", "metrics", "store"]
    code = "import sys; " + "; ".join(f"import megastep.samples.{m}" for m in modules)
    code += "; print([m for m in ('torch', 'ray', 'vllm', 'megatron') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
