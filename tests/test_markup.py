"""What Jupyter shows: every result has HTML, escaped, and no colour of its own."""

import re
from html.parser import HTMLParser

import pytest

import kvdrift as kd
from kvdrift import markup
from kvdrift.diagnosis.verdict import Verdict


class Tree(HTMLParser):
    """Checks that tags are balanced, and keeps the text and the tags."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.text = [], set(), ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert attrs == [], "no style, colour or class: the theme decides"
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += f" {data}"


def test_texts_are_escaped():
    hostile = "<script>alert(1)</script> & <b>"
    html = markup.block(
        hostile,
        markup.paragraph(hostile),
        markup.listing([hostile], numbered=True),
        markup.table([(hostile, hostile)], [hostile, hostile]),
    )
    tree = Tree(html)
    assert tree.tags == {"div", "p", "b", "ol", "li", "table", "thead", "tbody", "tr", "th", "td"}
    assert tree.text.count(hostile) == 7


def test_nothing_gives_nothing():
    assert markup.listing([]) == markup.table([]) == markup.paragraph("") == ""


@pytest.fixture(scope="module")
def shown(tiny_model, made, made_ladder):
    model = tiny_model()
    cells = made.layer_cells(("k", "kv"), range(3))
    return {
        "Model": model,
        "Architecture": model.architecture,
        "Trace": kd.record(model, [1, 2, 3], max_new_tokens=2, sites=["resid_post", "k"], progress=False),
        "Drift": kd.compare(model, [1, 2, 3], max_new_tokens=3, floor=1, progress=False),
        "PatchResult": made.patch_result(),
        "Sweep": made.sweep(cells),
        "Factorial": made.factorial(),
        "Ladder": made_ladder.ladder(),
        "Verdict": Verdict(
            "bug", "m<odel>", "cache-ON", "cache-OFF", ("first cause", "second cause"), None, ("always",), "a", "Do."
        ),
    }


NAMES = ("Model", "Architecture", "Trace", "Drift", "PatchResult", "Sweep", "Factorial", "Ladder", "Verdict")


@pytest.mark.parametrize("name", NAMES)
def test_html_says_what_the_text_says(shown, name):
    thing = shown[name]
    said, seen = (set(re.findall(r"[a-z]{4,}", x.lower())) for x in (repr(thing), Tree(thing._repr_html_()).text))
    assert said - seen <= {"vocab"}, said - seen  # "vocabulary" there


def test_a_verdict_names_path_and_reasons_in_order(shown):
    tree = Tree(shown["Verdict"]._repr_html_())
    assert "ol" in tree.tags
    assert tree.text.index("first cause") < tree.text.index("second cause")
    assert "wrong path cache-ON" in tree.text
    assert "m<odel>" in tree.text


def test_a_patch_shows_every_arm_with_its_number(shown):
    result = shown["PatchResult"]
    text = Tree(result._repr_html_()).text
    assert f"{result.distance('unpatched').mean():.3g}" in text
    assert text.count("mean distance") == 1  # over the column; the sentence is left out
