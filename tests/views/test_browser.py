"""Every view drawn by a real browser: no console errors, the traces are there, the controls do what they say."""

import json
import shutil
from dataclasses import replace
from itertools import product

import numpy as np
import plotly.graph_objects as go
import pytest
from pairwise import params
from plotly.offline import get_plotlyjs

from kvdrift import views
from kvdrift.experiments import PaperArchitecture
from kvdrift.views.parts.theme import apply

pytestmark = pytest.mark.browser

NAMES = ("layer_step", "growth", "tokens", "kv_heads", "kv_positions", "precision")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1200,900",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("Chromium with chromedriver is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    page = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    html = tmp_path_factory.mktemp("page") / "page.html"
    html.write_text(
        '<!doctype html><meta charset="utf-8"><body style="margin:0"><div id="gd"></div>'
        f"<script>window.failures=[];window.onerror=m=>failures.push(m);</script><script>{get_plotlyjs()}</script>",
        encoding="utf-8",
    )
    page.get(html.as_uri())
    yield page
    page.quit()


def draw(page, fig: go.Figure) -> None:
    page.set_script_timeout(60)
    page.execute_async_script(
        "const [json, done] = arguments; const f = JSON.parse(json); Plotly.purge('gd');"
        "Plotly.newPlot('gd', f.data, f.layout).then(() => done());",
        fig.to_json(),
    )


def errors(page) -> list[str]:
    logged = [entry["message"] for entry in page.get_log("browser") if entry["level"] == "SEVERE"]
    return logged + page.execute_script("return window.failures.splice(0)")


def press(page, menu: str, label: str) -> None:
    """Click a dropdown and then one of its entries, as a person does."""
    page.execute_async_script(
        """
        const [name, label, done] = arguments;
        const layout = document.getElementById('gd').layout;
        const i = layout.updatemenus.findIndex(m => m.name === name);
        const click = node => node.dispatchEvent(new MouseEvent('click', {bubbles: true}));
        click(document.querySelectorAll('.updatemenu-header')[i]);
        setTimeout(() => {
            const entry = [...document.querySelectorAll('.updatemenu-dropdown-button')]
                .find(b => b.textContent === label);
            if (entry) click(entry);
            setTimeout(() => done(), 300);
        }, 300);
        """,
        menu,
        label,
    )


def hover_text(page, x: float, y: float) -> str:
    """Move the mouse to data coordinates of the first subplot and read the box that appears."""
    from selenium.webdriver.common.action_chains import ActionChains

    place = page.execute_script(
        "const l = document.getElementById('gd')._fullLayout, box = document.getElementById('gd')"
        ".getBoundingClientRect(); return [box.left + l.xaxis._offset + l.xaxis.d2p(arguments[0]),"
        "box.top + l.yaxis._offset + l.yaxis.d2p(arguments[1])]",
        x,
        y,
    )
    actions = ActionChains(page, duration=50)
    actions.w3c_actions.pointer_action.move_to_location(1, 1)
    actions.w3c_actions.pointer_action.move_to_location(int(place[0]), int(place[1]))
    actions.w3c_actions.pointer_action.pause(0.4)
    actions.perform()
    return page.execute_script(
        "return [...document.querySelectorAll('.hoverlayer .hovertext')].map(n => n.textContent).join('|')"
    )


@pytest.mark.parametrize(("name", "dark"), params(list(product(NAMES, (False, True))), 1))
def test_view_is_drawn(browser, drift, name, dark):
    fig = getattr(views, name)(drift, dark=dark)
    draw(browser, fig)
    assert errors(browser) == []
    drawn = browser.execute_script("return document.getElementById('gd').data.length")
    assert drawn == len(fig.data) > 0
    background = browser.execute_script(
        "return getComputedStyle(document.querySelector('#gd .main-svg')).backgroundColor"
    )
    assert background == ("rgb(21, 24, 30)" if dark else "rgb(255, 255, 255)")
    marks = "document.querySelectorAll('#gd .hm image, #gd .scatterlayer .trace').length"
    assert browser.execute_script(f"return {marks}") > 0


@pytest.mark.parametrize(
    "options",
    [
        {"n_prompts": 1, "n_steps": 1, "n_kv_heads": 1},
        {"all_zero": True, "inf": False, "window": None},
        {"n_layers": 1, "n_steps": 2, "n_prompts": 2, "seeds": 0, "local": False},
    ],
    ids=["one step", "bit-identical", "one layer"],
)
def test_small_and_empty_drifts_are_drawn(browser, make_drift, options):
    drift = make_drift(**options)
    for name in NAMES:
        draw(browser, getattr(views, name)(drift))
        assert errors(browser) == [], name


def test_families_are_drawn(browser, drift, make_drift):
    fig = views.families([drift, drift.control, make_drift(n_layers=5, model="b", control=False)])
    draw(browser, fig)
    assert errors(browser) == []
    assert browser.execute_script("return document.querySelectorAll('#gd .scatterlayer .trace').length") >= 6


def test_browser_holds_the_numbers_of_the_table(browser, drift):
    draw(browser, views.layer_step(drift))
    z = browser.execute_script(
        "return document.getElementById('gd').calcdata.filter(c => c[0].trace.name === 'resid_post, prompt 0')[0][0].z"
    )
    table = drift.to_dataframe("layers").query("site == 'resid_post' and prompt == 0")
    expected = table.pivot(index="layer", columns="step", values="rel_l2").to_numpy(dtype=float)
    z = np.array(z, dtype=float)
    np.testing.assert_allclose(10 ** z[expected > 0], expected[expected > 0], rtol=2e-5)


def test_site_metric_and_prompt_dropdowns_combine(browser, drift):
    draw(browser, views.layer_step(drift))
    press(browser, "site", "attn_out")
    press(browser, "metric", "max ulps")
    press(browser, "prompt", "prompt 1: made-up <i>prompt</i> 1")
    assert errors(browser) == []
    seen = browser.execute_script(
        "return document.getElementById('gd').data.filter(t => t.visible && t.opacity).map(t => t.name)"
    )
    assert seen == ["attn_out, prompt 1"]
    title = browser.execute_script("return document.querySelector('.cbcoloraxis').textContent")
    assert "largest difference (ulps)" in title
    z = browser.execute_script(
        "return document.getElementById('gd').data.filter(t => t.visible && t.opacity)[0].z.map(r => [...r])"
    )
    shown = np.array(z, dtype=float)[7, 5]
    table = drift.to_dataframe("layers").query("site == 'attn_out' and prompt == 1 and layer == 7 and step == 5")
    value = table.max_ulp.item()
    assert 10**shown == pytest.approx(value, rel=1e-4) if value > 0 else shown < 0
    text = hover_text(browser, 5, 7)
    assert "step 5, layer 7, attn_out" in text
    assert "prompt 1: made-up <i>prompt</i> 1" in text
    assert "window 8" in text or "full attention" in text


def test_sliders_move(browser, drift):
    for name, stop in (("kv_heads", 6), ("kv_positions", 1)):
        fig = getattr(views, name)(drift)
        draw(browser, fig)
        browser.execute_async_script(
            "const [i, done] = arguments, gd = document.getElementById('gd');"
            "Plotly.update(gd, ...gd.layout.sliders[0].steps[i].args).then(() => done());",
            stop,
        )
        assert errors(browser) == []
        z = browser.execute_script("return document.getElementById('gd').data[0].z.map(r => [...r])")
        expected = np.array(fig.layout.sliders[0].steps[stop].args[0]["z"][0], dtype=float)
        np.testing.assert_array_equal(np.array(z, dtype=float), expected)


def test_token_text_stays_text(browser, drift):
    draw(browser, views.tokens(drift))
    assert errors(browser) == []
    text = browser.execute_script("return document.getElementById('gd').textContent")
    words = {drift.token_texts[int(t)] for t in drift.arrays["top1_a"][0]}
    for shown, token in (("␣<b>bold…", " <b>bold</b>"), ("</script>", "</script>"), ("␣$18", " $18")):
        assert (shown in text) == (token in words)
    assert browser.execute_script("return document.querySelectorAll('#gd script').length") == 0
    bold = "[...document.querySelectorAll('#gd tspan')].filter(t => t.textContent === 'bold').length"
    assert browser.execute_script(f"return {bold}") == 0


def test_a_page_can_switch_between_light_and_dark(browser, drift):
    draw(browser, views.growth(drift))
    dark = json.loads(apply(go.Figure(), dark=True).to_json())["layout"]["template"]
    browser.execute_async_script(
        "const [t, done] = arguments; Plotly.relayout('gd', {template: t}).then(() => done());", dark
    )
    colours = browser.execute_script(
        "return ['.gtitle', '.xtick text', '.legendtext', '.updatemenu-item-text']"
        ".map(s => getComputedStyle(document.querySelector('#gd ' + s)).fill)"
    )
    assert set(colours) == {"rgb(230, 233, 239)"}
    assert errors(browser) == []


OF_PATCHING = ("recovery", "recovery points", "recovery_curve", "factorial", "trajectories")


def of_patching(made, name, dark=False):
    """One figure of patching, with dropdowns where the view has them."""
    if name == "factorial":
        return views.factorial(made.factorial(), dark=dark)
    if name == "trajectories":
        return views.trajectories(made.patch_result(), dark=dark)
    if name == "recovery_curve":
        return views.recovery_curve(made.sweep(made.layer_cells(("k", "kv"), range(2), ("one_shot(3)",))), dark=dark)
    if name == "recovery points":
        return views.recovery(made.patch_result(), dark=dark)
    cells = made.layer_cells(("resid_post", "kv"), range(6), ("one_shot(3)", "persistent"))
    remains = [0.0 if cell.trivial(6, range(2, 12)) else 0.9 for cell in cells]
    remains[2], remains[-1] = float("nan"), 0.3  # the best cell is persistent
    return views.recovery(made.sweep(cells, remains), dark=dark)


@pytest.mark.parametrize(("name", "dark"), params(list(product(OF_PATCHING, (False, True))), 1))
def test_view_of_patching_is_drawn(browser, made, name, dark):
    fig = of_patching(made, name, dark)
    draw(browser, fig)
    assert errors(browser) == []
    assert browser.execute_script("return document.getElementById('gd').data.length") == len(fig.data)
    background = browser.execute_script(
        "return getComputedStyle(document.querySelector('#gd .main-svg')).backgroundColor"
    )
    assert background == ("rgb(21, 24, 30)" if dark else "rgb(255, 255, 255)")


def test_dropdowns_of_patching_change_what_is_seen(browser, made):
    seen = "return document.getElementById('gd').data.filter(t => t.visible === true && t.showlegend !== false"
    draw(browser, of_patching(made, "recovery"))
    press(browser, "panel", "one-shot at step 3")
    names = browser.execute_script(f"{seen} && t.type === 'heatmap').map(t => t.name)")
    assert names == ["recovery one-shot at step 3", "undefined one-shot at step 3"]
    draw(browser, of_patching(made, "recovery_curve"))
    press(browser, "cell", "3: kv, layers 1, one_shot(3)")
    title = browser.execute_script("return document.querySelector('#gd .gtitle').textContent")
    assert "Patch: kv, layers 1, one_shot(3)" in title
    assert errors(browser) == []


def test_hover_over_a_recovery_cell(browser, made):
    draw(browser, of_patching(made, "recovery"))
    text = hover_text(browser, 0, 5)
    assert "resid_post at layer 5 (persistent)" in text
    assert "proves nothing" in text


@pytest.mark.parametrize(
    ("name", "dark"), params(list(product(("accuracy", "agreement", "answers"), (False, True))), 1)
)
def test_view_of_an_evaluation_is_drawn(browser, made_evaluation, name, dark):
    for options in ({}, {"answers": False, "gold": False}, {"parting": 0.0, "replicates": 0}):
        fig = getattr(views, name)(made_evaluation.evaluation(n_items=6, **options), dark=dark)
        draw(browser, fig)
        assert errors(browser) == []
        assert browser.execute_script("return document.getElementById('gd').data.length") == len(fig.data)


def test_the_dropdown_of_answers_changes_texts_and_title(browser, made_evaluation):
    fig = views.answers(made_evaluation.evaluation(n_items=6, flipping=0.5))
    draw(browser, fig)
    second = fig.layout.updatemenus[0].buttons[1]
    press(browser, "text", second.label)
    visible = "return document.getElementById('gd').data.map((t, i) => t.visible ? i : -1).filter(i => i >= 0)"
    assert browser.execute_script(visible) == [2, 3]
    title = browser.execute_script("return document.querySelector('#gd .gtitle').textContent")
    assert ", ".join(second.label.split(" · ")[:2]) in title
    drawn = browser.execute_script("return document.querySelectorAll('#gd .bars .point').length")
    assert drawn == len(fig.data[2].x)
    text = hover_text(browser, fig.data[2].base[0] + 1, fig.data[2].y[0])
    assert "token 1" in text
    assert errors(browser) == []


# --- lanes: nothing lies over anything else


BOXES = """
const gd = document.getElementById('gd'), frame = gd.getBoundingClientRect(), boxes = [];
const each = (kind, selector) => gd.querySelectorAll(selector).forEach(node => {
    const r = node.getBoundingClientRect();
    if (r.width > 1 && r.height > 1)
        boxes.push([kind, node.textContent.slice(0, 30), r.left - frame.left, r.top - frame.top,
                    r.right - frame.left, r.bottom - frame.top]);
});
each('title', '.gtitle'); each('buttons', '.modebar'); each('legend', '.legend .bg');
each('menu', '.updatemenu-header');
each('slider', '.slider-group'); each('note', '.annotation-text-g'); each('scale', '.colorbar');
each('plot', '.bglayer .bg'); each('axis', '.xtitle, .x2title, .x3title, .ytitle, .y2title, .y3title');
return [frame.width, frame.height, boxes];
"""
LONG_NAME = "organisation/a-model-with-a-rather-long-name-135m-instruct"
VIEWS = (
    *NAMES, "growth of one prompt", "families", "architectures", "ladder", "recovery", "recovery points",
    "recovery labels", "recovery_curve", "factorial", "trajectories", "accuracy", "agreement", "answers",
)  # fmt: skip


@pytest.fixture(scope="module")
def long_drift(make_drift):
    return make_drift(model=LONG_NAME, n_layers=30, n_steps=32, prompt_length=40, window=24)


def any_view(name, long_drift, make_drift, made, made_ladder, made_evaluation):
    if name in NAMES:
        return getattr(views, name)(long_drift)
    if name == "growth of one prompt":
        return views.growth(make_drift(n_prompts=1, seeds=0, local=False))
    if name == "families":
        return views.families([long_drift, make_drift(control=False), make_drift(n_layers=5, model="b", control=False)])
    if name == "architectures":
        build = {"control": False, "heads": False, "n_prompts": 6}
        shapes = ((0, 8, 3), (1, 8, 6), (0, 64, 3), (3, 64, 6))
        return views.architectures(
            PaperArchitecture(*(make_drift(**build, seed=s, window=w, n_kv_heads=h) for s, w, h in shapes))
        )
    if name == "ladder":
        return views.ladder(made_ladder.ladder())
    if name in ("accuracy", "agreement", "answers"):
        return getattr(views, name)(made_evaluation.evaluation(n_items=12, flipping=0.5))
    if name == "recovery labels":
        sites = ("k", "v", "kv", "attn_out")
        cells = tuple(made.as_cell(made.Patch(site, layers=[0, 1, 2, 3], schedule="window(2, 5)")) for site in sites)
        return views.recovery(made.sweep(cells, [0.2, 0.3, 0.4, 0.5], over=()))
    return of_patching(made, name)


@pytest.mark.parametrize(("name", "width"), params(list(product(VIEWS, (700, 1000))), 1))
def test_nothing_lies_over_anything_else(browser, name, width, long_drift, make_drift, made, made_ladder,
                                         made_evaluation):  # fmt: skip
    fig = any_view(name, long_drift, make_drift, made, made_ladder, made_evaluation)
    fig.layout.width = width
    browser.set_script_timeout(60)
    browser.execute_async_script(
        "const [json, done] = arguments; const f = JSON.parse(json); Plotly.purge('gd');"
        "Plotly.newPlot('gd', f.data, f.layout, {displayModeBar: true}).then(() => setTimeout(done, 60));",
        fig.to_json(),
    )
    total, height, boxes = browser.execute_script(BOXES)
    assert {"title", "buttons"} <= {box[0] for box in boxes}
    for kind, text, left, top, right, bottom in boxes:
        assert -1 <= left <= right <= total + 1, f"{kind} {text!r} leaves the figure"
        assert -1 <= top <= bottom <= height + 1, f"{kind} {text!r} leaves the figure"
    for i, (kind, text, *one) in enumerate(boxes):
        for other, words, *two in boxes[i + 1 :]:
            if {kind, other} in ({"note", "plot"}, {"plot"}):
                continue
            across = min(one[2], two[2]) - max(one[0], two[0])
            down = min(one[3], two[3]) - max(one[1], two[1])
            assert min(across, down) <= 2, f"{kind} {text!r} and {other} {words!r} overlap"


@pytest.mark.parametrize("width", [700, 1000])
def test_the_lines_of_two_answers_do_not_run_into_each_other(browser, made_evaluation, width):
    found = made_evaluation.evaluation(n_items=6, flipping=0.5)
    name = "cache-ON with a compressed cache of a long name, chunks of 16"
    found = replace(found, a=replace(found.a, label=name), b=replace(found.b, label=f"{name} and 4-bit values"))
    draw(browser, views.answers(found).update_layout(width=width))
    boxes = browser.execute_script(
        "return [...document.querySelectorAll('#gd .scatterlayer .textpoint text')].map(n => {"
        " const r = n.getBoundingClientRect(); return [n.textContent, r.left, r.top, r.right, r.bottom]; })"
    )
    assert any("4-bit values" in text for text, *_ in boxes)
    for i, (text, *one) in enumerate(boxes):
        assert one[2] <= width, f"{text!r} leaves the figure"
        for words, *two in boxes[i + 1 :]:
            across, down = (min(one[k + 2], two[k + 2]) - max(one[k], two[k]) for k in (0, 1))
            assert min(across, down) <= 2, f"{text!r} runs into {words!r}"
