"""Bad checkpoints, origin.json and run directories: one line before any process starts."""

import io
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from megastep.checkpoint.loop_state import LoopState
from megastep.checkpoint.manifest import MANIFEST
from megastep.checkpoint.unpickle import _covers
from megastep.models.architecture import read_architecture
from tests.bad_input.harness import CONFIG, Accepted, check_lines, rejected, run
from tests.conversion.test_offline import convert
from tests.payloads import plant, seal_again

MODEL = Path("configs/models/chase")
DEEP = "[" * 100_000 + "]" * 100_000
OTHER_FILES = ("loop.json", "metadata.json", "ready.safetensors", "hf/config.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A checkpoint of the model of CONFIG after step 3."""
    from megastep.conversion.offline import import_hf
    from megastep.weights.hf_files import write_shards
    from megastep.weights.mapping import param_mappings

    root = tmp_path_factory.mktemp("whole")
    source = shutil.copytree(MODEL, root / "hf")
    mappings = param_mappings(read_architecture(source)).values()
    tensors = ((name, torch.zeros(shape)) for mapping in mappings for name, shape in mapping.hf)
    write_shards(source, tensors, 1 << 30)
    import_hf(source, root / "step_3")
    LoopState(step=3).write(root / "step_3")
    seal_again(root / "step_3")
    return root / "step_3"


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "step_3")


def resume(checkpoint: Path) -> tuple[str, ...]:
    return "train", CONFIG, f"run.dir={checkpoint.parent / 'runs'}", f"run.resume={checkpoint}"


def evaluate(checkpoint: Path) -> tuple[str, ...]:
    """The same checks of the folder, without loop state, data and tokenizer."""
    return "eval", CONFIG, f"run.dir={checkpoint.parent / 'runs'}", f"run.resume={checkpoint}"


def export_refused(checkpoint: Path, names: str) -> None:
    done = convert("export", checkpoint, checkpoint.parent / "exported")
    # "export:" begins the lines of the progress bar.
    lines = [line for line in done.stderr.splitlines() if line and not line.startswith("export:")]
    assert done.returncode == 2, done.stderr
    check_lines(lines, names)
    assert len(lines) == 1 and not list(checkpoint.parent.glob("exported*"))


def test_a_valid_checkpoint_is_accepted(copy):
    """The baseline of the cases below."""
    with pytest.raises(Accepted):
        run(*resume(copy))
    assert convert("export", copy, copy.parent / "exported").returncode == 0


@pytest.mark.parametrize("where", [".metadata", "common.pt", MANIFEST, *OTHER_FILES])
def test_code_in_a_checkpoint_is_never_run(where, copy, tmp_path):
    """By no reader, even if sizes and hashes match."""
    marker = tmp_path / "marker"
    plant(copy, where, marker)
    if where != "hf/config.json":  # resuming uses that of model.path
        rejected(*resume(copy), names=str(copy))
    if where not in ("loop.json", "ready.safetensors"):  # export does not read these
        export_refused(copy, str(copy))
    assert not marker.exists()


def test_code_in_a_tensor_is_never_run(copy, tmp_path):
    """Ranks: see tests/checkpoint/test_saver.py."""
    marker = tmp_path / "marker"
    plant(copy, "tensor", marker)
    export_refused(copy, str(copy))
    assert not marker.exists()


@pytest.mark.parametrize(
    "file", [".metadata", "common.pt", "metadata.json", "loop.json", "hf/tokenizer.json"]
)
def test_a_flipped_bit_is_found(file, copy):
    content = bytearray((copy / file).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / file).write_bytes(content)
    rejected(*resume(copy), names=f"{copy / file}: damaged")
    export_refused(copy, f"{copy / file}: damaged")


def test_a_flipped_bit_in_a_tensor_is_found(copy):
    (file,) = copy.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    export_refused(copy, f"{file}: damaged")


def rewrite(path: Path, **entries) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


MANIFESTS = {
    "format": [None, "2", 2.5, True, -1, 0, 1, 99, 10**30, [2], {}],
    "step": [None, "3", 3.5, True, [], {}],
    "model": [None, "qwen", 3, [], {}, {"hidden_size": "x"}, {"hidden_size": 128}],
    "layout": [3, "tp2", [], True],
    "with_optimizer": [None, "yes", 1, []],
    "optimizer_steps": [None, "1", 1.5, []],
    "files": [
        None,
        3,
        "all",
        [],
        ["a"],
        {"a": 3},
        {"a": None},
        {"a": {}},
        {"../a": {"bytes": 1, "sha256": ""}},
        {"/etc/passwd": {"bytes": 1, "sha256": ""}},
        {"a": {"bytes": "1", "sha256": ""}},
        {"a": {"bytes": 1, "sha256": 1}},
        {"": {"bytes": 1, "sha256": ""}},
        {"a\0b": {"bytes": 1, "sha256": ""}},
    ],
}


@pytest.mark.parametrize(
    "key, value", [(key, value) for key, values in MANIFESTS.items() for value in values], ids=str
)
def test_a_manifest_with_wrong_types_is_rejected(key, value, copy):
    rewrite(copy / MANIFEST, **{key: value})
    (line,) = rejected(*evaluate(copy), names=str(copy))
    assert str(key) in line or "format" in line or "missing" in line


@pytest.mark.parametrize("key", ["format", "step", "model", "layout", "with_optimizer", "files"])
def test_a_manifest_without_an_entry_is_rejected(key, copy):
    manifest = json.loads((copy / MANIFEST).read_text())
    del manifest[key]
    (copy / MANIFEST).write_text(json.dumps(manifest))
    rejected(*evaluate(copy), names=f"{copy / MANIFEST}: {key}")


TEXTS = [
    "",
    "{",
    "[]",
    "3",
    "null",
    '"x"',
    DEEP,
    '{"a":' * 5000 + "1" + "}" * 5000,
    "\0\0",
    '{"step": ' + "9" * 5000 + "}",
]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:12] or "empty")
@pytest.mark.parametrize("file", [MANIFEST, "loop.json", "metadata.json"])
def test_a_file_without_a_json_object_is_rejected(file, text, copy):
    (copy / file).write_text(text)
    if file != MANIFEST:
        seal_again(copy)
    rejected(*(resume if file == "loop.json" else evaluate)(copy), names=str(copy / file))


@pytest.mark.parametrize("file", [MANIFEST, "loop.json", "metadata.json", "../origin.json"])
def test_bytes_that_are_not_text_are_rejected(file, copy):
    folder = copy.parent / "runs" / "r"
    folder.mkdir(parents=True)
    path = folder / "origin.json" if "origin" in file else copy / file
    path.write_bytes(b"\xff\xfe\x80{")
    if file not in (MANIFEST, "../origin.json"):
        seal_again(copy)
    rejected(*resume(copy), "run.name=r", names=str(path))


LOOPS = {
    "step": [None, "3", 3.5, True, -1, []],
    "position": [None, 3, [], {"row": "x"}, {"row": 1.5}],
    "unfinished": [None, 3, {}, ["x"], [None], [[1]]],
    "ready_begun": [None, {}, ["x"]],
    "synced_versions": [None, 3, ["x"], [1.5]],
    "evaluates": [None, 1, "yes"],
    "surplus": [1],
}


@pytest.mark.parametrize(
    "key, value", [(key, value) for key, values in LOOPS.items() for value in values], ids=str
)
def test_a_loop_state_with_wrong_types_is_rejected(key, value, copy):
    rewrite(copy / "loop.json", **{key: value})
    seal_again(copy)
    rejected(*resume(copy), names=f"{copy / 'loop.json'}: ")


ORIGINS = [
    "",
    "[]",
    "3",
    "null",
    DEEP,
    "{}",
    '{"checkpoint": 3, "reference": null}',
    '{"checkpoint": "a"}',
    '{"checkpoint": null, "reference": null}',
    '{"checkpoint": "a", "reference": [1]}',
]


@pytest.mark.parametrize("text", ORIGINS, ids=lambda text: text[:40] or "empty")
def test_an_origin_with_wrong_types_is_rejected(text, tmp_path):
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "origin.json").write_text(text)
    rejected(
        "train", CONFIG, f"run.dir={tmp_path}", "run.name=r", names=str(folder / "origin.json")
    )


@pytest.mark.parametrize("name", ["checkpoints", "start"])
def test_a_file_in_place_of_the_checkpoints_folder_is_rejected(name, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / name).write_text("")
    for command in ("train", "eval"):
        rejected(
            command,
            CONFIG,
            f"run.dir={tmp_path}",
            "run.name=r",
            names=f"{tmp_path / 'r' / name}: a folder",
        )


LONG = "long" * 75  # a name may have 255 bytes


@pytest.mark.parametrize(
    "argv",
    [
        ("train", CONFIG, f"run.resume={LONG}"),
        ("eval", CONFIG, f"run.resume={LONG}"),
        ("train", CONFIG, f"run.dir={LONG}"),
        ("eval", CONFIG, f"run.dir={LONG}", "run.name=r"),
        ("rollout", CONFIG, "--out", LONG),
        ("export", LONG, "exported"),
        ("export", "checkpoint", LONG),
        ("import", LONG, "imported"),
        ("view", LONG),
        ("view", LONG, "--model", "m"),
    ],
    ids=lambda argv: " ".join(argv).replace(LONG, "LONG"),
)
def test_an_overlong_file_name_is_rejected(argv):
    rejected(*argv, names=LONG[:80])


def test_an_origin_with_an_overlong_file_name_is_rejected(tmp_path):
    (tmp_path / "origin.json").write_text(json.dumps({"checkpoint": f"/{LONG}", "reference": None}))
    rejected(
        "train",
        CONFIG,
        f"run.dir={tmp_path.parent}",
        f"run.name={tmp_path.name}",
        names=f"/{LONG[:79]}",
    )


@pytest.mark.parametrize(
    "files, names",
    [
        ([".metadata"], ".metadata: missing"),
        (["common.pt"], "common.pt: missing"),
        ([MANIFEST], "no megastep.json"),
    ],
)
def test_a_missing_file_is_named(files, names, copy):
    for file in files:
        (copy / file).unlink()
    rejected(*evaluate(copy), names=names)


def metadata_with(copy: Path, change) -> None:
    import pickle

    found = pickle.loads((copy / ".metadata").read_bytes())
    (copy / ".metadata").write_bytes(pickle.dumps(change(found) or found))
    seal_again(copy)


def point_outside(found):
    for place in found.storage_data.values():
        place.relative_path = "../../elsewhere.distcp"


def move_offsets_beyond_the_end(found):
    for place in found.storage_data.values():
        place.offset = 1 << 60


def drop_descriptions(found):
    found.state_dict_metadata.clear()


def make_shapes_strings(found):
    for stored in found.state_dict_metadata.values():
        stored.size = "large"


@pytest.mark.parametrize(
    "change",
    [
        point_outside,
        move_offsets_beyond_the_end,
        drop_descriptions,
        make_shapes_strings,
        lambda found: [1, 2],
        lambda found: found.storage_data,
        lambda found: "metadata",
    ],
    ids=lambda change: change.__name__,
)
def test_wrong_metadata_is_rejected(change, copy):
    metadata_with(copy, change)
    rejected(*evaluate(copy), names=f"{copy / '.metadata'}: ")
    export_refused(copy, f"{copy / '.metadata'}: ")


def first_tensor(found):
    """The first of two dimensions, in one chunk."""
    return next(stored for stored in found.state_dict_metadata.values() if len(stored.size) == 2)


def chunked(*corners):
    """Replaces the first tensor's chunks; corners return (offsets, sizes) for the tensor's size.

    All chunks are stored at the place of the original one.
    """

    def change(found):
        key, stored = next(
            (k, s) for k, s in found.state_dict_metadata.items() if s is first_tensor(found)
        )
        place = next(place for index, place in found.storage_data.items() if index.fqn == key)
        stored.chunks = [
            ChunkStorageMetadata(torch.Size(begin), torch.Size(sizes))
            for begin, sizes in (corner(*stored.size) for corner in corners)
        ]
        found.storage_data = {
            index: p for index, p in found.storage_data.items() if index.fqn != key
        }
        found.storage_data.update(
            {MetadataIndex(key, chunk.offsets): place for chunk in stored.chunks}
        )

    return change


def remove_from_storage(found):
    del found.storage_data[next(iter(found.storage_data))]


def move_one(found):
    """In the metadata, not in the files."""
    stored = first_tensor(found)
    stored.chunks = [ChunkStorageMetadata(torch.Size([-5, 0]), stored.size)]


def call_it_int8(found):
    first_tensor(found).properties.dtype = torch.int8


UNCOVERED = {
    "no chunk": chunked(),
    "a smaller chunk": chunked(lambda rows, columns: ([0, 0], [1, 1])),
    "a larger chunk": chunked(lambda rows, columns: ([0, 0], [rows + 1, columns])),
    "a chunk of fewer dimensions": chunked(lambda rows, columns: ([0], [rows * columns])),
    "a chunk before the beginning": chunked(lambda rows, columns: ([-5, 0], [rows, columns])),
    "a chunk of negative size": chunked(lambda rows, columns: ([0, 0], [-rows, -columns])),
    "a chunk beyond the end": chunked(
        lambda rows, columns: ([0, 0], [rows, columns]),
        lambda rows, columns: ([rows, 0], [1, columns]),
    ),
    "a missing half": chunked(lambda rows, columns: ([0, 0], [rows // 2, columns])),
    "halves that overlap": chunked(
        lambda rows, columns: ([0, 0], [rows // 2 + 1, columns]),
        lambda rows, columns: ([rows // 2, 0], [rows - rows // 2, columns]),
    ),
    "a hole as large as an overlap": chunked(
        lambda rows, columns: ([0, 0], [2, columns]),
        lambda rows, columns: ([1, 0], [rows - 2, columns]),
    ),
    "a missing quarter": chunked(
        lambda rows, columns: ([0, 0], [1, 1]),
        lambda rows, columns: ([1, 0], [rows - 1, 1]),
        lambda rows, columns: ([0, 1], [1, columns - 1]),
    ),
    "a chunk twice": lambda found: first_tensor(found).chunks.append(first_tensor(found).chunks[0]),
    "a chunk that is not stored": remove_from_storage,
    "a chunk elsewhere than stored": move_one,
    "integers": call_it_int8,
}


@pytest.mark.parametrize("change", UNCOVERED.values(), ids=UNCOVERED)
def test_a_tensor_that_its_chunks_do_not_cover_is_rejected(change, copy):
    """The rest would be uninitialized memory."""
    metadata_with(copy, change)
    rejected(*evaluate(copy), names=f"{copy / '.metadata'}: ")
    export_refused(copy, f"{copy / '.metadata'}: ")


def test_thousands_of_chunks_are_checked_within_seconds():
    chunks = [
        ChunkStorageMetadata(torch.Size([row, column]), torch.Size([1, 1]))
        for row in range(200)
        for column in range(200)
    ]
    begin = time.monotonic()
    assert _covers(torch.Size([200, 200]), chunks)
    assert not _covers(torch.Size([200, 200]), chunks[1:])
    assert time.monotonic() - begin < 2


@pytest.mark.parametrize(
    "kind", [list, dict, torch.zeros(3), torch.zeros(1, 1), torch.zeros(1, 1, 1)], ids=str
)
def test_a_stored_tensor_of_another_shape_is_rejected(kind, copy):
    """The metadata is valid, the file content is not."""
    blob = io.BytesIO()
    torch.save(kind if isinstance(kind, torch.Tensor) else kind(), blob)

    def mislead(found):
        (file,) = copy.glob("*.distcp")
        index = next(index for index in found.storage_data if len(index.offset) == 2)
        place = found.storage_data[index]
        found.storage_data[index] = replace(
            place, offset=file.stat().st_size, length=len(blob.getvalue())
        )
        file.write_bytes(file.read_bytes() + blob.getvalue())

    metadata_with(copy, mislead)
    export_refused(copy, f"{copy}: ")


@pytest.mark.parametrize("link", ["hf/note.txt", "hf/folder", "elsewhere", "common.pt", "hf"])
def test_a_link_in_a_checkpoint_is_rejected(link, copy, tmp_path):
    """An export would copy its target; whoever adds a link can also adapt the hashes."""
    secret = tmp_path / "secret"
    if (copy / link).exists():
        (copy / link).rename(secret)
    elif link in ("hf/folder", "elsewhere"):
        secret.mkdir()
    else:
        secret.write_text("secret")
    (copy / link).symlink_to(secret)
    seal_again(copy)
    rejected(*evaluate(copy), names=f"{copy / link}: is a symbolic link")
    export_refused(copy, f"{copy / link}: is a symbolic link")


def test_a_checkpoint_behind_a_link_is_accepted(copy, tmp_path):
    """Runs may be on another disk."""
    (tmp_path / "linked").symlink_to(copy.parent)
    with pytest.raises(Accepted):
        run(*resume(tmp_path / "linked" / copy.name))
    (tmp_path / "step_9").symlink_to(copy)
    assert convert("export", tmp_path / "step_9", tmp_path / "exported").returncode == 0


@pytest.mark.parametrize("size", [0, 1, 10, 1000])
def test_truncated_metadata_is_rejected(size, copy):
    (copy / ".metadata").write_bytes((copy / ".metadata").read_bytes()[:size])
    seal_again(copy)
    rejected(*evaluate(copy), names=f"{copy / '.metadata'}: ")


def test_code_in_a_model_folder_is_not_imported(tmp_path):
    """Even if config.json and tokenizer_config.json request it."""
    from megastep.rollout.renderer import load_tokenizer

    folder = shutil.copytree(MODEL, tmp_path / "model")
    marker = tmp_path / "marker"
    (folder / "own.py").write_text(f"import os; os.mkdir({str(marker)!r})\nclass Own: pass\n")
    rewrite(
        folder / "config.json",
        auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"},
    )
    rewrite(
        folder / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["own.Own", "own.Own"]},
        tokenizer_class="Own",
    )
    read_architecture(folder)
    load_tokenizer(folder)
    assert not marker.exists()
