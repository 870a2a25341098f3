"""A Hugging Face folder ↔ a Megatron checkpoint, in one process, without holding the model.

    import    HF shard ─ one parameter at a time ─► torch_dist file       memory: one HF shard mapped, one file
    export    torch_dist files ─ one parameter at a time ─► HF shard      memory: one HF shard, twice while written

The model is built on the meta device and asked, as in training, for its `sharded_state_dict`: that gives each
parameter's key and place in the checkpoint. The conversion tables give its content. `torch.distributed.checkpoint`
asks its planner for a tensor when it is about to write it, which is where the content is made, and for the place
of one that it has read, which is a part of the parameter.
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
from megastep.models.architecture import Architecture, read_architecture
from megastep.policy.model import build_model
from megastep.weights.hf_files import HFReader, copy_companions, write_shards, written_beside
from megastep.weights.mapping import Row, check_shape, from_megatron, rows_of, to_megatron
from megastep.weights.megatron import global_name

FILE_BYTES = 256 * 2**20  # of a checkpoint that import_hf writes
Progress = Callable[[int], None]  # called with the number of parameters done since the last call


def parameter_count(arch: Architecture) -> int:
    """How many parameters a conversion reports to its progress callback."""
    return sum(not row.is_copy for row in rows_of(arch).values())


def import_hf(
    source: str | Path, destination: str | Path, progress: Progress = lambda n: None
) -> None:
    """Write the weights of a Hugging Face folder as a checkpoint of step 0, without optimizer state."""
    arch = read_architecture(source)
    reader = HFReader(source)
    with written_beside(destination) as folder, parallel.alone():
        _stream(folder, _StreamingPlanner(_sharded_parameters(arch), reader, arch, progress))
        torch.save({}, folder / "common.pt")  # Megatron looks for it, empty or not
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
    """Write a checkpoint's weights as a Hugging Face folder, with the config and tokenizer kept beside them."""
    described = manifest.read_manifest(source)
    arch = read_architecture(Path(source) / manifest.HF)
    check_no_code(source)
    manifest.check_intact(source, described, manifest.data_files(described))
    with written_beside(destination) as folder, parallel.alone():
        copy_companions(Path(source) / manifest.HF, folder)
        write_shards(folder, _stored_tensors(source, arch, progress), shard_bytes)


def _sharded_parameters(arch: Architecture) -> dict[Row, ShardedTensor | ShardedTensorFactory]:
    """Every parameter's row and place in a checkpoint; the data is on the meta device."""
    with torch.device("meta"):
        (model,) = build_model(arch, PolicyConfig())
    rows = rows_of(arch)
    state = saver.model_state(model)
    return {rows[global_name(name, model, arch)]: sharded for name, sharded in state.items()}


def _stream(folder: Path, planner: "_StreamingPlanner") -> None:
    """The protocol of `dcp.save`, file by file: the writer lets go of tensors only when it closes their file.

    Each file is planned as if another rank wrote it.
    """
    writer = dcp.FileSystemWriter(folder, thread_count=1)
    writer.storage_meta = (
        StorageMeta  # an empty one: the folder's name here and now is nobody's business
    )
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planner.create_global_plan([SavePlan(items) for items in planner.files()])
    results = [
        writer.write_data(plan, planner).wait() for plan in writer.prepare_global_plan(plans)
    ]
    writer.finish(metadata, results)


class _StreamingPlanner(dcp.DefaultSavePlanner):
    """Plans the whole model; makes a parameter when its bytes are asked for and forgets it with the next one."""

    def __init__(self, sharded: dict, reader: HFReader, arch: Architecture, progress: Progress):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.sharded, self.reader, self.arch, self.progress = sharded, reader, arch, progress
        self.row_of: dict[MetadataIndex, Row] = {}
        self.made: tuple[Row | None, dict] = (None, {})

    def files(self) -> list[list[WriteItem]]:
        """What goes into each file."""
        files, size = [[]], 0
        for item, nbytes in self._items():
            if files[-1] and size + nbytes > FILE_BYTES:
                files.append([])
                size = 0
            files[-1].append(item)
            size += nbytes
        return files

    def _items(self) -> Iterator[tuple[WriteItem, int]]:
        for row, sharded in self.sharded.items():
            # A missing or misshapen tensor must end the conversion before hours of it are done.
            dtype = self.reader.dtype(row.hf[0][0])
            for name, shape in row.hf:
                check_shape(name, self.reader.shape(name), shape)
            for piece in _pieces(sharded, sharded.data):
                item = _write_item(piece, dtype)
                self.row_of[item.index] = row
                yield item, piece.data.numel() * dtype.itemsize

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        row = self.row_of[write_item.index]
        if self.made[0] is not row:
            self.made = (None, {})  # let go before making the next
            data = to_megatron(row, self.reader, self.arch)
            pieces = _pieces(self.sharded[row], data)
            # Copies, for the writer keeps them until it closes the file: views would keep whole HF shards mapped.
            self.made = (
                row,
                {_index(piece): _with_prepended_axes(piece).clone() for piece in pieces},
            )
            self.progress(1)
        return self.made[1][write_item.index]


def _pieces(sharded: ShardedTensor | ShardedTensorFactory, data: Tensor) -> list[ShardedTensor]:
    """A parameter as the checkpoint stores it: a gated layer in two pieces, others in one."""
    if isinstance(sharded, ShardedTensorFactory):
        built = dataclasses.replace(sharded, data=data).build()
        return built if isinstance(built, list) else list(built.values())
    return [dataclasses.replace(sharded, data=data, dtype=data.dtype)]


def _index(piece: ShardedTensor) -> MetadataIndex:
    return MetadataIndex(piece.key, torch.Size(piece.global_offset))


def _with_prepended_axes(piece: ShardedTensor) -> Tensor:
    return piece.data.reshape((1,) * piece.prepend_axis_num + tuple(piece.local_shape))


def _write_item(piece: ShardedTensor, dtype: torch.dtype) -> WriteItem:
    sizes = torch.Size((1,) * piece.prepend_axis_num + tuple(piece.local_shape))
    return WriteItem(
        index=_index(piece),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(piece.global_offset), sizes),
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(piece.global_shape),
        ),
    )


def _stored_tensors(
    source: str | Path, arch: Architecture, progress: Progress
) -> Iterator[tuple[str, Tensor]]:
    """Every HF tensor of a checkpoint, read parameter by parameter."""
    reader = CheckedReader(source)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    for row, sharded in _sharded_parameters(arch).items():
        for piece in _pieces(sharded, sharded.data):
            key = piece.key
            stored = metadata.state_dict_metadata.get(key)
            if not isinstance(stored, TensorStorageMetadata) or stored.size != torch.Size(
                piece.global_shape
            ):
                raise manifest.CheckpointError(
                    f"{source}: {key} is not there, or not of shape {piece.global_shape}"
                )
        data = torch.empty(
            sharded.data.shape, dtype=metadata.state_dict_metadata[key].properties.dtype
        )
        try:
            reader.read_data(*_read_plan(_pieces(sharded, data), metadata))
        except OSError:
            raise
        except Exception as error:  # a tensor of another shape, or none, raises almost anything
            raise manifest.CheckpointError(
                f"{source}: {key}: not readable: {first_line(error)}"
            ) from error
        yield from from_megatron(row, [data], arch)
        progress(1)


def _read_plan(
    pieces: list[ShardedTensor], metadata: Metadata
) -> tuple[LoadPlan, dcp.DefaultLoadPlanner]:
    """What to read for these pieces, however the checkpoint is cut; the pieces are filled in place."""
    items, targets = [], {}
    for piece in pieces:
        target = _with_prepended_axes(piece)
        chunk = ChunkStorageMetadata(torch.Size(piece.global_offset), target.shape)
        for item in create_read_items_for_chunk_list(
            piece.key, metadata.state_dict_metadata[piece.key], [chunk]
        ):
            items.append(item)
            targets[item] = target
    planner = dcp.DefaultLoadPlanner()
    planner.resolve_tensor = lambda item: narrow_tensor_by_index(
        targets[item], item.dest_offsets, item.lengths
    )
    planner.commit_tensor = lambda item, tensor: None
    return LoadPlan(items), planner
