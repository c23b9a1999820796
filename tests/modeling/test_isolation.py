"""What a token must not depend on: later tokens, other documents, padding."""

import models
import numpy as np
import pytest

DROPLESS = models.experts(capacity_factor=None)
ONE_X = models.experts(capacity_mode="ONE_X", capacity_factor=1.5)
BATCH = models.make_batch(rows=4)


class TestPacking:
    """B13: documents of 3 and 2 tokens in a row of 6, dropless."""

    CONFIG = models.tiny(moe=DROPLESS)

    def logits(self, first, second, bidirectional):
        """Row 0: both documents and padding; row 1: the second alone."""
        batch = {
            "tokens": np.array([[*first, *second, 9], [*second, 9, 9, 9, 9]], np.int32),
            "segment_ids": np.array([[1, 1, 1, 2, 2, 0], [1, 1, 0, 0, 0, 0]], np.int32),
            "positions": np.array([[0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 0, 0]], np.int32),
        }
        prefix = np.array([[1, 1, 0, 1, 1, 0], [1, 1, 0, 0, 0, 0]], np.int32)
        batch["bidirectional"] = prefix * bidirectional
        layout = models.stacked(self.CONFIG)
        return np.asarray(
            models.logits_fn(self.CONFIG, layout)(models.draw(self.CONFIG, layout), batch)
        )

    @pytest.mark.parametrize("bidirectional", [False, True])
    def test_a_packed_document_equals_it_alone(self, bidirectional):
        logits = self.logits([3, 14, 15], [9, 26], bidirectional)
        models.assert_close(logits[0, 3:5], logits[1, :2])

    @pytest.mark.parametrize("bidirectional", [False, True])
    def test_another_first_document_changes_the_second_by_exactly_0(self, bidirectional):
        logits = self.logits([3, 14, 15], [9, 26], bidirectional)
        changed = self.logits([27, 1, 8], [9, 26], bidirectional)
        assert (logits[0, :3] != changed[0, :3]).any(-1).all()
        np.testing.assert_array_equal(changed[0, 3:5], logits[0, 3:5])
        np.testing.assert_array_equal(changed[1], logits[1])


class TestCausality:
    """B14: 64 random tokens; rows 1 to 7 have the suffix after a prefix replaced."""

    PREFIXES = (1, 3, 7, 15, 31, 32, 63)

    def logits(self, moe, bidirectional=0):
        config = models.tiny(moe=moe)
        rng = np.random.default_rng(0)
        tokens = np.tile(rng.integers(0, 32, 64), (8, 1))
        for row, prefix in enumerate(self.PREFIXES, start=1):
            tokens[row, prefix:] = (tokens[row, prefix:] + rng.integers(1, 32, 64 - prefix)) % 32
        batch = models.whole_rows(tokens)
        batch["bidirectional"] = (batch["positions"] < bidirectional).astype(np.int32)
        layout = models.stacked(config)
        return np.asarray(models.logits_fn(config, layout)(models.draw(config, layout), batch))

    @pytest.mark.parametrize(
        "moe",
        [models.experts(), ONE_X, DROPLESS, models.experts(group_size=16, normalize_weights=True)],
        ids=["kx", "1x", "dropless", "groups"],
    )
    def test_logits_of_a_prefix_do_not_depend_on_the_suffix(self, moe):
        logits = self.logits(moe)
        for row, prefix in enumerate(self.PREFIXES, start=1):
            models.assert_close(logits[row, :prefix], logits[0, :prefix])
            assert (logits[row, prefix] != logits[0, prefix]).any()

    @pytest.mark.parametrize("moe", [models.experts(), ONE_X], ids=["kx", "1x"])
    def test_with_a_bidirectional_prefix_beyond_it(self, moe):
        logits = self.logits(moe, bidirectional=5)
        for row, prefix in enumerate(self.PREFIXES, start=1):
            if prefix < 5:
                assert (logits[row, 0] != logits[0, 0]).any()  # the prefix sees itself in full
            else:
                models.assert_close(logits[row, :prefix], logits[0, :prefix])


class TestPadding:
    def test_other_tokens_in_the_padding_change_no_bit(self):
        """B3 for the whole model: loss, real logits, router statistics and gradients."""
        config = models.tiny()
        layout = models.stacked(config)
        params, real = models.draw(config, layout), BATCH["segment_ids"] > 0
        other = {
            "tokens": np.where(real, BATCH["tokens"], 31),
            "targets": np.where(real, BATCH["targets"], 30),
            "positions": np.where(real, BATCH["positions"], 7),
        }
        (total, output), grads = models.loss_fn(config, layout)(params, BATCH)
        (got_total, got), got_grads = models.loss_fn(config, layout)(params, BATCH | other)
        models.assert_equal((got_total, got.router, got_grads), (total, output.router, grads))
        np.testing.assert_array_equal(got.logits[real], output.logits[real])
