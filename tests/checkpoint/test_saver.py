"""Checkpoints load under every parallel layout with the same results; damaged ones are rejected.

For killed saves see tests/trainer/test_train.py.
"""

import json
import os
import shutil

import numpy as np
import pytest

from megastep.checkpoint.manifest import check_intact, data_files, read_manifest
from megastep.errors import CheckpointError
from tests import cases
from tests.payloads import plant

TP2, PP2, EP2 = dict(tensor=2), dict(pipeline=2), dict(expert=2)


def numbers(steps: list[dict]) -> list[tuple]:
    return [(s["loss"], s["grad_norm"], s["lr"]) for s in steps]


@pytest.fixture(scope="module")
def saved(ranks, models, tmp_path_factory):
    """A checkpoint written under TP2, and the steps that followed it there."""
    folder, _ = models("qwen3_moe")
    root = tmp_path_factory.mktemp("saved")
    steps = ranks(2).run(
        cases.save_then_continue, folder=folder, layout=TP2, root=root, before=3, after=3
    )[0]
    return folder, root / "step_3", steps


@pytest.mark.parametrize(
    "world, layout", [(2, PP2), (2, EP2), (1, {}), (2, TP2), (4, dict(tensor=2, pipeline=2))]
)
def test_loads_under_another_parallel_layout(world, layout, saved, ranks):
    """Three steps: a wrong optimizer state shows from the second on."""
    folder, checkpoint, expected = saved
    steps = ranks(world).run(
        cases.load_and_continue, folder=folder, layout=layout, checkpoint=checkpoint, steps=3
    )[0]
    np.testing.assert_allclose(numbers(steps), numbers(expected), rtol=1e-5)


def test_the_same_parallel_layout_continues_bit_for_bit(saved, ranks):
    folder, checkpoint, expected = saved
    steps = ranks(2).run(
        cases.load_and_continue, folder=folder, layout=TP2, checkpoint=checkpoint, steps=3
    )[0]
    assert numbers(steps) == numbers(expected)


def test_bf16_keeps_its_master_weights(ranks, models, tmp_path):
    folder, _ = models("qwen3_moe")
    arguments = dict(folder=folder, precision="bf16")
    expected = ranks(2).run(
        cases.save_then_continue, layout=EP2, root=tmp_path, before=3, after=3, **arguments
    )[0]
    steps = ranks(2).run(
        cases.load_and_continue, layout=EP2, checkpoint=tmp_path / "step_3", steps=3, **arguments
    )[0]
    assert numbers(steps) == numbers(expected)


def test_asynchronous_save_contains_the_step_of_its_call(ranks, models, tmp_path):
    """Updates during the save must not reach its files; `seal_written` completes it."""
    folder, _ = models("qwen3_moe")
    expected = ranks(2).run(
        cases.save_then_continue,
        folder=folder,
        layout=EP2,
        root=tmp_path,
        before=3,
        after=3,
        asynchronous=True,
    )[0]
    steps = ranks(2).run(
        cases.load_and_continue, folder=folder, layout=EP2, checkpoint=tmp_path / "step_3", steps=3
    )[0]
    assert numbers(steps) == numbers(expected)


def test_files_of_an_asynchronous_save_are_hashed_in_the_background(ranks, models, tmp_path):
    """A rank does not train while it hashes gigabytes."""
    for rank, hashed_by in ranks(2).run(
        cases.who_hashes, folder=models("qwen3_moe")[0], layout=TP2, root=tmp_path
    ):
        assert len(hashed_by) == 1 and rank not in hashed_by
    written = read_manifest(tmp_path / "checkpoints" / "step_1")
    check_intact(tmp_path / "checkpoints" / "step_1", written, data_files(written))
    assert {name.split("_")[2] for name in data_files(written)} == {"0", "1"}  # ranks


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_read_error_of_one_rank_is_raised_on_all(asynchronous, ranks, models, tmp_path):
    """The others would wait for it until their timeout."""
    arguments = dict(
        folder=models("qwen3_moe")[0], layout=TP2, root=tmp_path, asynchronous=asynchronous
    )
    (saving, loading), others = ranks(2).run(cases.read_errors, **arguments)
    assert others == (saving, loading)
    assert "Input/output error" in saving and f"{tmp_path / 'step_2.partial'}/__1_" in saving
    assert loading.startswith(f"{tmp_path / 'step_1'}/")
    assert loading.endswith(": not readable (Input/output error)")


def test_a_write_error_of_rank_0_is_raised_on_all(ranks, models, tmp_path):
    (tmp_path / "file").write_text("")
    arguments = dict(folder=models("qwen3_moe")[0], layout=TP2, root=tmp_path / "file")
    one, two = ranks(2).run(cases.write_error_of_rank_0, **arguments)
    assert one == two and f"Not a directory: '{tmp_path / 'file' / 'step_1.partial'}'" in one


def test_no_second_copy_of_the_policy_stays_in_memory(ranks, models):
    """A process forked after the model was built keeps its pages as they were."""
    folder, _ = models("qwen3_moe")
    assert ranks(1).run(cases.helper_forks_before_the_model, folder=folder) == [True]


@pytest.mark.parametrize("keep, left", [(1, ["step_3"]), (2, ["step_2", "step_3"])])
def test_older_checkpoints_are_removed(keep, left, ranks, models, tmp_path):
    """checkpoint.keep"""
    ranks(1).run(
        cases.saves,
        folder=models("qwen3_moe")[0],
        root=tmp_path,
        settings={"checkpoint.keep": keep},
        count=3,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_random_state_is_restored(ranks, models, tmp_path):
    folder, _ = models("qwen2_tied")
    for expected, found in ranks(2).run(
        cases.random_numbers_after_load, folder=folder, layout=PP2, root=tmp_path
    ):
        assert expected == found


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved[1], tmp_path / "step_3")


def test_truncated_checkpoint_is_rejected(copy, saved, ranks):
    victim = sorted(copy.glob("*.distcp"))[0]
    os.truncate(victim, victim.stat().st_size // 2)
    (error,) = ranks(1).run(cases.loading_error, folder=saved[0], layout={}, checkpoint=copy)
    assert f"{victim}: truncated" in error


def test_checkpoint_with_a_missing_file_is_rejected(copy):
    victim = sorted(copy.glob("*.distcp"))[0]
    victim.unlink()
    with pytest.raises(CheckpointError, match=f"{victim}: missing"):
        read_manifest(copy)


@pytest.mark.parametrize("where", ["tensor", "object", ".metadata", "common.pt"])
def test_code_in_a_checkpoint_is_never_run(where, copy, saved, ranks, tmp_path):
    """A rank reads the files that the driver has checked, and the tensors, which it has not."""
    marker = tmp_path / "marker"
    plant(copy, where, marker)
    (error,) = ranks(1).run(cases.loading_error, folder=saved[0], layout={}, checkpoint=copy)
    if where == "object":  # the random state is not read under another parallel layout
        assert error == "loaded"
        error = ranks(2).run(cases.loading_error, folder=saved[0], layout=TP2, checkpoint=copy)[0]
    assert error.startswith(f"{copy}") and "not readable" in error and len(error.splitlines()) == 1
    assert not marker.exists()


def test_a_flipped_bit_in_a_tensor_is_rejected_by_all_ranks(copy, saved, ranks):
    victim = sorted(copy.glob("*.distcp"))[0]
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    for error in ranks(2).run(cases.loading_error, folder=saved[0], layout=TP2, checkpoint=copy):
        assert f"{victim}: damaged" in error


def test_foreign_folder_is_rejected(tmp_path):
    (tmp_path / "model.pt").write_text("not ours")
    with pytest.raises(CheckpointError, match=f"{tmp_path}: no megastep.json"):
        read_manifest(tmp_path)


def test_newer_format_is_rejected(copy):
    manifest = json.loads((copy / "megastep.json").read_text())
    (copy / "megastep.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99 is newer"):
        read_manifest(copy)


def test_checkpoint_of_another_model_is_rejected(saved, ranks, models):
    other, _ = models("qwen3_moe", num_experts=16)
    (error,) = ranks(1).run(cases.loading_error, folder=other, layout={}, checkpoint=saved[1])
    assert "is a checkpoint of another model: num_local_experts is 8 there, 16 here" in error
