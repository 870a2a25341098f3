"""A Hugging Face folder ↔ a Megatron checkpoint, in one process, without holding the model.

    import    HF shard ─ one parameter at a time ─► torch_dist file
              memory: one HF shard mapped, one torch_dist file
    export    torch_dist files ─ one parameter at a time ─► HF shard
              memory: one HF shard, twice while it is written

The `sharded_state_dict` of a model on the meta device gives each parameter's key and place in the
checkpoint, `weights/mapping.py` its content. `torch.distributed.checkpoint` requests each tensor
from a planner just before writing it: there its content is computed. When reading, it requests the
target of each tensor from a planner: a part of the parameter.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megastep.checkpoint import manifest, saver
from megastep.checkpoint.unpickle import CheckedReader, check_no_code, first_line
from megastep.config import PolicyConfig
from megastep.distributed import parallel
from megastep.errors import CheckpointError
from megastep.models.architecture import Architecture, read_architecture
from megastep.policy.model import build_model
from megastep.weights.hf_files import HFReader, copy_companions, write_shards, written_atomically
from megastep.weights.mapping import (
    ParamMapping,
    check_shape,
    from_megatron,
    param_mappings,
    to_megatron,
)
from megastep.weights.megatron import global_name

FILE_BYTES = 256 * 2**20  # of a torch_dist file of import_hf
Progress = Callable[[int], None]  # called with the number of parameters since the last call


def parameter_count(arch: Architecture) -> int:
    """The total that a conversion reports to its progress callback."""
    return sum(not mapping.is_copy for mapping in param_mappings(arch).values())


def import_hf(
    source: str | Path, destination: str | Path, progress: Progress = lambda n: None
) -> None:
    """Write a Hugging Face folder as a checkpoint of training step 0, without optimizer state."""
    arch = read_architecture(source)
    reader = HFReader(source)
    with written_atomically(destination) as folder, parallel.alone():
        _stream(folder, _StreamingPlanner(_sharded_parameters(arch), reader, arch, progress))
        torch.save({}, folder / "common.pt")  # Megatron requires the file
        save_config(CheckpointingConfig("torch_dist", 1), str(folder))
        copy_companions(source, folder / manifest.HF)
        manifest.write_manifest(
            folder, manifest.describe(arch, step=0, layout=None, with_optimizer=False)
        )


def export_hf(
    source: str | Path,
    destination: str | Path,
    shard_bytes: int,
    progress: Progress = lambda n: None,
) -> None:
    """Write a checkpoint as a Hugging Face folder, with its config and tokenizer."""
    description = manifest.read_manifest(source)
    arch = read_architecture(Path(source) / manifest.HF)
    check_no_code(source)
    manifest.check_intact(source, description, manifest.data_files(description))
    with written_atomically(destination) as folder, parallel.alone():
        copy_companions(Path(source) / manifest.HF, folder)
        write_shards(folder, _stored_tensors(source, arch, progress), shard_bytes)


def _sharded_parameters(
    arch: Architecture,
) -> dict[ParamMapping, ShardedTensor | ShardedTensorFactory]:
    """Every parameter's mapping and place in a checkpoint; the data is on the meta device."""
    with torch.device("meta"):
        (model,) = build_model(arch, PolicyConfig())
    mappings = param_mappings(arch)
    state = saver.model_state(model)
    return {mappings[global_name(name, model, arch)]: sharded for name, sharded in state.items()}


def _stream(folder: Path, planner: "_StreamingPlanner") -> None:
    """The protocol of `dcp.save`, file by file: the writer frees tensors when it closes their file.

    Each file is planned as if another rank wrote it.
    """
    writer = dcp.FileSystemWriter(folder, thread_count=1)
    writer.storage_meta = StorageMeta  # empty: without the name of the temporary folder
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planner.create_global_plan([SavePlan(items) for items in planner.files()])
    results = [
        writer.write_data(plan, planner).wait() for plan in writer.prepare_global_plan(plans)
    ]
    writer.finish(metadata, results)


class _StreamingPlanner(dcp.DefaultSavePlanner):
    """Plans the whole model; computes a parameter when it is written, and holds one at a time."""

    def __init__(self, sharded: dict, reader: HFReader, arch: Architecture, progress: Progress):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.sharded = sharded
        self.reader = reader
        self.arch = arch
        self.progress = progress
        self.mapping_of: dict[MetadataIndex, ParamMapping] = {}
        self.current: ParamMapping | None = None
        self.tensors: dict[MetadataIndex, Tensor] = {}  # of the current parameter

    def files(self) -> list[list[WriteItem]]:
        """The items of each file."""
        files: list[list[WriteItem]] = [[]]
        size = 0
        for item, nbytes in self._items():
            if files[-1] and size + nbytes > FILE_BYTES:
                files.append([])
                size = 0
            files[-1].append(item)
            size += nbytes
        return files

    def _items(self) -> Iterator[tuple[WriteItem, int]]:
        for mapping, sharded in self.sharded.items():
            # Check every tensor before the conversion, which may take hours.
            dtype = self.reader.dtype(mapping.hf[0][0])
            for name, shape in mapping.hf:
                check_shape(name, self.reader.shape(name), shape)
            for stored in _stored_parts(sharded, sharded.data):
                item = _write_item(stored, dtype)
                self.mapping_of[item.index] = mapping
                yield item, stored.data.numel() * dtype.itemsize

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        mapping = self.mapping_of[write_item.index]
        if self.current is not mapping:
            self._compute(mapping)
            self.progress(1)
        return self.tensors[write_item.index]

    def _compute(self, mapping: ParamMapping) -> None:
        self.current = None
        self.tensors = {}  # free the previous parameter first
        data = to_megatron(mapping, self.reader, self.arch)
        # Clones: the writer keeps them until it closes the file, and views would keep HF shards
        # mapped.
        self.tensors = {
            _index(stored): _with_prepended_axes(stored).clone()
            for stored in _stored_parts(self.sharded[mapping], data)
        }
        self.current = mapping


def _stored_parts(
    sharded: ShardedTensor | ShardedTensorFactory, data: Tensor
) -> list[ShardedTensor]:
    """A parameter as a checkpoint stores it: a gated layer as two tensors, others as one."""
    if isinstance(sharded, ShardedTensorFactory):
        built = dataclasses.replace(sharded, data=data).build()
        return built if isinstance(built, list) else list(built.values())
    return [dataclasses.replace(sharded, data=data, dtype=data.dtype)]


def _index(stored: ShardedTensor) -> MetadataIndex:
    return MetadataIndex(stored.key, torch.Size(stored.global_offset))


def _with_prepended_axes(stored: ShardedTensor) -> Tensor:
    return stored.data.reshape((1,) * stored.prepend_axis_num + tuple(stored.local_shape))


def _write_item(stored: ShardedTensor, dtype: torch.dtype) -> WriteItem:
    sizes = torch.Size((1,) * stored.prepend_axis_num + tuple(stored.local_shape))
    return WriteItem(
        index=_index(stored),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(stored.global_offset), sizes),
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(stored.global_shape),
        ),
    )


def _stored_tensors(
    source: str | Path, arch: Architecture, progress: Progress
) -> Iterator[tuple[str, Tensor]]:
    """Every HF tensor of a checkpoint, read parameter by parameter."""
    reader = CheckedReader(source)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    for mapping, sharded in _sharded_parameters(arch).items():
        parts = _stored_parts(sharded, sharded.data)
        for part in parts:
            _check_stored(part, metadata, source)
        key = parts[-1].key
        dtype = metadata.state_dict_metadata[key].properties.dtype
        data = torch.empty(sharded.data.shape, dtype=dtype)
        try:
            reader.read_data(*_read_plan(_stored_parts(sharded, data), metadata))
        except OSError:
            raise
        except Exception as error:  # damaged files raise almost any type
            raise CheckpointError(f"{source}: {key}: not readable: {first_line(error)}") from error
        yield from from_megatron(mapping, [data], arch)
        progress(1)


def _check_stored(part: ShardedTensor, metadata: Metadata, source: str | Path) -> None:
    stored = metadata.state_dict_metadata.get(part.key)
    shape = torch.Size(part.global_shape)
    if not isinstance(stored, TensorStorageMetadata) or stored.size != shape:
        raise CheckpointError(
            f"{source}: {part.key} is missing, or not of shape {part.global_shape}"
        )


def _read_plan(
    parts: list[ShardedTensor], metadata: Metadata
) -> tuple[LoadPlan, dcp.DefaultLoadPlanner]:
    """A plan that fills these parts in place, however the checkpoint is sharded."""
    items = []
    targets = {}
    for part in parts:
        target = _with_prepended_axes(part)
        chunk = ChunkStorageMetadata(torch.Size(part.global_offset), target.shape)
        for item in create_read_items_for_chunk_list(
            part.key, metadata.state_dict_metadata[part.key], [chunk]
        ):
            items.append(item)
            targets[item] = target
    planner = dcp.DefaultLoadPlanner()
    planner.resolve_tensor = lambda item: narrow_tensor_by_index(
        targets[item], item.dest_offsets, item.lengths
    )
    planner.commit_tensor = lambda item, tensor: None
    return LoadPlan(items), planner
