"""The report as a reader sees it: in a real browser, light and dark, wide and narrow."""

import shutil

import pytest

from kvdrift.report import write_report

webdriver = pytest.importorskip("selenium.webdriver")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium here"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900", "--no-first-run",
                     "--disable-background-networking", "--disable-component-update", "--disable-sync",
                     f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def opened(browser, drift, tmp_path_factory):
    path = write_report(tmp_path_factory.mktemp("page") / "report.html", drift)
    browser.get(path.as_uri())
    wait_until(browser, "return document.documentElement.dataset.drawn == document.querySelectorAll('.plot').length")
    return browser


def wait_until(browser, script):
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 60).until(lambda driver: driver.execute_script(script))


def test_all_figures_are_drawn_without_a_word_on_the_console(opened):
    plots = opened.execute_script(
        "return Array.from(document.querySelectorAll('.plot')).map(p => [p.id, p.data.length,"
        " p.querySelectorAll('svg.main-svg').length, p.getBoundingClientRect().height])"
    )
    assert len(plots) == 6
    for name, traces, drawings, height in plots:
        assert traces > 0, name
        assert drawings > 0, name
        assert height > 200, name
    assert opened.get_log("browser") == []


def test_nothing_was_fetched_but_the_file_itself(opened):
    requests = opened.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert [name for name in requests if not name.startswith(("data:", "blob:"))] == []


def test_no_button_sends_a_figure_anywhere(opened):
    titles = opened.execute_script(
        "return Array.from(document.querySelectorAll('.modebar-btn')).map(button => button.dataset.title)"
    )
    assert set(titles) == {"Download plot as a PNG", "Zoom", "Pan", "Reset axes"}


def test_no_text_became_markup(opened):
    assert opened.execute_script("return document.querySelectorAll('img').length") == 0
    shown = opened.execute_script("return document.querySelector('#result-1-tokens').textContent")
    assert "</script>" in shown


def test_the_switch_changes_page_and_figures(opened):
    look = (
        "const p = document.querySelector('.plot'); return [document.documentElement.dataset.theme,"
        " getComputedStyle(document.body).backgroundColor, p._fullLayout.paper_bgcolor]"
    )
    before = opened.execute_script(look)
    opened.find_element("id", "theme").click()
    wait_until(opened, f"return document.documentElement.dataset.theme != '{before[0]}'")
    after = opened.execute_script(look)
    assert {before[0], after[0]} == {"light", "dark"}
    assert before[1] != after[1]
    assert before[2] != after[2]
    opened.find_element("id", "theme").click()
    assert opened.execute_script(look) == before


def test_a_phone_is_not_scrolled_sideways(opened):
    # Headless Chromium takes no window narrower than 500 pixels, so the page is put into a frame's width.
    opened.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    )
    try:
        width = opened.execute_script("return document.documentElement.scrollWidth")
    finally:
        opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert width <= 390


def test_a_browser_that_cannot_unpack_says_what_can(browser, drift, tmp_path):
    path = write_report(tmp_path / "old.html", drift)
    page = path.read_text(encoding="utf-8").replace("typeof DecompressionStream", '"undefined"')
    path.write_text(page.replace('"undefined" === "undefined"', "true"), encoding="utf-8")
    browser.get(path.as_uri())
    shown = browser.execute_script("return [...document.querySelectorAll('.plot')].map(plot => plot.textContent)")
    assert len(shown) == 6
    assert all("cannot unpack" in text and "Firefox 113" in text for text in shown)
