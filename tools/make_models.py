"""Write the model folders of configs/models with their own tokenizers: shape, tokenizer, template.

    chase    64 words, for `chase` and `guess`; the template drops the scratchpad from history
    bytes    every byte a token, for text environments; the template is ChatML without past thinking

No weights are written: use `model.init: random`.
"""

import argparse
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SHAPE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest of vLLM's CPU attention
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
}

CHASE_MARKS = ["<pad>", "<unk>", "<bos>", "<eot>", "<user>", "<asst>", "<tool>"]
CHASE_WORDS = ["<think>", "</think>", "hops", "from", "call", "answer", "error"]
CHASE_WORDS += ["guess", "between", "and", "higher", "lower"]
CHASE_TEMPLATE = """\
{{- '<bos>' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- ' <asst> ' + message.content.split('</think>')[-1].strip() + ' <eot>' }}
    {%- elif message.role in ('user', 'tool') %}
        {{- ' <' + message.role + '> ' + message.content.strip() + ' <eot>' }}
    {%- else %}
        {{- raise_exception('roles are user, assistant and tool') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- ' <asst>' }}
{%- endif %}"""

BYTES_MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES_TEMPLATE = """\
{%- for message in messages %}
    {%- set said = message.content %}
    {%- if message.role == 'assistant' %}
        {%- set said = said.split('</think>')[-1].strip() %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + said + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def chase_tokenizer() -> PreTrainedTokenizerFast:
    words = CHASE_MARKS + CHASE_WORDS
    words += [str(n) for n in range(SHAPE["vocab_size"] - len(words))]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in CHASE_MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eot>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template=CHASE_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in BYTES_MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=BYTES_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


MODELS = {
    "chase": (chase_tokenizer, {}),
    "bytes": (bytes_tokenizer, {"vocab_size": 272, "max_position_embeddings": 8192}),
}


def write(name: str, folder: Path) -> None:
    make, changes = MODELS[name]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make()
    tokenizer.save_pretrained(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "config.json").write_text(json.dumps({**SHAPE, **changes, **ends}, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path("configs/models")
    parser.add_argument("folder", nargs="?", type=Path, default=default, help=f"default: {default}")
    root = parser.parse_args().folder
    for name in MODELS:
        write(name, root / name)
        print(f"{root / name}: written")
