"""Results and figures as a person sees them: in JupyterLab, in a real browser, in its dark theme."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import plotly.io as pio
import pytest

from kvdrift import views

webdriver = pytest.importorskip("selenium.webdriver")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("jupyterlab")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not shutil.which("chromium") or not shutil.which("chromedriver"), reason="no chromium here"),
]


def bundle(thing):
    """What a kernel sends for a value."""
    if hasattr(thing, "to_plotly_json"):
        return pio.renderers["plotly_mimetype"].to_mimebundle(json.loads(thing.to_json()))
    return {"text/plain": repr(thing), "text/html": thing._repr_html_()}


@pytest.fixture(scope="module")
def results(made, tiny_model):
    sweep = made.sweep(made.layer_cells(("k", "kv"), range(4), ("one_shot(3)", "persistent")))
    return [made.patch_result(), tiny_model().architecture, views.recovery(sweep), views.factorial(made.factorial())]


@pytest.fixture(scope="module")
def address(tmp_path_factory, results):
    """A JupyterLab of our own, with a notebook that has run."""
    folder, home = tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("home")
    cells = [
        nbformat.v4.new_code_cell(
            "result",
            execution_count=1,
            outputs=[nbformat.v4.new_output("execute_result", bundle(x), execution_count=1)],
        )
        for x in results
    ]
    kernel = {"kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), folder / "seen.ipynb")
    theme = home / "settings" / "@jupyterlab" / "apputils-extension" / "themes.jupyterlab-settings"
    theme.parent.mkdir(parents=True)
    theme.write_text('{"theme": "JupyterLab Dark"}')
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--ServerApp.root_dir={folder}",
        "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0",
        "--IdentityProvider.token=", "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]  # fmt: skip
    places = {"JUPYTER_CONFIG_DIR": home / "config", "JUPYTER_DATA_DIR": home / "data",
              "JUPYTER_RUNTIME_DIR": home / "run", "JUPYTERLAB_SETTINGS_DIR": home / "settings",
              "JUPYTERLAB_WORKSPACES_DIR": home / "workspaces"}  # fmt: skip
    with open(home / "log", "w") as log:
        server = subprocess.Popen(command, env={**os.environ, **{k: str(v) for k, v in places.items()}},
                                  stdout=log, stderr=log)  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{url}/api", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None, (home / "log").read_text()
                time.sleep(0.25)
        yield f"{url}/lab/tree/seen.ipynb"
    finally:
        server.terminate()
        server.wait(timeout=20)


@pytest.fixture(scope="module")
def lab(address, tmp_path_factory):
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1300,3000", "--no-first-run",
                     "--disable-background-networking", "--disable-component-update", "--disable-sync",
                     "--disable-dev-shm-usage", f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):  # fmt: skip
        options.add_argument(argument)
    page = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        page.get(address)
        drawn = "return document.querySelectorAll('.jp-OutputArea .js-plotly-plot .main-svg').length >= 2"
        WebDriverWait(page, 90).until(lambda driver: driver.execute_script(drawn))
        if os.environ.get("KVDRIFT_SCREENSHOT"):  # to look at it
            time.sleep(2)
            page.save_screenshot(os.environ["KVDRIFT_SCREENSHOT"])
        yield page
    finally:
        page.quit()


def test_figures_are_drawn(lab, results):
    counts = lab.execute_script("return [...document.querySelectorAll('.js-plotly-plot')].map(p => p.data.length)")
    assert counts == [len(figure.data) for figure in results[2:]]
    assert lab.execute_script("return document.querySelectorAll('.jp-OutputArea .hm image').length") > 0
    assert lab.execute_script("return document.querySelectorAll('.jp-mod-error, .jp-RenderedText[data-mime-type="
                              "\"application/vnd.jupyter.stderr\"]').length") == 0  # fmt: skip


def test_a_dropdown_works_without_widgets(lab):
    shown = (
        "return [...document.querySelector('.js-plotly-plot').data].filter(t => t.visible === true).map(t => t.name)"
    )
    before = lab.execute_script(shown)
    lab.set_script_timeout(20)
    lab.execute_async_script(
        """
        const done = arguments[0], click = node => node.dispatchEvent(new MouseEvent('click', {bubbles: true}));
        click(document.querySelector('.js-plotly-plot .updatemenu-header'));
        setTimeout(() => {
            const entries = [...document.querySelectorAll('.updatemenu-dropdown-button')];
            click(entries.find(entry => entry.textContent.includes('one-shot')));
            setTimeout(done, 500);
        }, 500);
        """
    )
    assert lab.execute_script(shown) != before


def test_results_can_be_read_on_a_dark_theme(lab):
    light, dark, text = lab.execute_script(
        """
        const html = document.querySelector('.jp-RenderedHTMLCommon');
        const sum = colour => colour.match(/\\d+/g).slice(0, 3).map(Number).reduce((a, b) => a + b);
        const cells = [...html.querySelectorAll('li, td, th, b')].map(node => sum(getComputedStyle(node).color));
        return [Math.min(...cells), sum(getComputedStyle(document.querySelector('.jp-Notebook')).backgroundColor),
                html.textContent];
        """
    )
    assert light - dark > 300
    assert "no patch" in text
