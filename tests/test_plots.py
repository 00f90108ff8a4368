"""Plots: they show the numbers, with plain labels that are whole and do not touch."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from twell import plots
from twell.measure.tune import SHARES, TOKENS

LAYERS = (1, 2, 12, 13, 38)
WORDS = {"title": "A title", "subtitle": "a model with $ and \\frac in its name, 4,096 tokens"}


def activity(layers, path):
    active = [20.0 + 30 * (place % 3) for place in range(layers)]
    dead = [0.05 * (place % 4) for place in range(layers)]
    plots.layer_activity(active, [5632] * layers, dead, path, **WORDS)


def gains(layers, path):
    found = [0.8 + 0.1 * place for place in range(layers)]
    plots.layer_gains([0.004] * layers, found, path, **WORDS)


def sizes(layers, path):
    plots.layer_sizes([5632] * layers, [5632 - 128 * place for place in range(layers)], path, **WORDS)


def tuned(tokens, path):
    found = {count: {share: 3 / (1 + share * n) for share in SHARES} for n, count in enumerate(tokens)}
    plots.tuned_gains(found, path, **WORDS)


def limits(names, path):
    plots.tuned_limits({name: {1: 0.0, 4: 0.1, 256: 0.25} for name in names}, path, **WORDS)


@pytest.fixture
def drawn(monkeypatch):
    """Calls a function that draws; the figure."""

    def draw(function, *arguments):
        figures = []
        monkeypatch.setattr(plots, "save_figure", lambda figure, *_: figures.append(figure))
        function(*arguments, None)
        (figure,) = figures
        FigureCanvasAgg(figure).draw()
        return figure

    return draw


def words_of(figure):
    """Every text that shows, with its place."""
    renderer = figure.canvas.get_renderer()
    titles = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        low, high = axes.get_xlim()
        ticks = [t.label1 for t in axes.xaxis.get_major_ticks() if low <= t.get_loc() <= high]
        low, high = axes.get_ylim()
        ticks += [t.label1 for t in axes.yaxis.get_major_ticks() if low <= t.get_loc() <= high]
        titles += [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label, *axes.texts, *ticks]
    shown = [text for text in titles if text.get_visible() and text.get_text()]
    return {text: text.get_window_extent(renderer) for text in shown}


def assert_readable(figure):
    places = words_of(figure)
    for text, box in places.items():
        assert "$" not in text.get_text() or not text.get_parse_math()
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
        assert inside, f"{text.get_text()!r} is cut off"
    boxes = list(places.items())
    for number, (text, box) in enumerate(boxes):
        for other, of_other in boxes[:number]:
            assert not box.overlaps(of_other), f"{text.get_text()!r} on {other.get_text()!r}"


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("draw", [activity, gains, sizes])
def test_plots_by_layer_are_readable(drawn, draw, layers):
    assert_readable(drawn(draw, layers))


@pytest.mark.parametrize("tokens", [(1,), TOKENS])
def test_gains_by_share_are_readable(drawn, tokens):
    figure = drawn(tuned, tokens)
    assert_readable(figure)
    (axes,) = figure.axes
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["1%", "5%", "10%", "20%", "40%", "70%", "100%"]
    assert not axes.get_xticklabels(minor=True)
    assert [list(line.get_ydata()) for line in axes.lines if line.get_linestyle() == "--"] == [[1, 1]]
    assert len(axes.lines) == len(tokens) + 1
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [f"{count:,} token{'s' if count > 1 else ''}" for count in tokens]


def test_limits_by_tokens_are_readable(drawn):
    names = [f"{dtype}, {down}" for dtype in ("float32", "bfloat16") for down in ("by neuron", "as stock")]
    figure = drawn(limits, names)
    assert_readable(figure)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "4", "256"]
    assert [list(line.get_ydata()) for line in axes.lines] == [[0, 10, 25]] * 4
    styles = [(line.get_color(), line.get_linestyle()) for line in axes.lines]
    assert styles[0][0] == styles[1][0] != styles[2][0] == styles[3][0]
    assert [style for _, style in styles] == ["-", ":", "-", ":"]


def heights(axes):
    return [bar.get_height() for bar in axes.patches]


def test_bars_are_the_numbers(drawn):
    above, below = drawn(activity, 2).axes
    assert heights(above) == [20, 50]
    assert heights(below) == pytest.approx([0, 5])
    assert [text.get_text() for text in above.texts] == ["20\n(0.4%)", "50\n(0.9%)"]
    assert list(above.lines[0].get_ydata()) == [35, 35]
    (axes,) = drawn(sizes, 2).axes
    assert heights(axes) == [5632, 5632, 5632, 5504]
    assert [text.get_text() for text in axes.texts] == ["5,632\n(100%)", "5,504\n(98%)"]


def test_panels_show_all_contenders_side_by_side(drawn):
    names = ["PyTorch", "PyTorch, torch.compile", "twell, torch.compile"]
    values = {
        "tokens per ms\n(more is better)": (91.74, 136.5, 192.0),
        "GiB\n(less is better)": (69.5, 53.8, 5.1),
    }
    given = {panel: dict(zip(names, found, strict=True)) for panel, found in values.items()}
    figure = drawn(lambda path: plots.bar_panels(given, path, **WORDS))
    assert_readable(figure)
    assert [heights(axes) for axes in figure.axes] == [list(found) for found in values.values()]
    texts = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert texts == [["91.7", "136", "192"], ["69.5", "53.8", "5.10"]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == names
    assert figure.axes[0].patches[-1].get_facecolor() == figure.axes[1].patches[-1].get_facecolor()


def test_one_panel_is_a_picture_too(drawn):
    (axes,) = drawn(lambda path: plots.bar_panels({"tokens per ms": {"twell": 2.0}}, path, **WORDS)).axes
    assert heights(axes) == [2.0]


@pytest.mark.parametrize(
    ("panels", "message"),
    [({}, "0 panels of 0 names"), ({"speed": dict.fromkeys("abcde", 1.0)}, "1 panels of 5 names")],
)
def test_panels_that_cannot_be_drawn_are_refused(tmp_path, panels, message):
    with pytest.raises(ValueError, match=f"panels: got {message}; accepted: a panel or more, of 1 to 4"):
        plots.bar_panels(panels, tmp_path / "x.png", **WORDS)


def test_a_gain_is_shown_beside_dense_and_a_missing_one_is_none(drawn):
    above, below = drawn(lambda path: plots.layer_gains([None, 0.5], [None, 0.5], path, **WORDS)).axes
    assert heights(above) == [0, 50]
    assert heights(below) == [0, 0.5]
    assert [text.get_text() for text in below.texts] == ["-", "0.50x"]
    assert list(below.lines[0].get_ydata()) == [1, 1]
    assert below.get_ylim()[1] > 1


def test_layers_without_anything_to_show(drawn):
    above, below = drawn(lambda path: plots.layer_activity([0, 0], [8, 8], [0, 0], path, **WORDS)).axes
    assert heights(above) == heights(below) == [0, 0]
    assert above.get_ylim()[1] > 0


def test_a_long_subtitle_takes_two_lines(drawn):
    figure = drawn(lambda path: plots.layer_sizes([8], [8], path, title="A title", subtitle="word " * 40))
    assert_readable(figure)


@pytest.mark.parametrize("suffix", ["png", "pdf", "svg"])
def test_a_file_is_written(tmp_path, suffix):
    path = tmp_path / f"plot.{suffix}"
    sizes(2, path)
    assert path.stat().st_size > 1000
    if suffix == "png":
        with Image.open(path) as image:
            assert image.size == (1094, 518)


def test_what_is_unreadable_is_noticed(drawn):
    figure = drawn(sizes, 2)
    figure.axes[0].set_ylabel("much too long for this figure " * 4)
    figure.canvas.draw()
    with pytest.raises(AssertionError, match="cut off"):
        assert_readable(figure)
