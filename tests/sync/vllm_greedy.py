"""Prints each model's greedy tokens as JSON.

python -m tests.sync.vllm_greedy FOLDERS_JSON PROMPTS_JSON NEW_TOKENS
"""

import json
import os
import sys

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
)


def greedy(folder: str, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=8,
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]


if __name__ == "__main__":
    folders = json.loads(sys.argv[1])
    prompts = json.loads(sys.argv[2])
    new_tokens = int(sys.argv[3])
    print(json.dumps([greedy(folder, prompts, new_tokens) for folder in folders]))
