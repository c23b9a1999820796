import asyncio
import logging

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from saved_states import (
    DESCRIPTION,
    HOST,
    assert_same_bits,
    described,
    make_state,
    placed,
    save,
)

from m6jax.checkpointing import CheckpointError, Checkpoints, arrays
from m6jax.foundation.validated import ConfigError


@pytest.fixture
def checkpoints(tmp_path):
    with Checkpoints(tmp_path / "checkpoints", keep=10) as opened:
        yield opened


@pytest.mark.parametrize("memory_before", [None, HOST])
@pytest.mark.parametrize("memory_after", [None, HOST])
def test_restores_same_bits_on_another_sharding_and_memory(
    checkpoints, memory_before, memory_after
):
    state = make_state(memory=memory_before)
    checkpoints.save(3, state, {"position": 3}, DESCRIPTION, wait=True)

    abstract = described(state, None, "b", memory=memory_after)
    restored = checkpoints.restore(3, abstract)

    assert_same_bits(restored, state)
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(abstract), strict=True):
        assert leaf.sharding == wanted.sharding
    assert restored.params["head"].sharding.memory_kind == (memory_after or "device")


def test_documents_and_metadata_are_read_without_arrays(checkpoints, monkeypatch):
    save(checkpoints, 3, metrics={"loss": 2.5}, wait=True)
    monkeypatch.setattr(arrays, "read_arrays", None)

    assert checkpoints.description(3) == DESCRIPTION
    assert checkpoints.restore_data_state(3) == {"position": 3}
    assert checkpoints.metadata(3) == {
        "params": {
            "head": jax.ShapeDtypeStruct((8, 6), jnp.float32),
            "gate": jax.ShapeDtypeStruct((8, 6), jnp.bfloat16),
        },
        "rng": jax.ShapeDtypeStruct((2,), jnp.uint32),
        "step": jax.ShapeDtypeStruct((), jnp.int32),
    }


def test_without_shardings_numpy_arrays_come_back_in_any_container(checkpoints):
    save(checkpoints, 3, wait=True)

    restored = checkpoints.restore(3, checkpoints.metadata(3))

    assert isinstance(restored["params"]["gate"], np.ndarray)
    assert_same_bits(restored, make_state()._asdict())


def test_arrays_may_be_donated_as_soon_as_save_returns(checkpoints):
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    value = placed(np.arange(2**18, dtype=np.float32).reshape(8, -1), "a")
    expected = np.array(value)

    checkpoints.save(1, {"x": value}, {}, {})
    for _ in range(3):
        value = overwrite(value)
    jax.block_until_ready(value)
    checkpoints.wait()

    np.testing.assert_array_equal(checkpoints.restore(1, {"x": value})["x"], expected)


def test_save_returns_when_written_if_a_leaf_rests_on_the_host(checkpoints, monkeypatch):
    slow_save(monkeypatch)
    save(checkpoints, 1)
    assert checkpoints.steps() == []

    checkpoints.save(2, make_state(memory=HOST), {}, {})
    assert checkpoints.steps() == [1, 2]


def slow_save(monkeypatch, seconds=0.3, error=None):
    """Lets every JSON document take its time in the background, or fail there."""
    write = ocp.JsonCheckpointHandler._save_fn

    async def delayed(self, document, directory):
        await asyncio.sleep(seconds)
        if error is not None:
            raise error
        await write(self, document, directory)

    monkeypatch.setattr(ocp.JsonCheckpointHandler, "_save_fn", delayed)


@pytest.mark.parametrize("method", ["save", "wait", "close"])
def test_failed_background_save_is_raised_with_its_step(tmp_path, monkeypatch, method):
    checkpoints = Checkpoints(tmp_path)
    slow_save(monkeypatch, error=OSError("No space left on device"))
    save(checkpoints, 4)

    with pytest.raises(CheckpointError, match=r"/4 failed: OSError: No space left on device"):
        {
            "save": lambda: save(checkpoints, 5),
            "wait": checkpoints.wait,
            "close": checkpoints.close,
        }[method]()

    assert checkpoints.steps() == []
    monkeypatch.undo()
    if method != "close":
        save(checkpoints, 5, wait=True)
        assert checkpoints.steps() == [5]
        checkpoints.close()


def test_file_in_place_of_the_directory_fails_no_later_than_the_next_save(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    save(checkpoints, 1, wait=True)
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    (tmp_path / "checkpoints").write_text("in the way")

    with pytest.raises(CheckpointError, match=r"saving checkpoint .*/checkpoints/2 failed"):  # noqa: PT012
        save(checkpoints, 2)
        save(checkpoints, 3)
    checkpoints.close()


def test_incomplete_directories_are_passed_over_and_can_be_saved_over(tmp_path, caplog):
    with Checkpoints(tmp_path, keep=10) as checkpoints:
        save(checkpoints, 0)
        save(checkpoints, 1)
    (tmp_path / "5").mkdir()
    unfinished = tmp_path / "7.orbax-checkpoint-tmp"
    unfinished.mkdir()
    (unfinished / "state").mkdir()

    with Checkpoints(tmp_path, keep=10) as checkpoints:
        assert checkpoints.latest() == 1
        assert checkpoints.latest() == 1
        warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert warnings == [
            f"passing over what is not a complete checkpoint: {tmp_path / '5'} (empty)"
        ]
        save(checkpoints, 2)
        save(checkpoints, 5, wait=True)
        assert checkpoints.steps() == [0, 1, 2, 5]
        assert not unfinished.exists()
        assert_same_bits(checkpoints.restore(5, described(make_state())), make_state())


def test_saving_again_replaces_and_removes_the_future(tmp_path, caplog):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save(checkpoints, 1, wait=True)
        save(checkpoints, 2, wait=True)
        save(checkpoints, 1, offset=1.0, wait=True)

        assert checkpoints.steps() == [1]
        assert_same_bits(checkpoints.restore(1, described(make_state())), make_state(1.0))
    assert "left behind: [2]" in caplog.text


def test_keeps_newest_and_best(tmp_path):
    with Checkpoints(tmp_path, keep=1, keep_best=2) as checkpoints:
        for step, loss in enumerate([1.0, 2.0, 3.0, 4.0]):
            save(checkpoints, step, metrics={"loss": loss}, wait=True)
            assert step in checkpoints.steps()
        assert checkpoints.steps() == [0, 1, 3]


def data_files(step):
    """The files with array data that a reader needs, the largest first."""
    files = [path for path in (step / "state").rglob("*") if path.is_file()]
    return sorted(files, key=lambda path: path.stat().st_size)[::-1]


def test_truncated_array_file_is_named(tmp_path, capfd):
    big = {"x": placed(np.arange(2**14, dtype=np.float32).reshape(8, -1), "a")}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, big, {"position": 1}, {"stage": "pseudo"})
        checkpoints.save(2, {"x": big["x"] + 1}, {"position": 2}, {"stage": "pseudo"})
        checkpoints.wait()
        damaged = data_files(tmp_path / "2")[0]
        damaged.write_bytes(damaged.read_bytes()[:100])

        assert checkpoints.latest() == 2
        with pytest.raises(
            CheckpointError, match=rf"checkpoint 2: {damaged} is damaged: .* 100 bytes"
        ):
            checkpoints.restore(2, big)
        assert_same_bits(checkpoints.restore(1, big), big)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "name", ["state/_METADATA", "state/manifest.ocdbt", "state/array_metadatas/process_0"]
)
def test_truncated_file_about_arrays_is_named(checkpoints, tmp_path, name):
    save(checkpoints, 1, wait=True)
    file = tmp_path / "checkpoints" / "1" / name
    file.write_bytes(file.read_bytes()[:20])

    with pytest.raises(CheckpointError, match=rf"checkpoint 1: {file} is damaged: \w+"):
        checkpoints.restore(1, described(make_state()))


@pytest.mark.parametrize(
    ("name", "read"),
    [("description", Checkpoints.description), ("data_state", Checkpoints.restore_data_state)],
)
def test_truncated_document_is_named(checkpoints, tmp_path, name, read):
    save(checkpoints, 1, wait=True)
    file = tmp_path / "checkpoints" / "1" / name / "metadata"
    file.write_text(file.read_text()[:5])

    with pytest.raises(CheckpointError, match=rf"checkpoint 1: {file} is damaged: "):
        read(checkpoints, 1)


def test_tree_that_differs_is_refused_with_both_shapes_before_arrays_are_read(
    checkpoints, monkeypatch
):
    save(checkpoints, 1, wait=True)
    monkeypatch.setattr(arrays, "read_arrays", None)
    asked = {
        "step": jax.ShapeDtypeStruct((), jnp.int32),
        "params": {
            "head": jax.ShapeDtypeStruct((8, 7), jnp.float32),
            "gate": jax.ShapeDtypeStruct((8, 6), jnp.float32),
            "bias": jax.ShapeDtypeStruct((6,), jnp.float32),
        },
    }

    with pytest.raises(CheckpointError) as caught:
        checkpoints.restore(1, asked)

    for line in (
        "params/bias: nothing against float32[6]",
        "params/gate: bfloat16[8,6] against float32[8,6]",
        "params/head: float32[8,6] against float32[8,7]",
        "rng: uint32[2] against nothing",
    ):
        assert f"\n  {line}\n" in str(caught.value)
    assert "Experiment.initial" in str(caught.value)


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_a_leaf_that_may_have_been_saved_with_fewer_bits(checkpoints, caplog, memory):
    state = make_state()
    save(checkpoints, 1, wait=True)
    asked = described(state)
    gate = state.params["gate"]
    place = gate.sharding.with_memory_kind(memory)
    wide = jax.ShapeDtypeStruct(gate.shape, jnp.float32, sharding=place)
    asked = asked._replace(params=asked.params | {"gate": wide})
    with pytest.raises(CheckpointError, match=r"gate: bfloat16\[8,6\] against float32\[8,6\]"):
        checkpoints.restore(1, asked, widen=lambda name: name == "params/head")

    restored = checkpoints.restore(1, asked, widen=lambda name: name == "params/gate")

    assert restored.params["gate"].sharding == place
    assert_same_bits(restored.params["gate"], gate.astype(jnp.float32))
    assert caplog.messages == ["checkpoint 1: params/gate: bfloat16 to float32"]
    narrow = asked.params | {"head": jax.ShapeDtypeStruct((8, 6), jnp.bfloat16)}
    with pytest.raises(CheckpointError, match=r"head: float32\[8,6\] against bfloat16\[8,6\]"):
        checkpoints.restore(1, asked._replace(params=narrow), widen=lambda name: True)


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (
            ValueError("UNAVAILABLE: no route [spec]"),
            CheckpointError,
            "1/state cannot be read: UNAV",
        ),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED"), jax.errors.JaxRuntimeError, "^RESOURCE"),
    ],
)
def test_failed_read_is_no_damage_if_a_device_is_full(
    checkpoints, monkeypatch, error, raised, message
):
    def fail(*_):
        raise error

    save(checkpoints, 1, wait=True)
    monkeypatch.setattr(arrays, "read_arrays", fail)
    with pytest.raises(raised, match=message):
        checkpoints.restore(1, described(make_state()))


def test_damage_is_named_for_metadata_too(checkpoints, tmp_path):
    save(checkpoints, 1, wait=True)
    (tmp_path / "checkpoints" / "1" / "state" / "_METADATA").write_text("{")
    with pytest.raises(CheckpointError, match=r"checkpoint 1: .*/_METADATA is damaged"):
        checkpoints.metadata(1)


def test_absent_step_is_refused_with_those_that_are_there(checkpoints, tmp_path):
    assert (checkpoints.latest(), checkpoints.steps()) == (None, [])
    assert not (tmp_path / "checkpoints").exists()
    save(checkpoints, 1, wait=True)
    with pytest.raises(CheckpointError, match=r"/9: not there \(complete steps here: 1\)"):
        checkpoints.restore(9, {})


@pytest.mark.parametrize(
    ("document", "message"),
    [({"position": {1, 2}}, "data_state cannot be saved as JSON: .*set"), ({}, None)],
)
def test_documents_must_be_json(checkpoints, document, message):
    if message is None:
        checkpoints.save(1, make_state(), document, document, wait=True)
        assert checkpoints.description(1) == {}
        return
    with pytest.raises(CheckpointError, match=message):
        checkpoints.save(1, make_state(), document, {})


def test_timeout_must_be_positive(tmp_path):
    with pytest.raises(ConfigError, match="timeout_seconds: expected at least 1, got 0"):
        Checkpoints(tmp_path, timeout_seconds=0)


def test_says_nothing_by_itself(tmp_path, capfd, caplog):
    with Checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 1, wait=True)
        checkpoints.restore(1, described(make_state()))
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []
