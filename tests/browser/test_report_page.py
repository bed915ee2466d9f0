import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from coterie.systems.reports import read_report
from coterie.telemetry.report_html import write

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "sample_report.py"))["sample_report"]
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path"),
]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write(read_report(SAMPLE()), path)
    return path.as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield started
        started.close()


@pytest.fixture
def opened(browser: "sync_api.Browser", request: pytest.FixtureRequest) -> Iterator["sync_api.Page"]:
    width, scheme = getattr(request, "param", (1200, "light"))
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
    yield context.new_page()
    context.close()


SIZES = pytest.mark.parametrize(
    "opened",
    [(width, scheme) for width in (390, 760, 1200) for scheme in ("light", "dark")],
    indirect=True,
    ids=lambda size: f"{size[0]}px-{size[1]}",
)


@SIZES
def test_the_page_loads_alone_and_without_complaint(opened: "sync_api.Page", address: str) -> None:
    said: list[str] = []
    asked: list[str] = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(address, wait_until="networkidle")
    assert said == []
    assert asked == [address]


@SIZES
def test_nothing_is_wider_than_the_screen(opened: "sync_api.Page", address: str) -> None:
    opened.goto(address)
    for fold in opened.locator("summary").all():
        fold.click()
    widths = opened.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert widths[0] <= widths[1]


@SIZES
def test_every_plot_is_visible_and_its_text_lies_inside_it(opened: "sync_api.Page", address: str) -> None:
    opened.goto(address)
    for fold in opened.locator("summary").all():
        fold.click()
    drawings = opened.locator("svg")
    assert drawings.count() == 15
    for drawing in drawings.all():
        assert drawing.is_visible()
        outside = drawing.evaluate(
            """svg => {
                const frame = svg.getBoundingClientRect();
                return [...svg.querySelectorAll('text')].filter(text => {
                    const box = text.getBoundingClientRect();
                    return box.left < frame.left - 1 || box.right > frame.right + 1
                        || box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
                }).map(text => text.textContent);
            }"""
        )
        assert outside == []


def test_text_stands_out_from_its_background_in_both_schemes(
    browser: "sync_api.Browser", address: str
) -> None:
    # WCAG 2.1, 1.4.3: contrast of at least 4.5 to 1.
    measure = """() => {
        const channel = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
        const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number);
            return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b); };
        const solid = e => { for (; e; e = e.parentElement) {
            const c = getComputedStyle(e).backgroundColor;
            if (c.startsWith('rgb(')) return c; } };
        const found = [];
        for (const e of document.querySelectorAll('p, h1, h2, th, td, dt, dd, small, a, caption, summary, svg text')) {
            const style = getComputedStyle(e);
            const [a, b] = [light(e.closest('svg') ? style.fill : style.color), light(solid(e))];
            const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
            if (contrast < 4.5) found.push([e.textContent.trim(), contrast]);
        }
        return found;
    }"""
    backgrounds = set()
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme)
        opened = context.new_page()
        opened.goto(address)
        assert opened.evaluate(measure) == []
        backgrounds.add(opened.evaluate("getComputedStyle(document.body).backgroundColor"))
        context.close()
    assert len(backgrounds) == 2


def test_a_name_with_a_script_in_it_does_not_run(browser: "sync_api.Browser", tmp_path: Path) -> None:
    report = SAMPLE()
    attack = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
    report["dataset"]["name"] = attack
    report["peak_rss_mb"] = {attack: 10.0}
    path = tmp_path / "report.html"
    write(read_report(report), path)
    context = browser.new_context()
    opened = context.new_page()
    asked: list[str] = []
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(path.as_uri(), wait_until="networkidle")
    assert opened.title() != "run"
    assert attack in opened.locator("h1").inner_text()
    assert asked == [path.as_uri()]
    context.close()
