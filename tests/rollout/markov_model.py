"""A model that generates SQL by a Markov chain: a table of successors per token, in its weights.

Attention and experts add nothing to the residual stream, so the next token depends on the last one
only, through an embedding of one unit vector per token of the table and a head with a large weight
for each successor. Tokens, logprobs and routing of a real engine are therefore known in advance.
"""

import json
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

GOLD = "SELECT name FROM product WHERE price > 20"
START = "\n"  # the last token of the generation prompt
END = "<|im_end|>"
RAMBLING = "and so on "
NEXT = {
    START: ["<think>let me see</think>", "<sql>", "<solution>", RAMBLING],
    "<think>let me see</think>": ["<sql>", "<solution>"],
    "<sql>": ["SELECT count(*) FROM customer", "SELECT colour FROM product", "DELETE FROM product"],
    "SELECT count(*) FROM customer": ["</sql>"],
    "SELECT colour FROM product": ["</sql>"],
    "DELETE FROM product": ["</sql>"],
    "</sql>": [END],
    "<solution>": [GOLD, "SELECT 1"],
    GOLD: ["</solution>"],
    "SELECT 1": ["</solution>"],
    "</solution>": [END],
    RAMBLING: [RAMBLING],  # until it is truncated
}
LOGIT = 30.0
TEMPLATE = """\
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' %}
        {%- set content = content.split('</think>')[-1] %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


def tokenizer():
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(mark, special=True) for mark in ("<|im_start|>", END)])
    made.add_tokens([phrase for phrase in NEXT if phrase != START])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, chat_template=TEMPLATE)


def ids_of(made) -> dict[str, int]:
    found = {phrase: made.encode(phrase, add_special_tokens=False) for phrase in [*NEXT, END]}
    assert all(len(ids) == 1 for ids in found.values())
    return {phrase: ids[0] for phrase, ids in found.items()}


class MarkovModel:
    """The model's folder, successors and routing."""

    def __init__(self, folder: Path):
        self.folder = folder
        made = tokenizer()
        made.save_pretrained(folder)
        self.ids = ids_of(made)
        self.next = {self.ids[a]: [self.ids[b] for b in after] for a, after in NEXT.items()}
        self.routing = _write_weights(folder, len(made), self.next)

    def logprob(self, token: int, successor: int) -> float:
        assert successor in self.next[token], (token, successor)
        return -float(np.log(len(self.next[token])))


def _write_weights(folder: Path, vocab: int, following: dict[int, list[int]]) -> np.ndarray:
    """Returns the routing of every token: [vocab, layers, top-k], sorted."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        vocab_size=vocab,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.5,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        embedding = model.get_input_embeddings().weight  # [vocab, hidden]
        head = model.get_output_embeddings().weight  # [vocab, hidden]
        embedding.copy_(torch.randn_like(embedding))
        embedding[:, : len(following)] = 0  # axes reserved for tokens with successors
        head.zero_()
        for axis, (token, successors) in enumerate(following.items()):
            embedding[token] = 0
            embedding[token, axis] = 1
            # The final norm scales the vector to length sqrt(hidden).
            head[successors, axis] = LOGIT / 64**0.5
        normed = embedding / embedding.pow(2).mean(-1, keepdim=True).add(config.rms_norm_eps).sqrt()
        gates = [layer.mlp.gate.weight for layer in model.model.layers]  # each [experts, hidden]
        routing = torch.stack(
            [(normed @ gate.T).topk(2).indices.sort(-1).values for gate in gates], 1
        )
    model.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    assert saved["model_type"] == "qwen3_moe"
    return routing.numpy()
