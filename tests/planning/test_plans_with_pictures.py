"""Plans count the patches that a row has room for."""

import planned

from m6jax.data.config import BuiltinPictures, Pictures, TextData
from m6jax.planning import analytic
from m6jax.planning.settings import PlanSettings
from m6jax.planning.stages import patches_of, stage_shapes

PICTURES = Pictures(grid=(2, 3), patch_size=4, per_row=5)


def run(**changes):
    data = TextData(sources=(BuiltinPictures(),), pictures=PICTURES, length=32)
    return planned.tiny(model={"patch_dim": 48}, data=data, **changes)


def test_patches_are_those_of_the_runs_rows():
    assert run().data.patches_per_row == 30
    assert stage_shapes(run(), 0, 1).patches == 30
    assert patches_of(run(), 7) == 7


def test_without_pictures_they_are_m6s():
    text = TextData(length=32)
    assert patches_of(planned.tiny(model={"patch_dim": 48}, data=text)) == 16
    assert patches_of(planned.tiny(data=text), 7) == 0
    assert PlanSettings().patches is None


def test_each_costs_its_features():
    """Of 8 rows: 4 bytes a feature in the batch; forward and backward 2 x 2 x F x M operations."""
    few, many = (analytic.estimate(run(), 0, 1, patches=n) for n in (10, 30))
    assert many.flops_per_device - few.flops_per_device == 8 * 20 * 4 * 48 * 64
    assert many.hbm_bytes_per_device - few.hbm_bytes_per_device >= 8 * 20 * 4 * 48
