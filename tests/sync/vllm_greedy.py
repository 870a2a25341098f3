"""Prints each model's greedy tokens as JSON; of a model with experts also those after reloads.

python -m tests.sync.vllm_greedy FOLDERS_JSON PROMPTS_JSON NEW_TOKENS
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
)

LEFT_OUT = "model.layers.1.mlp.experts.3.down_proj.weight"


class Engine:
    """vLLM in this process."""

    def __init__(self, folder: str, prompts: list[list[int]], new_tokens: int):
        from vllm import LLM, SamplingParams

        self.folder = folder
        self.prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
        self.sampling = SamplingParams(
            temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        self.llm = LLM(
            folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            max_model_len=128,
            max_num_seqs=8,
        )

    def greedy(self) -> list[list[int]]:
        self.llm.reset_prefix_cache()
        outputs = self.llm.generate(self.prompts, self.sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def reload(self, factor: float = 1.0, left_out: str | None = None) -> str | None:
        """Reload the folder's weights, with experts' down projections times `factor`, as the
        receivers of megastep do. An error ends it as the driver would, and is returned."""
        weights = self._weights(factor, left_out)
        (error,) = self.llm.collective_rpc(reload_in_worker, args=(weights,))
        return error

    def _weights(self, factor: float, left_out: str | None) -> list[tuple]:
        from safetensors.torch import load_file

        (file,) = Path(self.folder).glob("*.safetensors")
        return [
            (name, tensor * factor if ".experts." in name and "down_proj" in name else tensor)
            for name, tensor in load_file(file).items()
            if name != left_out
        ]


def reload_in_worker(worker, weights: list[tuple]) -> str | None:
    import torch
    from vllm.config import set_current_vllm_config

    from megastep.sync.receiver import CheckedReload

    receiver = CheckedReload()
    receiver.model = worker.model_runner.model
    receiver.device = torch.device("cpu")
    receiver.model_config = worker.model_config
    receiver.vllm_config = SimpleNamespace(additional_config={"sync_verify": False})
    with set_current_vllm_config(worker.vllm_config):
        receiver.start_weight_update()
        receiver.model.load_weights(weights)
        try:
            receiver.finish_weight_update()
        except ValueError as error:
            receiver.abandon_weight_update()
            return str(error)
    return None


def after_reloads(engine: Engine) -> dict[str, dict]:
    """With experts that are packed in place, and with those that vLLM reloads, as on a GPU."""
    from megastep.sync.receiver import PackedExperts

    found = {}
    packs = PackedExperts.supports
    for path, supports in (("packed", packs), ("reloaded", lambda layer: False)):
        with mock.patch.object(PackedExperts, "supports", staticmethod(supports)):
            of_path: dict = {"error": engine.reload(left_out=LEFT_OUT)}
            for name, factor in (("same", 1.0), ("halved", 0.5), ("back", 1.0)):
                assert engine.reload(factor) is None
                of_path[name] = engine.greedy()
        found[path] = of_path
    return found


def main(folders: list[str], prompts: list[list[int]], new_tokens: int) -> dict:
    tokens = []
    reloads = {}
    for folder in folders:
        engine = Engine(folder, prompts, new_tokens)
        tokens.append(engine.greedy())
        if "moe" in Path(folder).name:
            reloads = after_reloads(engine)
    return {"tokens": tokens, "reloads": reloads}


if __name__ == "__main__":
    folders, prompts, new_tokens = map(json.loads, sys.argv[1:])
    print(json.dumps(main(folders, prompts, new_tokens)))
