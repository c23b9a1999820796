import base64
import html.parser
import io
import math

import numpy as np
import pytest
from fake_network import network  # noqa: F401
from matplotlib import pyplot
from PIL import Image

from m6jax.foundation.validated import ConfigError
from m6jax.reporting.report import write_comparison, write_report
from m6jax.reporting.report.comparison import comparison_picture, progress
from m6jax.reporting.report.curves import loss_picture, optimization_picture, step_time_picture
from m6jax.reporting.report.experts import columns, expert_load_picture, relative
from m6jax.reporting.report.records import Records, StageSpan
from m6jax.reporting.report.style import running_mean, thin
from m6jax.reporting.writers import MetricWriter, read_records


def train(step, stage="pseudo", **values):
    usual = {
        "loss": 5.0 - step / 100,
        "learning_rate": 1e-3,
        "grad_norm": 1.0,
        "step_seconds": 0.1,
        "tokens_per_second": 30_000.0,
    }
    return {"step": step, "stage": stage, "split": "train", **usual, **values}


def evaluated(step, task, loss):
    return {"step": step, "stage": "pseudo", "split": f"eval/{task}", "loss": loss}


def delink(step):
    return {
        "step": step,
        "stage": "real",
        "split": "delink",
        "loss_before": 4.9,
        "loss_after": 4.875,
    }


def two_stages():
    load = [[0.5, 0.5, 0.5, 0.5], [2.0, 0.0, 1.0, 1.0]]
    records = [train(step, expert_load=load, fraction_dropped=0.25) for step in (10, 20, 30)]
    records += [train(step, "real", expert_load=load, fraction_dropped=0.5) for step in (40, 50)]
    return [*records, delink(30), evaluated(20, "en", 5.0), evaluated(40, "en", 4.5)]


def lines(axes):
    """The labelled lines of a panel as (label, steps, values)."""
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.get_lines()
        if not line.get_label().startswith("_")
    }


def texts(axes):
    return [text.get_text() for text in axes.texts]


def write(directory, records):
    with MetricWriter(directory) as writer:
        for record in records:
            writer.write(record)


def test_pictures_are_written_and_global_state_is_left_alone(tmp_path):
    write(tmp_path, two_stages())

    *paths, page = write_report(tmp_path)

    names = ["loss", "optimization", "expert_load", "step_time"]
    assert [str(path) for path in paths] == [f"{tmp_path}/report/{name}.png" for name in names]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert str(page) == f"{tmp_path}/report/index.html"
    assert pyplot.get_fignums() == []


def test_dense_model_has_no_picture_of_experts(tmp_path):
    write(tmp_path, [train(1)])
    assert [path.name for path in write_report(tmp_path)] == [
        "loss.png",
        "optimization.png",
        "step_time.png",
        "index.html",
    ]


def test_network_path(network):  # noqa: F811
    write("gs://bucket/run", [evaluated(1, "en", 2.0)])
    assert [str(path) for path in write_report("gs://bucket/run")] == [
        "gs://bucket/run/report/loss.png",
        "gs://bucket/run/report/index.html",
    ]
    assert (network / "bucket" / "run" / "report" / "loss.png").exists()


def test_without_records_there_are_no_pictures(tmp_path):
    assert write_report(tmp_path) == []
    assert not (tmp_path / "report").exists()


DENSE = ["loss", "optimization", "step_time"]
SPARSE = ["loss", "optimization", "expert_load", "step_time"]


@pytest.mark.parametrize(
    ("record", "pictures"),
    [
        (train(1, loss=math.nan, grad_norm=math.inf, step_seconds=math.nan), DENSE),
        (train(1, learning_rate=0.0), DENSE),
        (train(1, expert_load=[[0.0, 0.0]], fraction_dropped=0.0), SPARSE),
        (train(1, expert_load=[[math.nan, 1.0]], fraction_dropped=math.nan), SPARSE),
        (train(1, "阶段"), DENSE),
        ({"step": 0, "stage": "pseudo", "split": "train"}, []),
        (delink(3), []),
    ],
)
@pytest.mark.filterwarnings("ignore:Glyph")
def test_odd_runs_can_be_drawn(tmp_path, record, pictures):
    """A picture for all that there is anything of, with lines and names drawn on it."""
    write(tmp_path, [record, record | {"step": 5}])
    paths = write_report(tmp_path)
    assert [path.stem for path in paths] == [*pictures, *["index"] * bool(pictures)]
    for path in paths:
        if path.suffix == ".html":
            check_page(path.read_text())
            continue
        with Image.open(path) as picture:
            assert min(picture.size) > 100
            assert len(picture.convert("RGB").getcolors(2**16)) > 10


def test_series_are_in_order_and_the_later_of_two_records_counts():
    records = Records(
        [train(2, loss=1.0), train(1, loss=None), train(3, loss=math.nan), train(2, loss=4.0)]
        + [evaluated(2, task, 1.0) for task in ("zh", "en")]
    )
    steps, values = records.series("train", "loss")
    np.testing.assert_array_equal(steps, [2, 3])
    np.testing.assert_array_equal(values, [4.0, np.nan])
    assert records.series("train", "absent")[0].shape == (0,)
    assert records.tasks() == ["en", "zh"]
    assert records.arrays("train", "loss") == []


def test_stages():
    assert Records(two_stages()).stages == [StageSpan("pseudo", 10, 30), StageSpan("real", 40, 50)]


def test_loss_picture_has_every_curve_and_the_delink():
    figure = loss_picture(Records(two_stages()))

    (axes,) = figure.axes
    found = lines(axes)
    assert found["train"] == ([10, 20, 30, 40, 50], [4.9, 4.8, 4.7, 4.6, 4.5])
    assert found["eval/en"] == ([20, 40], [5.0, 4.5])
    assert figure.get_suptitle() == "Loss 4.500 at step 50"
    assert texts(axes) == ["pseudo", "real", "delink at step 30\nloss 4.900 → 4.875"]
    assert axes.get_ylabel() == "cross-entropy (nats a token)"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["train", "eval/en"]


def test_loss_that_is_not_finite_is_a_cross_and_leaves_a_gap():
    (axes,) = loss_picture(Records([train(1), train(2, loss=math.inf), train(3)])).axes
    assert lines(axes)["not finite"][0] == [2]
    assert lines(axes)["train"][0] == [1, 3]


def test_long_run_is_a_smooth_line_over_a_faint_one():
    (axes,) = loss_picture(
        Records([train(step, loss=float(step % 2)) for step in range(6000)])
    ).axes
    steps, values = lines(axes)["train"]
    assert len(steps) == 1500
    assert values == [0.5] * 1500
    assert len(axes.get_lines()) == 2


def test_optimization_picture_leaves_out_what_is_not_there():
    records = Records(
        [train(step, grad_norm=norm, learning_rate=None) for step, norm in ((1, 99), (2, 1))]
    )
    (axes,) = optimization_picture(records).axes
    assert (axes.get_ylabel(), axes.get_yscale()) == ("gradient norm", "log")
    assert optimization_picture(Records([evaluated(1, "en", 1.0)])) is None


def test_speed_leaves_compilation_out_of_the_range_and_the_median():
    records = [train(step, step_seconds=0.1 + step / 1000) for step in range(1, 5)]
    records += [train(step, "real", step_seconds=0.2) for step in range(5, 8)]
    records[0]["step_seconds"], records[4]["step_seconds"] = 60.0, 0.21

    top, bottom = step_time_picture(Records(records)).axes

    assert top.get_ylim() == (0, pytest.approx(0.25))  # 1.25 times the usual longest
    assert lines(top)["beyond the axis"][0] == [1]
    assert lines(top)["with compilation"] == ([5], [0.21])
    assert texts(top)[:3] == ["median 103.0 ms", "median 200.0 ms", "60.0 s with compilation"]
    assert texts(bottom) == ["median 30.0k", "median 30.0k"]


def test_speed_of_first_records_alone_is_drawn():
    top, _ = step_time_picture(Records([train(1, step_seconds=8.0)])).axes
    assert top.get_ylim() == (0, 10.0)
    assert lines(top)["with compilation"] == ([1], [8.0])


def test_relative_load():
    load = np.array([[1.0, 3.0], [0.0, 0.0], [np.nan, 5.0]])
    np.testing.assert_array_equal(relative(load), [[0.5, 1.5], [0.0, 0.0], [0.0, 2.0]])


def test_few_experts_are_drawn_one_by_one_and_many_by_rank():
    few = np.arange(6.0).reshape(2, 3)
    assert columns(few) is few

    # 400 experts become 200 columns of two neighbours in rank: 399 and 398, 397 and 396, ...
    many = np.random.default_rng(0).permutation(np.arange(400.0))[None]
    drawn = columns(many)
    np.testing.assert_array_equal(drawn[0], np.arange(398.5, 0, -2))
    assert columns(np.ones((3, 10_000))).shape == (3, 200)


def test_expert_load_picture():
    figure = expert_load_picture(Records(two_stages()))

    image_axes, evenness, dropped = figure.axes[:3]
    np.testing.assert_allclose(
        image_axes.get_images()[0].get_array(), [[1, 1, 1, 1], [2, 0.25, 1, 1]]
    )
    assert "0.00" in texts(image_axes)
    assert image_axes.get_title(loc="left") == (
        "mean of the last 5 records, until step 50, relative to an even load"
    )
    assert figure.get_suptitle() == "Load of 4 experts in 2 MoE layers"
    # The busiest experts are at 1 and at 2: the median layer at 1.5, in every record.
    assert lines(evenness)["busiest expert of the median layer"][1] == [1.5] * 5
    assert list(dropped.get_lines()[0].get_ydata()) == [25, 25, 25, 50, 50]


@pytest.mark.parametrize(("layers", "experts"), [(1, 4), (48, 10_240), (3, 1)])
def test_expert_load_of_any_size(layers, experts):
    load = np.random.default_rng(0).exponential(size=(layers, experts)).tolist()
    figure = expert_load_picture(Records([train(1, expert_load=load)]))
    assert 4 < figure.get_size_inches()[1] < 11


def test_load_whose_layers_change_at_the_delink_shows_the_last():
    records = [train(1, expert_load=[[1.0, 1.0]]), train(2, "real", expert_load=[[1.0, 3.0]] * 4)]
    figure = expert_load_picture(Records(records))
    assert figure.get_suptitle() == "Load of 2 experts in 4 MoE layers"


def test_thin_keeps_few_points_and_averages_many():
    steps, values = np.arange(3000), np.arange(3000.0)
    assert thin(steps[:1500], values[:1500])[0] is not None
    thinned = thin(steps, values)
    np.testing.assert_array_equal(thinned[0], np.arange(0.5, 3000, 2))
    np.testing.assert_array_equal(thinned[1], thinned[0])


def test_running_mean_is_centered():
    np.testing.assert_allclose(
        running_mean(np.array([0.0, 3.0, 0.0, 6.0, 0.0]), 1), [0.0, 1.0, 3.0, 2.0, 0.0]
    )
    np.testing.assert_allclose(running_mean(np.arange(9.0), 3), np.arange(9.0))


class Page(html.parser.HTMLParser):
    """The tags, images and table rows of a page, and every address in it."""

    def __init__(self, text):
        super().__init__()
        self.open, self.images, self.addresses, self.rows = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.addresses += [found[name] for name in ("src", "href", "srcset") if name in found]
        if tag == "img":
            self.images.append(
                base64.b64decode(found["src"].removeprefix("data:image/png;base64,"))
            )
        elif tag == "tr":
            self.rows.append([])
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)


def check_page(text):
    found = Page(text)
    assert found.open == []
    assert all(address.startswith("data:") for address in found.addresses)
    assert "@import" not in text
    assert "url(" not in text
    assert 'name="viewport" content="width=device-width' in text
    for image in found.images:
        with Image.open(io.BytesIO(image)) as picture:
            picture.verify()
    return found


def test_a_page_has_everything_of_a_run(tmp_path):
    write(tmp_path, two_stages())
    (tmp_path / "config.gin").write_text("a.B.c = '<b>'\n")
    *_, path = write_report(tmp_path)
    assert path.name == "index.html"
    text = path.read_text()
    found = check_page(text)
    assert len(found.images) == 4
    assert [row[1:4] for row in found.rows[1:3]] == [
        ["pseudo", "10 to 30", "4.7000"],
        ["real", "40 to 50", "4.5000"],
    ]
    # 30 steps of 0.1 s with 30,000 tokens a second, then 20 more.
    assert [row[4] for row in found.rows[1:3]] == ["90,000", "150,000"]
    assert found.rows[-1][1:4] == ["en", "40", "4.5000"]
    assert "a.B.c = &#x27;&lt;b&gt;&#x27;" in text


def test_runs_are_compared_by_tokens_steps_and_time(tmp_path):
    write(tmp_path / "a", two_stages())
    write(tmp_path / "b", [train(10, step_seconds=0.2), train(20, step_seconds=0.2)])
    (tmp_path / "a" / "config.gin").write_text("x.Y.z = 1\nx.Y.same = 3\n")
    (tmp_path / "b" / "config.gin").write_text("x.Y.z = 2\nx.Y.same = 3\n")
    names = [str(tmp_path / name) for name in "ab"]
    path = write_comparison(names, str(tmp_path / "new" / "page.html"))
    found = check_page(path.read_text())
    assert [row for row in found.rows if row[0].startswith("x.Y")] == [["x.Y.z", "1", "2"]]
    runs = {name: Records(read_records(tmp_path / name)) for name in "ab"}
    figure = comparison_picture(runs)
    panels = figure.axes
    assert [axes.get_xlabel() for axes in panels] == [
        "tokens trained on",
        "steps",
        "hours of training",
    ]
    drawn = [axes.get_lines() for axes in panels]
    np.testing.assert_allclose(drawn[0][-2].get_xdata(), [60_000, 120_000])
    np.testing.assert_allclose(progress(runs["b"])["hours"], [2 / 3600, 4 / 3600])
    assert "delink" in lines(panels[0])
    for what, message in (
        (([*names, str(tmp_path / "none")], str(tmp_path / "x")), "there is no metrics.jsonl"),
        ((names, str(tmp_path / "a/config.gin/page.html")), "--out .* cannot be written"),
    ):
        with pytest.raises(ConfigError, match=message):
            write_comparison(*what)
