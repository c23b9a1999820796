"""Counting what a program's text does, on texts written by hand."""

import pytest

from m6jax.planning import hlo
from m6jax.planning.estimate import Collective
from m6jax.planning.products import convolution_flops, dot_flops

# A loop of 3 around a loop of 2 around a product of [8, 16] and [16, 4]: 2 * 8 * 16 * 4 = 1,024.
NESTED = """HloModule nested

%inner_condition (p: (s32[], f32[8,4])) -> pred[] {
  %p = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %two = s32[] constant(2)
  ROOT %lt = pred[] compare(%i, %two), direction=LT
}

%inner (q: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %q = (s32[], f32[8,4]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%j, %one)
  %left = f32[8,16]{1,0} iota(), iota_dimension=0
  %right = f32[16,4]{1,0} iota(), iota_dimension=0
  %dot = f32[8,4]{1,0} dot(%left, %right), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %out = (s32[], f32[8,4]{1,0}) tuple(%next, %dot)
}

%outer_condition (r: (s32[], f32[8,4])) -> pred[] {
  %r = (s32[], f32[8,4]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

%outer (s: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %s = (s32[], f32[8,4]{1,0}) parameter(0)
  %zero = s32[] constant(0)
  %start = s32[] copy(%zero)
  %x = f32[8,4]{1,0} get-tuple-element(%s), index=1
  %sum = f32[8,4]{1,0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  %begin = (s32[], f32[8,4]{1,0}) tuple(%start, %sum)
  ROOT %loop = (s32[], f32[8,4]{1,0}) while(%begin), condition=%inner_condition, body=%inner
}

ENTRY %main (a: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %a = (s32[], f32[8,4]{1,0}) parameter(0)
  ROOT %loops = (s32[], f32[8,4]{1,0}) while(%a), condition=%outer_condition, body=%outer,\
 backend_config={"known_trip_count":{"n":"3"}}
}
"""


def entry(*lines):
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule m\n\nENTRY %main (p: f32[4]) -> f32[4] {{\n{body}\n}}\n"


def test_what_a_loop_does_counts_as_often_as_it_goes_round():
    """The outer says how often; of the inner the condition does."""
    program = hlo.measure(NESTED)
    assert program.flops == 3 * 2 * 1024
    assert program.collectives({"data": 2, "expert": 4}) == (
        Collective("all-reduce", ("expert",), 3 * 8 * 4 * 4),
    )
    assert program.unknown_loops == ()


def test_a_loop_of_unknown_length_counts_once_and_is_named():
    program = hlo.measure(NESTED.replace("known_trip_count", "something_else"))
    assert program.flops == 2 * 1024
    assert program.unknown_loops == ("loops",)


def test_a_branch_counts_as_the_one_that_does_most():
    text = NESTED.replace(
        "while(%begin), condition=%inner_condition, body=%inner",
        "conditional(%start, %begin, %begin), branch_computations={%inner, %outer_condition}",
    )
    assert hlo.measure(text).flops == 3 * 1024


def test_copies_between_host_and_device():
    """Slices count as the slice: [1, 8] bfloat16 is 16 bytes; within the device nothing counts."""
    program = hlo.measure(
        entry(
            "%stack = bf16[4,8]{1,0:T(8,128)S(5)} parameter(0)",
            "%i = s32[] constant(1)",
            "%layer = bf16[1,8]{1,0} dynamic-slice(%stack, %i, %i), dynamic_slice_sizes={1,8}",
            "%near = (bf16[1,8]{1,0:S(1)}, bf16[1,8]{1,0}, u32[]{:S(2)}) copy-start(%layer)",
            "%got = bf16[1,8]{1,0:S(1)} copy-done(%near)",
            "%new = bf16[4,8]{1,0:S(5)} dynamic-update-slice(%stack, %got, %i, %i)",
            "%whole = (bf16[4,8]{1,0}, bf16[4,8]{1,0:S(5)}, u32[]) copy-start(%new)",
            "ROOT %end = bf16[4,8]{1,0} copy-done(%whole)",
        )
    )
    assert program.to_device == 16 + 64
    assert program.to_host == 16


def test_collectives_count_their_larger_side_once():
    """An all-gather's result, a reduce-scatter's operand: what travels (n - 1) / n of."""
    program = hlo.measure(
        entry(
            "%p = f32[4]{0} parameter(0)",
            "%begun = (f32[4]{0}, f32[16]{0}) all-gather-start(%p), replica_groups=[2,4]<=[8],"
            " dimensions={0}",
            "%gathered = f32[16]{0} all-gather-done(%begun)",
            "%swapped = f32[16]{0} all-to-all(%gathered), dimensions={0}",
            "%total = f32[16]{0} all-reduce(%swapped), replica_groups=[4,2]<=[2,4]T(1,0),"
            " to_apply=%add",
            "%i = s32[] constant(0)",
            "ROOT %part = f32[4]{0} dynamic-slice(%total, %i), dynamic_slice_sizes={4}",
        )
    )
    found = program.collectives({"data": 2, "expert": 4})
    assert [(c.kind, c.axes, c.bytes) for c in found] == [
        ("all-gather", ("expert",), 64),
        ("all-to-all", ("data", "expert"), 64),
        ("reduce-scatter", ("data",), 64),
    ]


def test_integers_make_no_flops():
    text = NESTED.replace("f32[8,16]", "s32[8,16]").replace("f32[8,4]", "s32[8,4]")
    assert hlo.measure(text).flops == 0


@pytest.mark.parametrize(
    ("result", "left", "right", "attributes", "expected"),
    [
        # 8 places over 8, ends padded: every pair meets once.
        (
            (15, 144, 640),
            (8, 144, 1024),
            (8, 1024, 640),
            "window={size=8 pad=7_7 rhs_reversal=1}, dim_labels=0bf_0io->0bf",
            2 * 144 * 640 * 1024 * 8 * 8,
        ),
        # A product of 80 experts: 80 pairs of places, not 80 * 80.
        (
            (80, 96, 32),
            (80, 96, 16),
            (80, 16, 32),
            "window={size=80 stride=79 lhs_dilate=80}, dim_labels=0bf_0io->0bf",
            2 * 80 * 96 * 16 * 32,
        ),
        # Heads: btnd = btm, mnd, the 16 heads as places of the kernel around one of the input.
        (
            (8, 1, 16, 4),
            (8, 1, 32, 1),
            (1, 32, 16, 4),
            "window={size=1x16 pad=0_0x15_15 rhs_reversal=0x1}, dim_labels=0bf1_0i1o->0b1f",
            2 * 8 * 16 * 32 * 4,
        ),
        # Two groups of features: each output sees half of the input's 6.
        ((2, 4), (2, 6), (3, 4), "dim_labels=bf_io->bf, feature_group_count=2", 2 * 2 * 3 * 4),
    ],
)
def test_convolutions_by_hand(result, left, right, attributes, expected):
    assert convolution_flops(result, left, right, attributes) == expected


def test_a_library_call_of_a_gpu():
    attributes = '{"gemm_backend_config":{"lhs_contracting_dimensions":["2"]}}'
    assert dot_flops((3, 8, 4), (3, 8, 16), attributes) == 2 * 3 * 8 * 4 * 16


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.measure("HloModule nothing")
    with pytest.raises(ValueError, match="unbalanced parentheses"):
        hlo.measure(entry("%p = (f32[4] parameter(0)"))
    with pytest.raises(ValueError, match="no opcode in"):
        hlo.measure(entry("%p = f32[4] 7"))
    with pytest.raises(ValueError, match="without dim_labels"):
        convolution_flops((1, 1), (1, 1), (1, 1), "window={size=1}")
