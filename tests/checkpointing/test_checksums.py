"""A bit that flips on the disk is found where nothing else would see it."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from m6jax.checkpointing import CheckpointError, Checkpoints, checksums


@pytest.fixture
def step(tmp_path):
    """The directory of a step with 64 kB of zeros, which lie in one file."""
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, {"w": jnp.zeros((128, 128))}, {"position": 5}, {"stage": 1}, wait=True)
    return epath.Path(tmp_path / "3")


def largest(step):
    return max(step.glob("state/ocdbt.process_0/d/*"), key=lambda path: path.stat().length)


def flip(path, byte):
    content = bytearray(path.read_bytes())
    content[byte] ^= 4
    path.write_bytes(bytes(content))


def restored(step):
    with Checkpoints(step.parent) as checkpoints:
        return checkpoints.restore(3, checkpoints.metadata(3))["w"]


def test_a_flipped_bit_of_a_weight_is_found(step):
    file = largest(step)
    flip(file, 50_000)
    message = rf"checkpoint 3: {file} is damaged: its bytes are not those that were written"
    with pytest.raises(CheckpointError, match=message):
        restored(step)
    assert checksums.find(step) is None  # who reads no weights need not know


def test_without_lists_it_would_be_another_number(step):
    """Steps that were written before there were lists are read as they are."""
    flip(largest(step), 50_000)
    (step / "checksums.json").unlink()
    assert np.count_nonzero(restored(step)) == 1


def test_every_file_is_in_one_share(step):
    processes = 3
    files = [*step.glob("state/ocdbt.process_0/d/*"), step / "state/ocdbt.process_0/manifest.ocdbt"]
    assert len(files) > 2
    for file in files:
        content = file.read_bytes()
        flip(file, 0)
        found = [checksums.find(step, share, processes) for share in range(processes)]
        assert [problem for problem in found if problem] == [
            f"{file} is damaged: its bytes are not those that were written"
        ]
        file.write_bytes(content)


def test_a_digit_of_a_document_is_found(step):
    """It is a document as good as the one before."""
    file = step / "data_state" / "metadata"
    file.write_text(file.read_text().replace("5", "7"))
    with Checkpoints(step.parent) as checkpoints:
        assert checkpoints.description(3) == {"stage": 1}
        with pytest.raises(CheckpointError, match=rf"checkpoint 3: {file} is damaged: its bytes"):
            checkpoints.restore_data_state(3)


def test_files_that_are_gone_or_cut(step):
    file = step / "state" / "_sharding"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert checksums.find(step) == (
        f"{file} is damaged: it has {len(content) - 1} bytes, {len(content)} were written"
    )
    file.unlink()
    assert checksums.find(step) == f"{file} is damaged: No such file or directory"


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}', '{"a": [1]}', "\udcff"])
@pytest.mark.parametrize("name", ["checksums.json", "state/checksums.0.json"])
def test_a_list_that_is_damaged(step, name, content):
    file = step / name
    listed = json.loads((step / "checksums.json").read_text())
    file.write_bytes(content.encode(errors="surrogateescape"))
    if name != "checksums.json":
        del listed[name]
        (step / "checksums.json").write_text(json.dumps(listed))
    assert checksums.find(step, 0).startswith(f"{file} is damaged: ")
    if name == "checksums.json":
        assert checksums.find_in(step, "description/metadata").startswith(f"{file} is damaged")
