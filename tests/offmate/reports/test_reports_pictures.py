"""Pictures: the HTML page in a real browser without a network, and matplotlib's axes."""

import re
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from offmate.solver import items
from offmate.solver.accumulation import AccumulationTrial

from offmate.errors import ArgumentValueError
from offmate.plans.about import About
from offmate.reports.colours import KIND_COLOURS, block_colour, text_on
from offmate.reports.extra import viz
from offmate.reports.items import KINDS

from ... import warm
from ...solver.tiny_schedule import tiny_schedule
from .report_plans import plan_of, resident_plan, tiny_plan


def test_the_page_holds_every_bar_and_needs_nothing_else():
    plan = tiny_plan()
    page = plan.to_html()
    assert page.count("<rect") == sum(bar.end_s > bar.start_s for bar in plan.timeline().wrapped())
    assert "gradient of w" in page and "waiting for" in page
    assert not re.search(r"(src|href)=\"(?!data:)|url\(|@import|https?://", page)
    assert plan._repr_html_() in page


def test_the_curve_reaches_the_peak():
    plan = tiny_plan()
    page = plan.to_html()
    top = int(re.search(r'data-top="(\d+)"', page).group(1))
    paths = re.findall(r'<path fill="[^"]+" d="M([^"]+)L', page)
    heights = [1000 - int(point.split()[1]) for path in paths for point in re.findall(r"\d+ \d+", path)]
    assert max(heights) == round(1000 * plan.predicted_peak_bytes / top)
    svg = re.search(r"<svg viewBox=\"0 0 8000.*?</svg>", page).group(0)
    ElementTree.fromstring(svg)


def test_names_are_escaped():
    schedule = tiny_schedule()
    bad = "<script>alert(1)</script>"
    item = items.parameter(bad)
    renamed = replace(
        schedule,
        item_bytes={(item if one == "p:w" else one): size for one, size in schedule.item_bytes.items()},
        forward=tuple(replace(a, name=item) if a.name == "p:w" else a for a in schedule.forward),
        backward=tuple(replace(a, name=item) if a.name == "p:w" else a for a in schedule.backward),
    )
    page = plan_of(renamed).to_html()
    assert bad not in page and "&lt;script&gt;alert" in page


def test_a_budget_far_above_the_peak_does_not_flatten_the_curve():
    plan = replace(tiny_plan(), budget_bytes=2**40)
    assert 'class="om-budget"' not in plan.to_html()
    assert "One step in 1 TiB" in plan.to_html()


def test_plots_draw_what_the_plan_says(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    import offmate

    plan = tiny_plan()
    rows = [label.get_text().split("\n")[0] for label in plan.plot_timeline().get_yticklabels()]
    assert rows == ["compute", "copies in", "copies out", "CPU updates"]
    memory = plan.plot_memory()
    curve = memory.collections[-1].get_paths()[0].vertices
    assert max(y for _, y in curve) == plan.predicted_peak_bytes
    assert {text.get_text() for text in memory.get_legend().get_texts()} <= set(KINDS)
    kinds = [label.get_text().split("\n")[0] for label in plan.plot_tensors().get_yticklabels()]
    assert kinds == ["parameters", "optimizer states", "activations"]
    sweep = offmate.plot_sweep({"one card": [plan], "another": [resident_plan(), plan]})
    assert {"one card", "another"} < {text.get_text() for text in sweep.get_legend().get_texts()}
    fits = offmate.SweepPoint(100, 50, 1.0, 90, 10, 0.9)
    points = [offmate.SweepPoint(20, 50), fits, offmate.SweepPoint(60, 50, 2.0, 60, 30, 1.5)]
    curve = offmate.plot_sweep(points).lines[0]
    assert list(curve.get_xdata()) == [60, 100] and list(curve.get_ydata()) == [2.0, 1.0]
    for nothing in ([], points[:1]):
        with pytest.raises(ValueError, match="at least one plan"):
            offmate.plot_sweep(nothing)
    for figure in map(plt.figure, plt.get_fignums()):
        figure.canvas.draw()
    plt.close("all")


def luminance(colour):
    from matplotlib.colors import to_rgb

    channels = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]


def contrast(first, second):
    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)


def texts_of(ax):
    from matplotlib.text import Text

    return [text for text in ax.figure.findobj(Text) if text.get_text().strip()]


@pytest.mark.parametrize("name", ["plot_timeline", "plot_memory", "plot_tensors", "plot_sweep"])
def test_plots_can_be_read_on_light_and_on_dark_pages(name):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    import offmate

    plan = replace(tiny_plan(), about=About(model="a model", machine="a card"))

    def drawn():
        ax = offmate.plot_sweep([plan]) if name == "plot_sweep" else getattr(plan, name)()
        ax.figure.canvas.draw()
        return ax

    with plt.style.context("default"):
        ax = drawn()
        assert ax.figure.get_facecolor()[3] == ax.get_facecolor()[3] == 0 and ax.figure.dpi >= 120
        assert texts_of(ax) and all(
            contrast(text.get_color(), page) > 3.5 for text in texts_of(ax) for page in ("#fff", "#111318")
        )
        assert ("a model, on a card" in [text.get_text() for text in texts_of(ax)]) is (name != "plot_sweep")
    with plt.style.context("dark_background"):
        ax = drawn()
        assert contrast(ax.figure.get_facecolor(), "#000") == 1
        assert all(contrast(text.get_color(), "#000") > 3.5 for text in texts_of(ax))
    plt.close("all")


def plot_with_a_backend_that_sets_interactive_as_it_loads(folder):
    import matplotlib

    (folder / "late_backend.py").write_text(
        "import matplotlib\nfrom matplotlib.backends.backend_agg import *\nmatplotlib.interactive(True)\n"
    )
    sys.path.insert(0, str(folder))
    matplotlib.use("module://late_backend")
    assert "late_backend" not in sys.modules and not matplotlib.is_interactive()
    tiny_plan().plot_timeline()
    assert "late_backend" in sys.modules and matplotlib.is_interactive()


def test_a_notebook_shows_the_plots_after_the_first_too(tmp_path):
    pytest.importorskip("matplotlib")
    said = tmp_path / "said.txt"
    assert warm.run(said, plot_with_a_backend_that_sets_interactive_as_it_loads, tmp_path) == 0, said.read_text()


def test_axes_of_the_users_keep_their_style():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(dpi=50)
    assert tiny_plan().plot_memory(ax) is ax
    assert figure.dpi == 50 and figure.get_facecolor()[3] == 1
    plt.close("all")


def test_the_frame_has_a_row_per_action():
    pytest.importorskip("pandas")
    plan = tiny_plan()
    frame = plan.to_dataframe()
    assert len(frame) == len(plan.schedule.actions)
    assert frame.device_bytes.max() == plan.predicted_peak_bytes
    copies = frame[frame.resource.isin(["copy in", "copy out"])]
    assert copies.bytes.sum() == sum(plan.moved_bytes)


@pytest.mark.parametrize("package", ["matplotlib", "pandas"])
def test_what_is_missing_says_how_to_get_it(monkeypatch, package):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Hider(package), *sys.meta_path])
    with pytest.raises(ImportError, match=r'pip install -e "\.\[viz\]"'):
        viz(f"{package}.pyplot")


class _Hider:
    """A finder that finds one package to be absent."""

    def __init__(self, package):
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=self.package)
        return None


def test_colours_are_told_apart():
    assert set(KIND_COLOURS) == set(KINDS)
    colours = [block_colour(block, 70) for block in range(70)]
    assert len(set(colours)) == 70
    assert block_colour(0, 1).startswith("#") and block_colour(None, 3) not in colours
    assert text_on("#000000") == "#fff" and text_on("#ffffff") == "#000"


def test_micro_batches_that_were_tried_are_drawn_below_what_one_resource_allows():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    trials = (
        AccumulationTrial(1, "by batch", 2.0, 1.0, 1.5, "host"),
        AccumulationTrial(2, "by batch", 3.0, 2.0, 2.0, "host"),
        AccumulationTrial(2, "by block", 2.5, 2.0, 1.5, "host"),
        AccumulationTrial(4, "by block", None),
    )
    axes = replace(tiny_plan(), accumulation=trials).plot_accumulation(tokens=10)
    drawn = {line.get_label(): [float(y) for y in line.get_ydata()] for line in axes.lines}
    assert drawn["by batch"] == pytest.approx([5.0, 20 / 3]) and drawn["by block"] == pytest.approx([5.0, 8.0])
    assert drawn["computes alone"] == [10.0, 10.0] and drawn["bytes alone"] == pytest.approx([20 / 3, 40 / 3])
    with pytest.raises(ArgumentValueError, match="nothing to draw"):
        tiny_plan().plot_accumulation()
