"""Hugging Face tensors ↔ Megatron parameters, as tables.

A `Rule` says which HF tensors make one Megatron parameter, and a `Form` says how: it joins them into one
*logical* tensor in which tensor parallelism cuts evenly along a single axis. A rank's parameter is its
cut of that tensor, flattened:

    form      logical tensor                       cut along   local parameter
    Whole     [..]                                 –           the same on every rank
    Columns   [out, in]                            0           [out/n, in]
    Rows      [out, in]                            1           [out, in/n]
    Vocab     [padded vocab, H]                    0           [padded/n, H]
    GateUp    [2, F, H]   gate, then up            1           [2·F/n, H]
    QKV       [groups, q heads + k + v, D, H]      0           [groups/n · (q+2) · D, H]

`rows_of(arch)` expands a family's table for every layer and expert. Import and export of a live model
(`live.py`), checkpoint conversion (`offline.py`) and weight sync all read the same rows. Invariants, held by the tests:

    every Megatron parameter has exactly one row, every HF tensor is in exactly one row
    (the second copy of a tied embedding, on the last pipeline stage, is the one exception);
    HF → Megatron → HF is bit-exact under every layout.

Why not `mbridge` 0.15: its tables name Transformer Engine's parameters only and its models are built with
Transformer Engine's layers, so it cannot serve on a CPU; it reads `rope_theta` from configs where
transformers 5 no longer has it; and its tables are woven into methods that talk to process groups, so they
can be used neither on the meta device nor on a checkpoint in a file.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megastep.errors import WeightsError
from megastep.models.architecture import Architecture

# ---------------------------------------------------------------- forms


class Whole:
    """One HF tensor, the same on every tensor-parallel rank."""

    axis: int | None = None  # of the logical tensor: where tensor parallelism cuts
    hf_axis: int | None = None  # of each HF tensor: where the parts of the cuts lie side by side

    def join(self, tensors: list[Tensor], arch: Architecture) -> Tensor:
        return tensors[0]

    def part(self, logical: Tensor, arch: Architecture, first: int = 0) -> list[Tensor]:
        """The HF tensors, or what a cut that begins at `first` of `axis` holds of them."""
        return [logical]

    def hf_start(self, first: int, shape: tuple[int, ...], arch: Architecture) -> int:
        """Where a cut that begins at `first` of `axis` begins on `hf_axis` of an HF tensor of this shape."""
        return first

    def flatten(self, cut: Tensor) -> Tensor:
        """A cut of the logical tensor as a rank's parameter."""
        return cut

    def unflatten(self, local: Tensor, arch: Architecture) -> Tensor:
        """A rank's parameter as its cut of the logical tensor."""
        return local


class Columns(Whole):
    axis = hf_axis = 0


class Rows(Whole):
    axis = hf_axis = 1


class Vocab(Columns):
    """Padding rows are zero; they exist in Megatron only."""

    def join(self, tensors, arch):
        missing = arch.padded_vocab - arch.vocab
        return torch.nn.functional.pad(tensors[0], (0, 0, 0, missing)) if missing else tensors[0]

    def part(self, logical, arch, first=0):
        return [logical[: max(0, arch.vocab - first)]]


class GateUp(Whole):
    """The two input matrices of a gated feed-forward layer (or their biases), side by side on every rank."""

    axis, hf_axis = 1, 0

    def join(self, tensors, arch):
        return torch.stack(tensors)

    def part(self, logical, arch, first=0):
        return list(logical)

    def flatten(self, cut):
        return cut.flatten(0, 1)

    def unflatten(self, local, arch):
        return local.unflatten(0, (2, -1))


class QKV(Whole):
    """Query groups interleaved: each group's query heads, then its key head, then its value head."""

    axis = hf_axis = 0

    def join(self, tensors, arch):
        return torch.cat(
            [t.unflatten(0, (arch.kv_heads, -1, arch.head_dim)) for t in tensors], dim=1
        )

    def part(self, logical, arch, first=0):
        q_heads = arch.heads // arch.kv_heads
        return [t.flatten(0, 2) for t in logical.split([q_heads, 1, 1], dim=1)]

    def hf_start(self, first, shape, arch):
        return first * shape[0] // arch.kv_heads

    def flatten(self, cut):
        return cut.flatten(0, 2)

    def unflatten(self, local, arch):
        return local.unflatten(0, (-1, arch.heads // arch.kv_heads + 2, arch.head_dim))


# ---------------------------------------------------------------- tables


@dataclass(frozen=True)
class Rule:
    """`hf` pairs a tensor's name with its shape: H hidden, Q query width, K key width, D head, F feed-forward
    width, X expert width, E experts, V vocabulary."""

    megatron: str
    form: Whole
    hf: tuple[tuple[str, str], ...]
    when: str = ""  # a flag of Architecture that must be set; "!flag": must not be
    layers: str = "all"  # all | dense | moe


EMBEDDING = (
    Rule("embedding.word_embeddings.weight", Vocab(), (("model.embed_tokens.weight", "V H"),)),
    Rule("decoder.final_layernorm.weight", Whole(), (("model.norm.weight", "H"),)),
    Rule("output_layer.weight", Vocab(), (("lm_head.weight", "V H"),), when="!tied"),
    # The last pipeline stage keeps a second copy of a tied embedding.
    Rule("output_layer.weight", Vocab(), (("model.embed_tokens.weight", "V H"),), when="tied"),
)
_M, _A = "decoder.layers.{layer}.", "model.layers.{layer}.self_attn."
ATTENTION = (
    Rule(
        _M + "input_layernorm.weight",
        Whole(),
        (("model.layers.{layer}.input_layernorm.weight", "H"),),
    ),
    Rule(
        _M + "self_attention.linear_qkv.weight",
        QKV(),
        (
            (_A + "q_proj.weight", "Q H"),
            (_A + "k_proj.weight", "K H"),
            (_A + "v_proj.weight", "K H"),
        ),
    ),
    Rule(
        _M + "self_attention.linear_qkv.bias",
        QKV(),
        ((_A + "q_proj.bias", "Q"), (_A + "k_proj.bias", "K"), (_A + "v_proj.bias", "K")),
        when="qkv_bias",
    ),
    Rule(
        _M + "self_attention.q_layernorm.weight",
        Whole(),
        ((_A + "q_norm.weight", "D"),),
        when="qk_norm",
    ),
    Rule(
        _M + "self_attention.k_layernorm.weight",
        Whole(),
        ((_A + "k_norm.weight", "D"),),
        when="qk_norm",
    ),
    Rule(_M + "self_attention.linear_proj.weight", Rows(), ((_A + "o_proj.weight", "H Q"),)),
    Rule(
        _M + "self_attention.linear_proj.bias",
        Whole(),
        ((_A + "o_proj.bias", "H"),),
        when="all_bias",
    ),
    Rule(
        _M + "pre_mlp_layernorm.weight",
        Whole(),
        (("model.layers.{layer}.post_attention_layernorm.weight", "H"),),
    ),
)
_F = "model.layers.{layer}.mlp."
DENSE = (
    Rule(
        _M + "mlp.linear_fc1.weight",
        GateUp(),
        ((_F + "gate_proj.weight", "F H"), (_F + "up_proj.weight", "F H")),
        layers="dense",
    ),
    Rule(
        _M + "mlp.linear_fc1.bias",
        GateUp(),
        ((_F + "gate_proj.bias", "F"), (_F + "up_proj.bias", "F")),
        layers="dense",
        when="all_bias",
    ),
    Rule(_M + "mlp.linear_fc2.weight", Rows(), ((_F + "down_proj.weight", "H F"),), layers="dense"),
    Rule(
        _M + "mlp.linear_fc2.bias",
        Whole(),
        ((_F + "down_proj.bias", "H"),),
        layers="dense",
        when="all_bias",
    ),
)


def experts(block: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """The expert layers of a family that keeps them in `block` under these names."""
    router, one = (
        f"model.layers.{{layer}}.{block}.gate.weight",
        f"model.layers.{{layer}}.{block}.experts.{{expert}}.",
    )
    local = _M + "mlp.experts.local_experts.{expert}."
    return (
        Rule(_M + "mlp.router.weight", Whole(), ((router, "E H"),), layers="moe"),
        Rule(
            local + "linear_fc1.weight",
            GateUp(),
            ((f"{one}{gate}.weight", "X H"), (f"{one}{up}.weight", "X H")),
            layers="moe",
        ),
        Rule(local + "linear_fc2.weight", Rows(), ((f"{one}{down}.weight", "H X"),), layers="moe"),
    )


TABLES: dict[str, tuple[Rule, ...]] = {
    "llama": EMBEDDING + ATTENTION + DENSE,
    "qwen2": EMBEDDING + ATTENTION + DENSE,
    "qwen3": EMBEDDING + ATTENTION + DENSE,
    "qwen3_moe": EMBEDDING
    + ATTENTION
    + DENSE
    + experts("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": EMBEDDING + ATTENTION + experts("block_sparse_moe", "w1", "w3", "w2"),
}


@dataclass(frozen=True)
class Row:
    """One Megatron parameter, under its name in the whole model, and the HF tensors it is made of."""

    megatron: str
    form: Whole
    hf: tuple[tuple[str, tuple[int, ...]], ...]  # name, shape
    is_expert: bool
    is_copy: bool  # of a tensor that another row exports


def rows_of(arch: Architecture) -> dict[str, Row]:
    """Every row of the model, by Megatron name, in order of depth."""
    rows: dict[str, Row] = {}
    rules = [r for r in TABLES[arch.family] if _applies(r, arch)]
    for rule in rules:
        if "{layer}" not in rule.megatron:
            _add(rows, rule, arch)
    for layer in range(arch.layers):
        kinds = ("all", "moe" if arch.is_moe_layer(layer) else "dense")
        for rule in rules:
            if "{layer}" in rule.megatron and rule.layers in kinds:
                for expert in range(arch.experts.count) if "{expert}" in rule.megatron else (None,):
                    _add(rows, rule, arch, layer, expert)
    return rows


def _applies(rule: Rule, arch: Architecture) -> bool:
    flag = rule.when.removeprefix("!")
    return not flag or getattr(arch, flag) != rule.when.startswith("!")


def _add(rows: dict[str, Row], rule: Rule, arch: Architecture, layer=None, expert=None) -> None:
    sizes = {
        "H": arch.hidden,
        "Q": arch.heads * arch.head_dim,
        "K": arch.kv_heads * arch.head_dim,
        "D": arch.head_dim,
        "F": arch.ffn_hidden,
        "V": arch.vocab,
        "E": arch.experts and arch.experts.count,
        "X": arch.experts and arch.experts.hidden,
    }
    name = rule.megatron.format(layer=layer, expert=expert)
    rows[name] = Row(
        megatron=name,
        form=rule.form,
        hf=tuple(
            (hf.format(layer=layer, expert=expert), tuple(sizes[s] for s in shape.split()))
            for hf, shape in rule.hf
        ),
        is_expert=expert is not None,
        is_copy=rule.when == "tied",
    )


# ---------------------------------------------------------------- one parameter


def to_megatron(row: Row, read, arch: Architecture, cut: int = 0, cuts: int = 1) -> Tensor:
    """Cut number `cut` of `cuts` of the parameter, from `read(hf_name)`, as Megatron holds it."""
    tensors = []
    for name, shape in row.hf:
        tensors.append(read(name))
        check_shape(name, tensors[-1].shape, shape)
    logical = row.form.join(tensors, arch)
    if row.form.axis is not None:
        logical = logical.chunk(cuts, dim=row.form.axis)[cut]
    return row.form.flatten(logical)


def check_shape(name: str, found, wanted: tuple[int, ...]) -> None:
    if tuple(found) != wanted:
        raise WeightsError(
            f"tensor {name} has shape {list(found)}, by config.json it should have {list(wanted)}"
        )


def from_megatron(row: Row, cuts: list[Tensor], arch: Architecture) -> Iterator[tuple[str, Tensor]]:
    """HF name and tensor of each part, from the parameter's cuts in rank order."""
    parts = [row.form.unflatten(cut, arch) for cut in cuts]
    logical = torch.cat(parts, dim=row.form.axis) if len(parts) > 1 else parts[0]
    for (name, shape), tensor in zip(row.hf, row.form.part(logical, arch), strict=True):
        assert tuple(tensor.shape) == shape, f"{name}: {tuple(tensor.shape)} instead of {shape}"
        yield name, tensor.contiguous()


@dataclass(frozen=True)
class Piece:
    """What one cut of a parameter holds of an HF tensor, and where in it that lies."""

    name: str
    tensor: Tensor
    offset: tuple[int, int]  # row, column

    def into(self, whole: Tensor) -> None:
        part = whole
        for axis in range(whole.ndim):
            part = part.narrow(axis, self.offset[axis], self.tensor.shape[axis])
        part.copy_(self.tensor)


def pieces_of(row: Row, local: Tensor, arch: Architecture, cut: int = 0) -> Iterator[Piece]:
    """Cut number `cut` of the parameter as pieces of HF tensors."""
    logical = row.form.unflatten(local, arch)
    first = 0 if row.form.axis is None else cut * logical.shape[row.form.axis]
    for (name, shape), tensor in zip(row.hf, row.form.part(logical, arch, first), strict=True):
        start = row.form.hf_start(first, shape, arch)
        if tensor.numel():
            yield Piece(name, tensor, (0, start) if row.form.hf_axis == 1 else (start, 0))
