"""Layouts of which not all leaves have the same unit, or not all layers rest together."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from numbered import tree, units

from m6jax import layouts
from m6jax.foundation.pytrees import differences
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Form, Layout, LayoutError, Part, Run


class TestParts:
    """Leaves with units of their own."""

    LAYOUT = Layout(
        depth=12, unit=4, parts=(Part(pattern="norm/"), Part(pattern="(^|/)w$", unit=2))
    )

    def test_the_first_part_that_fits_a_leaf_gives_its_unit(self):
        units = [
            self.LAYOUT.unit_of(name)
            for name in ("layers/norm/scale", "opt_state/mu/layers/w", "count", "layers/count")
        ]
        assert units == [12, 2, 4, 4]

    def test_repeats_are_those_of_the_leaf(self):
        repeats = [
            self.LAYOUT.repeats_of(name)
            for name in ("layers/norm/scale", "layers/w", "layers/count", "head")
        ]
        assert repeats == [1, 6, 3, 1]

    def test_a_pattern_is_sought_inside_of_the_layer_only(self):
        layout = Layout(depth=4, unit=1, parts=(Part(pattern="layers|mu"),))
        assert layout.unit_of("opt_state/mu/layers/w") == 1

    def test_each_leaf_grows_by_its_own_factor_and_links_back(self):
        old = units(2, Part(pattern="norm", unit=2), Part(pattern="count", unit=2))
        new = units(4, Part(pattern="norm"), Part(pattern="count", unit=2))
        grown = layouts.convert(tree(2), old, new)
        np.testing.assert_array_equal(grown["layers"]["w"][:, 0, 0], [0, 1, 0, 1])
        np.testing.assert_array_equal(grown["layers"]["norm"]["scale"][:, 0], [10, 11] * 6)
        np.testing.assert_array_equal(grown["layers"]["count"], [0, 1])
        models.assert_equal(layouts.link(grown, new, old), tree(2))

    def test_one_leaf_that_shrinks_is_refused_by_name(self):
        old, new = units(2, Part(pattern="norm", unit=4)), units(4, Part(pattern="norm", unit=2))
        with pytest.raises(LayoutError, match=r"layers/norm/scale: a unit of 4 .* expand to 2"):
            layouts.convert(tree(2), old, new)

    def test_units_must_divide_one_another(self):
        with pytest.raises(ConfigError, match=r"Part.unit: 4 does not divide 6.*\(4, 6\)"):
            units(4, Part(pattern="norm", unit=6))

    def test_all_layers_must_be_distinct_to_be_unrolled(self):
        with pytest.raises(ConfigError, match="UNROLLED needs a unit of all 4 layers, not 2"):
            Layout(depth=4, unit=4, form="UNROLLED", parts=(Part(pattern="norm", unit=2),))

    def test_a_part_that_fits_no_leaf_is_refused(self):
        with pytest.raises(ConfigError, match=r"'nrom' is found in no .*\(moe/up, norm/scale\)"):
            units(1, Part(pattern="nrom")).check_names(["norm/scale", "moe/up"])

    @pytest.mark.parametrize(
        ("part", "message"),
        [
            ({"pattern": "("}, r"Part.pattern: '\(' is no pattern"),
            ({"pattern": "norm", "unit": 0}, "Part.unit: 0 distinct layers"),
        ],
    )
    def test_refuses_what_cannot_be(self, part, message):
        with pytest.raises(ConfigError, match=message):
            Part(**part)


class TestRuns:
    """Four layers: the first, the two in the middle, the last."""

    WHOLE = Layout(depth=4, unit=4)
    CUT = Layout(depth=4, unit=4, borders=(1, 3))

    def test_runs_are_what_lies_between_the_borders(self):
        assert self.CUT.runs == (Run(0, 1), Run(1, 2), Run(3, 1))
        assert [run.key for run in self.CUT.runs] == ["0to0", "1to2", "3to3"]
        assert self.WHOLE.runs == (Run(0, 4),)
        assert self.CUT.whole == self.WHOLE

    def test_cut_and_mend(self):
        state = {"params": tree(4), "count": jnp.int32(3)}
        cut = layouts.cut(state, self.CUT)
        np.testing.assert_array_equal(cut["params"]["layers"]["1to2"]["count"], [1, 2])
        np.testing.assert_array_equal(cut["params"]["layers"]["3to3"]["w"][:, 0, 0], [3])
        np.testing.assert_array_equal(cut["params"]["head"], tree(4)["head"])
        models.assert_equal(layouts.mend(cut, self.CUT), state)

    def test_descriptions_are_those_of_the_arrays(self):
        struct = jax.eval_shape(lambda: tree(4))
        cut = layouts.cut(struct, self.CUT)
        assert differences(cut, layouts.cut(tree(4), self.CUT)) == []
        assert differences(layouts.mend(cut, self.CUT), struct) == []

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            (Layout(depth=4, unit=2), CUT),
            (WHOLE, CUT),
            (CUT, WHOLE),
            (CUT, Layout(depth=4, unit=4, borders=(2,))),
            (CUT, Layout(depth=4, unit=4, form=Form.UNROLLED)),
            (Layout(depth=4, unit=4, form=Form.UNROLLED), CUT),
            (CUT, CUT),
        ],
    )
    def test_convert_between_any_runs(self, old, new):
        def lies(layers, layout):
            if layout.form is Form.UNROLLED:
                return layouts.unstack(layers)
            return layouts.cut(layers, layout) if layout.borders else layers

        every = layouts.convert(tree(old.unit), old.whole, self.WHOLE) if old.unit < 4 else tree(4)
        before = tree(old.unit) if old.unit < 4 else lies(every, old)
        models.assert_equal(layouts.convert(before, old, new), lies(every, new))

    def test_names(self):
        name = "opt_state/mu/layers/1to2/moe/up"
        assert self.CUT.unit_of(name) == 4
        assert self.CUT.repeats_of(name) == 1

    @pytest.mark.parametrize(
        ("layout", "name", "layers"),
        [
            (CUT, "layers/1to2/w", range(1, 3)),
            (WHOLE, "layers/w", range(4)),
            (Layout(depth=4, unit=2), "layers/w", range(2)),
            (Layout(depth=4, unit=4, form=Form.UNROLLED), "layers_3/w", range(3, 4)),
            (WHOLE, "head", range(0)),
        ],
    )
    def test_layers_that_a_leaf_holds(self, layout, name, layers):
        assert layout.layers_of(name) == layers

    @pytest.mark.parametrize(
        "settings",
        [
            {"unit": 4, "borders": (0,)},
            {"unit": 4, "borders": (4,)},
            {"unit": 4, "borders": (2, 2)},
            {"unit": 2, "borders": (1,)},
            {"unit": 4, "borders": (2,), "form": Form.UNROLLED},
            {"unit": 4, "borders": (2,), "parts": (Part(pattern="w", unit=2),)},
        ],
    )
    def test_refuses_borders_that_cut_nothing(self, settings):
        with pytest.raises(ConfigError, match=r"Layout.borders: .* do not cut a stack of 4"):
            Layout(depth=4, **settings)

    def test_refuses_trees_that_lie_otherwise(self):
        cut = layouts.cut(tree(4), self.CUT)
        with pytest.raises(LayoutError, match="1to2, 3to3 where the runs 0to1, 2to3 are"):
            layouts.mend(cut, Layout(depth=4, unit=4, borders=(2,)))
        with pytest.raises(LayoutError, match=r"cannot cut, a leading axis of 4"):
            layouts.cut(tree(2), self.CUT)
        with pytest.raises(LayoutError, match="no `layers` to cut"):
            layouts.cut({"head": jnp.ones(3)}, self.CUT)
        with pytest.raises(LayoutError, match="no `layers` to mend"):
            layouts.mend({"head": jnp.ones(3)}, self.CUT)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(depth=4, unit=4, form=Form.UNROLLED),
        Layout(depth=4, unit=1, parts=(Part(pattern="norm"), Part(pattern="moe", unit=2))),
        Layout(depth=4, unit=4, borders=(1, 3)),
    ],
)
def test_layouts_come_back_from_json(layout):
    assert Layout.from_json(layout.to_json()) == layout


def test_documents_from_before_there_were_parts():
    document = {"depth": 4, "unit": 2, "form": "STACKED"}
    assert Layout.from_json(document) == Layout(depth=4, unit=2)
