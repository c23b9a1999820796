import jax
import pytest
from etils import epath

from m6jax.checkpointing import Checkpoints, damage


@pytest.fixture
def state(tmp_path):
    """The array files of a checkpoint: one array in pieces, one within the tree."""
    with Checkpoints(tmp_path) as checkpoints:
        arrays = {"big": jax.numpy.arange(4096.0), "small": jax.numpy.ones(2)}
        checkpoints.save(1, arrays, {}, {})
    return epath.Path(tmp_path / "1" / "state")


def only_file(directory, size_above=0, below=10**9):
    files = [path for path in directory.iterdir() if size_above < path.stat().length < below]
    assert len(files) == 1
    return files[0]


def test_whole_checkpoint_has_no_damage(state):
    assert damage.find(state) is None


def test_file_with_pieces_is_named_with_the_piece(state):
    file = only_file(state / "ocdbt.process_0" / "d", size_above=16384)
    file.write_bytes(file.read_bytes()[:16000])
    assert damage.find(state) == (f"{file} is damaged: it has 16000 bytes, big/0 ends at 16384")
    file.unlink()
    assert damage.find(state) == f"{file} is damaged: it is gone, with big/0"


def test_file_with_the_tree_is_named(state):
    file = only_file(state / "d")
    content = file.read_bytes()
    file.write_bytes(content[:10])
    assert damage.find(state) == (
        f"{file} is damaged: it has 10 bytes, a node of the tree ends at {len(content)}"
    )
    file.write_bytes(bytes(len(content)))
    assert damage.find(state).startswith(f"{file} is damaged: ")


@pytest.mark.parametrize("content", [b"", b"nonsense and more"])
def test_manifest_is_named(state, content):
    (state / "manifest.ocdbt").write_bytes(content)
    assert damage.find(state).startswith(f"{state}/manifest.ocdbt is damaged: DATA_LOSS: Error")


def test_documents_are_named(state):
    file = state / "array_metadatas" / "process_0"
    file.write_text("{")
    assert damage.find(state).startswith(f"{file} is damaged: Expecting property name")
