"""`megastep import` and `export`: bounded memory, all parallel layouts, one line per mistake."""

import contextlib
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from megastep import cli, signals
from megastep.models.architecture import read_architecture
from megastep.weights.hf_files import HFReader, write_shards
from megastep.weights.mapping import param_mappings
from tests import cases

MEASURED = """
import re, runpy, sys
from pathlib import Path

def peak():  # not ru_maxrss: a child's starts at the peak of the process that forked it
    return int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

import megastep.conversion.offline
imports = peak()
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
print(imports, peak())
"""


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert_ckpt", "tools/convert_ckpt.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def convert(*arguments) -> SimpleNamespace:
    """The tool in this process; tests/trainer/test_train.py runs it as a command."""
    tool = load_tool()
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        code = tool.main([str(a) for a in arguments])
    return SimpleNamespace(returncode=code, stderr=errors.getvalue())


def peak_bytes(*arguments) -> tuple[int, int]:
    """After the imports, whose size depends on the machine, and at the end."""
    command = [sys.executable, "-c", MEASURED, "tools/convert_ckpt.py", *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    imports, peak = run.stdout.splitlines()[-1].split()
    return int(imports), int(peak)


@pytest.mark.parametrize(
    "name, world, layout",
    [
        ("qwen3_moe_dense_layer", 4, dict(pipeline=2, expert=2)),
        ("qwen2_tied", 2, dict(tensor=2)),
    ],
)
def test_import_then_train_equals_loading_the_weights(name, world, layout, ranks, models, tmp_path):
    folder, _ = models(name)
    assert convert("import", folder, tmp_path / "ckpt").returncode == 0
    arguments = dict(folder=folder, layout=layout, steps=2)
    imported = ranks(world).run(cases.load_and_continue, checkpoint=tmp_path / "ckpt", **arguments)
    direct = ranks(world).run(cases.take_steps, **arguments)
    assert imported == direct


@pytest.mark.parametrize("layout", [dict(tensor=2), dict(pipeline=2), dict(expert=2)], ids=str)
def test_export_of_a_trained_checkpoint_equals_the_live_export(layout, ranks, models, tmp_path):
    folder, _ = models("qwen3_moe")
    ranks(2).run(
        cases.save_and_export,
        folder=folder,
        layout=layout,
        root=tmp_path,
        destination=tmp_path / "live",
    )
    assert convert("export", tmp_path / "step_2", tmp_path / "hf").returncode == 0
    live, exported = HFReader(tmp_path / "live"), HFReader(tmp_path / "hf")
    assert set(live.file_of) == set(exported.file_of)
    assert all(torch.equal(live(name), exported(name)) for name in live.file_of)


def test_memory_is_bounded_by_a_shard(tmp_path):
    """A model of 0.9 GB in shards of 60 MB: the peak does not depend on the model."""
    shape = dict(
        model_type="llama",
        hidden_size=1024,
        num_hidden_layers=18,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=2560,
        vocab_size=1000,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    source = tmp_path / "source"
    shard = 60_000_000
    source.mkdir()
    (source / "config.json").write_text(json.dumps(shape))
    mappings = param_mappings(read_architecture(source)).values()
    tensors = ((name, torch.randn(size)) for mapping in mappings for name, size in mapping.hf)
    total = write_shards(source, tensors, shard)
    assert total > 850e6
    measured = (
        peak_bytes("import", source, tmp_path / "ckpt"),
        peak_bytes("export", tmp_path / "ckpt", tmp_path / "hf", "--shard-size", "60MB"),
    )
    print(f"model {total / 1e6:.0f} MB, shard {shard / 1e6:.0f} MB, imports and peak: {measured}")
    for imports, peak in measured:
        # Two HF shards, one file of the checkpoint, and 120 MB for everything else.
        assert peak - imports < 2 * shard + 256e6 + 120e6
    one, two = HFReader(source), HFReader(tmp_path / "hf")
    assert all(torch.equal(one(name), two(name)) for name in one.file_of)


def test_tokenizer_and_config_are_copied(models, tmp_path):
    import shutil

    folder = shutil.copytree(models("llama")[0], tmp_path / "model")
    (folder / "tokenizer.json").write_text('{"made": "up"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert convert("import", folder, tmp_path / "ckpt").returncode == 0
    assert convert("export", tmp_path / "ckpt", tmp_path / "hf").returncode == 0
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "hf" / name).read_text() == (folder / name).read_text()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("import", "nowhere", "out"), "nowhere: no such folder"),
        (
            ("import", "configs/models/tiny-qwen3-moe", "{tmp}/out"),
            "no weights; model.safetensors or",
        ),
        (
            ("import", "configs/models/tiny-qwen3-moe", "{tmp}"),
            "{tmp}: is not empty; give a new folder",
        ),
        (("export", "{tmp}", "{tmp}/out"), "{tmp}: no megastep.json: not a checkpoint of megastep"),
        (("export", "{tmp}/none", "{tmp}/out"), "{tmp}/none: no such checkpoint"),
        (("import", "{tmp}/unknown", "{tmp}/out"), "unknown architecture model_type='gpt9'"),
    ],
)
def test_mistakes_end_in_one_line(arguments, message, tmp_path):
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "gpt9"}')
    done = convert(*(a.format(tmp=tmp_path) for a in arguments))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert message.format(tmp=tmp_path) in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()


def test_megastep_import_and_export_work_in_any_folder(models, tmp_path, monkeypatch):
    """tools/convert_ckpt.py, the same command, is in the repository only."""
    folder, _ = models("llama")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["import", str(folder), "ckpt"]) == 0
    assert cli.main(["export", "ckpt", "hf", "--shard-size", "100KB"]) == 0
    source, exported = HFReader(folder), HFReader("hf")
    assert all(torch.equal(source(name), exported(name)) for name in source.file_of)
    assert len(set(exported.file_of.values())) > 1
    assert cli.main(["export", "nowhere", "out"]) == 2


def test_the_umask_is_respected_and_never_changed(tmp_path, monkeypatch):
    """It is shared by all threads, and others may create files."""
    before = os.umask(0o027)
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask was set"))
    try:
        write_shards(tmp_path, [("a", torch.zeros(2))], 100)
    finally:
        monkeypatch.undo()
        os.umask(before)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o640


def test_wrong_shape_is_found_before_anything_is_written(models, tmp_path):
    import shutil

    from safetensors.torch import load_file

    folder = shutil.copytree(models("llama")[0], tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros(3, 3)
    save_file(tensors, folder / "model.safetensors")
    done = convert("import", folder, tmp_path / "ckpt")
    assert done.returncode == 2 and "error: tensor lm_head.weight has shape [3, 3]" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("command", ["megastep", "tools/convert_ckpt.py"])
@pytest.mark.parametrize(
    "number, code, word", [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 75, "stopped")]
)
def test_a_signal_leaves_nothing_behind(
    number, code, word, command, models, tmp_path, monkeypatch, capsys
):
    """While weights are written, by both names of the command."""
    from megastep.conversion import offline

    def signalled(*arguments):
        assert signals.is_listening()  # else the signal would kill pytest
        os.kill(os.getpid(), number)
        return read(*arguments)

    read = offline.HFReader.__call__
    monkeypatch.setattr(offline.HFReader, "__call__", signalled)
    main = cli.main if command == "megastep" else load_tool().main
    assert main(["import", str(models("llama")[0]), str(tmp_path / "ckpt")]) == code
    assert f"{word}; nothing was left behind" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
