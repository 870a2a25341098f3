"""A GGUF file as a Hugging Face folder: config, tokenizer, chat template, dequantized weights.

transformers translates the metadata and the tensor names; the package `gguf` dequantizes. What
transformers would drop silently is an error: experts, and the factors of a scaled RoPE.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megastep.errors import WeightsError
from megastep.models.architecture import read_architecture
from megastep.text import one_line
from megastep.weights.hf_files import (
    SHARD_BYTES,
    check_complete,
    write_shards,
    written_atomically,
)

# Parts of tensor names that transformers does not translate into the tensors of a folder.
NOT_CONVERTED = {
    "_exps": "a mixture of experts",
    "rope_freqs": "a scaled RoPE",
    "rope_factors": "a scaled RoPE",
}


def convert_gguf(source: Path, destination: Path) -> None:
    """Raises WeightsError for an unreadable file, ArchitectureError for an unsupported family."""
    from transformers import AutoConfig, AutoTokenizer

    _check_tensor_names(source)
    file = {"gguf_file": source.name}
    try:
        config = AutoConfig.from_pretrained(source.parent, **file)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **file)
    except Exception as error:  # transformers raises many types for an invalid file
        raise WeightsError(f"{source}: not a readable GGUF model ({one_line(error)})") from None
    with written_atomically(destination) as folder:
        model = _empty_model(config, source)
        config.architectures = [type(model).__name__]
        config.dtype = torch.bfloat16
        config.save_pretrained(folder)
        read_architecture(folder)  # before the weights: an unsupported family is an error
        tokenizer.save_pretrained(folder)
        _generation_config(tokenizer).save_pretrained(folder)
        write_shards(folder, _tensors(source, model), SHARD_BYTES)
        check_complete(folder)


def _check_tensor_names(source: Path) -> None:
    from gguf import GGUFReader

    if not source.is_file():
        raise WeightsError(f"{source}: no such file")
    try:
        names = [tensor.name for tensor in GGUFReader(source).tensors]
    except Exception as error:  # of several types for an invalid file
        raise WeightsError(f"{source}: not a readable GGUF model ({one_line(error)})") from None
    for part, what in NOT_CONVERTED.items():
        if any(part in name for name in names):
            raise WeightsError(
                f"{source}: has {what}, which is not converted; use the model's Hugging Face folder"
            )


def _empty_model(config, source: Path):
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise WeightsError(f"{source}: not a causal language model ({one_line(error)})") from None


def _generation_config(tokenizer):
    """Engines stop at the token that ends a turn of the chat template."""
    from transformers import GenerationConfig

    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _tensors(source: Path, model) -> Iterator[tuple[str, Tensor]]:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        # It draws a progress bar.
        parsed = load_gguf_checkpoint(
            str(source), return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16
        )
    except (ValueError, NotImplementedError) as error:  # such as an unknown quantization
        raise WeightsError(f"{source}: cannot be dequantized ({one_line(error)})") from None
    for name, tensor in sorted(parsed["tensors"].items()):
        yield name, tensor.to(torch.bfloat16)
