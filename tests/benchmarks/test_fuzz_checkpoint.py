"""A share of `benchmarks/fuzz_checkpoint.py`: damage is found and named, or changes nothing."""

import pathlib
import random
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import fuzz_checkpoint as fuzz


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    fuzz.write(directory)
    return directory


def test_damage_is_named_or_harmless(whole):
    found = fuzz.run_cases(whole, range(25), seed=1)
    assert [case for case in found if case[2] not in ("named", "harmless")] == []
    assert sum(came == "named" for *_, came in found) > 12


def test_another_number_would_be_seen(whole, tmp_path):
    """The benchmark itself can fail."""
    expected = fuzz.read(whole)
    fuzz.write(tmp_path)
    assert fuzz.outcome(tmp_path, expected) == "harmless"
    other = dict(expected[1], step=expected[1]["step"] + 1)
    assert fuzz.outcome(tmp_path, (expected[0], other)).startswith("other numbers")
    assert fuzz.outcome(tmp_path, ({}, expected[1])).startswith("other documents")
    assert fuzz.outcome(tmp_path / "nothing", expected) == "named"


def test_damage_changes_a_file(tmp_path):
    file = tmp_path / "file"
    for seed in range(8):
        file.write_bytes(bytes(100))
        fuzz.damage(file, random.Random(seed))
        assert file.read_bytes() != bytes(100)
    file.write_bytes(b"")
    assert fuzz.damage(file, random.Random(0)) == "left, it is empty"
