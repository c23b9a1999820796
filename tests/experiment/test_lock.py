"""B17: one directory has one writer; others are refused, and those that died are followed."""

import dataclasses
import json
import subprocess
import threading
import time

import pytest
from fake_network import network  # noqa: F401

from m6jax.checkpointing import CheckpointError
from m6jax.experiment import lock as lock_module
from m6jax.experiment.lock import Holder, Lock, Times
from m6jax.foundation.validated import ConfigError

QUICK = Times(beat=0.05, lease=0.4, settle=0.1, poll=0.01)


def elsewhere(**changes):
    """A holder of which nothing can be seen but its lock."""
    return dataclasses.replace(Holder.here(), host="far", machine="far away", token="t", **changes)


def put(directory, holder):
    content = json.dumps(dataclasses.asdict(holder))
    (directory / "lock.json").write_text(content, encoding="utf-8")


def holder_of(path):
    return Holder.parse(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def left_behind():
    """A holder on this machine whose process has ended, and is not forgotten by its parent."""
    process = subprocess.Popen(["sleep", "60"])
    born = lock_module._born(process.pid)
    assert born is not None
    process.kill()
    while lock_module._born(process.pid) is not None:
        time.sleep(0.01)
    yield dataclasses.replace(Holder.here(), process=process.pid, born=born, token="t")
    process.wait()


def test_a_second_run_is_refused_with_the_name_of_the_first(tmp_path):
    with Lock(tmp_path):
        held = holder_of(tmp_path / "lock.json")
        with pytest.raises(ConfigError, match=rf"{tmp_path} is used by {held} \(stop that run, or"):
            Lock(tmp_path).__enter__()
    assert list(tmp_path.iterdir()) == []
    with Lock(tmp_path):
        pass


def test_one_that_died_on_this_machine_is_followed_at_once(tmp_path, left_behind, caplog):
    put(tmp_path, left_behind)
    with Lock(tmp_path, times=Times(lease=600)):
        assert holder_of(tmp_path / "lock.json").token != "t"
    assert f"taking over from a run that is gone: {left_behind}" in caplog.text


def test_another_process_with_the_same_number_is_not_the_holder(tmp_path):
    put(tmp_path, dataclasses.replace(Holder.here(), born="1", token="t"))
    with Lock(tmp_path, times=Times(lease=600)):
        assert holder_of(tmp_path / "lock.json").token != "t"


def test_one_elsewhere_that_gives_a_sign_of_life_is_obeyed(tmp_path, caplog):
    put(tmp_path, elsewhere())
    beat = threading.Timer(0.2, put, (tmp_path, elsewhere(beats=1)))
    beat.start()
    with pytest.raises(ConfigError, match=r"is used by process \d+ on host far since 20"):
        Lock(tmp_path, times=dataclasses.replace(QUICK, lease=600)).__enter__()
    assert "waiting up to 600 s for a sign of life" in caplog.text
    assert holder_of(tmp_path / "lock.json").beats == 1


@pytest.mark.parametrize("content", [json.dumps(dataclasses.asdict(elsewhere())), "", '{"a": 1}'])
def test_one_elsewhere_that_gives_none_is_followed(tmp_path, content):
    (tmp_path / "lock.json").write_text(content, encoding="utf-8")
    begin = time.monotonic()
    with Lock(tmp_path, times=QUICK):
        assert time.monotonic() - begin > QUICK.lease
        assert [path.name for path in tmp_path.iterdir()] == ["lock.json"]


def test_a_holder_gives_signs_of_life(tmp_path):
    with Lock(tmp_path, times=QUICK) as lock:
        while holder_of(tmp_path / "lock.json").beats < 2:
            time.sleep(0.01)
        lock.require()
        assert holder_of(tmp_path / "lock.json").beats >= 2


@pytest.mark.parametrize(
    ("other", "message"),
    [(elsewhere(), r"was taken over by process \d+ on host far"), (None, "was removed")],
)
def test_who_has_lost_the_lock_writes_nothing_more(tmp_path, other, message):
    with Lock(tmp_path, times=QUICK) as lock:
        (tmp_path / "lock.json").unlink()
        if other:
            put(tmp_path, other)
        lock._thread.join(30)
        with pytest.raises(CheckpointError, match=rf"lock.json {message}.*; nothing more"):
            lock.require()
    assert (tmp_path / "lock.json").exists() == (other is not None)


def test_of_many_that_follow_one_gets_it(tmp_path, left_behind):
    put(tmp_path, left_behind)
    begin, got, refused = threading.Barrier(8), [], []

    def follow():
        begin.wait()
        try:
            got.append(Lock(tmp_path).__enter__())
        except ConfigError as error:
            refused.append(error)

    threads = [threading.Thread(target=follow) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 7)
    got[0].__exit__()


def test_a_lock_that_was_taken_over_meanwhile_is_left_alone(tmp_path, left_behind):
    """One is slow between its look at a dead holder's lock and taking that away."""
    put(tmp_path, left_behind)
    seen = (tmp_path / "lock.json").read_text(encoding="utf-8")
    slow = Lock(tmp_path)
    with Lock(tmp_path) as quick:
        assert not slow._take_over(seen)
        assert quick._is_own(quick._read())
        with pytest.raises(ConfigError, match="is used by"):
            slow.__enter__()
    assert not slow._take_over(seen)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"MODEL_DIR: .*/file/run cannot be written \(Not a dir"):
        Lock(tmp_path / "file" / "run").__enter__()


def test_a_directory_that_it_alone_has_made_is_removed(tmp_path):
    with Lock(tmp_path / "run"):
        assert (tmp_path / "run" / "lock.json").exists()
    assert not (tmp_path / "run").exists()


def test_other_processes_of_a_run_hold_nothing(tmp_path):
    with Lock(tmp_path / "run", enabled=False) as lock:
        lock.require()
        assert not (tmp_path / "run").exists()


def test_on_a_network_path(network):  # noqa: F811
    """There is no exclusive creation, no rename and no append."""
    with Lock("gs://bucket/run", times=QUICK) as lock:
        held = holder_of(network / "bucket/run/lock.json")
        with pytest.raises(ConfigError, match=f"gs://bucket/run is used by {held}"):
            Lock("gs://bucket/run", times=QUICK).__enter__()
        lock.require()
    assert not (network / "bucket/run/lock.json").exists()
    put(network / "bucket/run", elsewhere())
    with Lock("gs://bucket/run", times=QUICK):
        assert holder_of(network / "bucket/run/lock.json").token != "t"


def test_on_a_network_path_the_last_of_two_gets_it(network, monkeypatch):  # noqa: F811
    """The other wrote between the first one's look and the end of its wait."""
    (network / "bucket").mkdir(parents=True)
    real = time.sleep

    def other_writes(seconds):
        if seconds == QUICK.settle:
            put(network / "bucket", dataclasses.replace(Holder.here(), token="t"))
        real(seconds)

    monkeypatch.setattr(lock_module.time, "sleep", other_writes)
    with pytest.raises(ConfigError, match="gs://bucket is used by"):
        Lock("gs://bucket", times=QUICK).__enter__()
