"""From evidence to a verdict, and the words for when a fault shows."""

import json

import pytest
import torch

import kvdrift as kd
from kvdrift.controls.self_test import Failure
from kvdrift.diagnosis.cases import Case
from kvdrift.diagnosis.decide import decide
from kvdrift.diagnosis.evidence import Evidence, Excuse, Finding, NonFiniteFinding
from kvdrift.diagnosis.float64 import Float64
from kvdrift.diagnosis.locate import Where
from kvdrift.diagnosis.lockstep import Moment
from kvdrift.diagnosis.signature import signature
from kvdrift.diagnosis.verdict import EXIT_CODES, KINDS, MEANING

ON, OFF = kd.CacheOn(), kd.CacheOff()


MANNERS = {
    "chunked prefill": "at a chunk boundary",
    "left padding": "with left padding",
    "crop and continue": "after a crop",
}


def case(name="short prompt", switch=None):
    return Case(name, (1, 2, 3, 4, 5), None, 18, ON, manner=MANNERS.get(name), switch=switch)


def finding(check="arm", step=1, name="short prompt", layer=2, path="cache-ON", excuse=None, switch=None):
    moment = Moment(case(name, switch), step, 4 + step)
    return Finding(check, path, "it differs", moment, Where(layer, "module", "z"), excuse)


def verdict(tiny_model, **evidence):
    given = {"counts": {"native": 3, "arm": 3}, **evidence}
    return decide(Evidence(**given), tiny_model("llama"), ON, OFF)


LOSS = Excuse("lossy", "8 bits")
FAILURE = Failure("operator", "mm", "a row has other bits")


@pytest.mark.parametrize(
    ("evidence", "kind"),
    [
        ({}, "exact"),
        ({"native_equal": False}, "rounding"),
        ({"native_equal": True, "counts": {"arm": 3}}, "rounding"),  # never seen natively: not called exact
        ({"findings": [finding()]}, "bug"),
        ({"findings": [finding(excuse=Excuse("lossy", "8 bits"))]}, "lossy"),
        ({"findings": [finding(excuse=Excuse("by_design", "NTK"))]}, "by_design"),
        ({"findings": [finding(excuse=Excuse("by_design", "NTK")), finding()]}, "bug"),
        ({"findings": [finding("visibility", excuse=Excuse("by_design", "ahead"))], "native_equal": False}, "rounding"),
        ({"findings": [finding("visibility", excuse=Excuse("by_design", "ahead"))], "arm_differs": True}, "by_design"),
        ({"nonfinite": NonFiniteFinding("NaN.", None, "Look."), "findings": [finding()]}, "nonfinite"),
        ({"repeats": ["cache-ON"], "findings": [finding("crash")]}, "bug"),
        ({"repeats": ["cache-ON"], "findings": [finding()]}, "nondeterministic"),
        ({"repeats": ["cache-ON"], "findings": [finding("witness")]}, "nondeterministic"),
        ({"repeats": ["cache-ON"], "findings": [finding("visibility")]}, "bug"),
        ({"repeats": ["cache-ON"], "findings": [finding("stale")]}, "bug"),
        ({"self_test": [FAILURE], "arm_differs": True}, "inconclusive"),
        ({"self_test": [FAILURE], "arm_differs": True, "findings": [finding()]}, "bug"),  # float64 has confirmed it
        ({"self_test": [FAILURE], "arm_differs": True, "findings": [finding("generate")]}, "inconclusive"),
        ({"self_test": [FAILURE], "findings": [finding("generate")]}, "inconclusive"),
        ({"self_test": [FAILURE], "arm_differs": True, "findings": [finding(excuse=LOSS)]}, "lossy"),
        ({"self_test": [FAILURE], "arm_differs": True, "findings": [finding("visibility")]}, "bug"),
        ({"self_test": [FAILURE], "arm_differs": True, "findings": [finding("operator")]}, "bug"),
        ({"unsettled": ["open."]}, "inconclusive"),
        ({"unsettled": ["open."], "findings": [finding()]}, "bug"),
    ],
)
def test_kinds_in_their_order(evidence, kind, tiny_model):
    assert verdict(tiny_model, **evidence).kind == kind


def test_every_kind_has_a_meaning_and_an_exit_code():
    assert set(KINDS) == set(MEANING) == set(EXIT_CODES)
    codes = {code: {kind for kind in KINDS if EXIT_CODES[kind] == code} for code in (0, 1, 2)}
    assert codes[0] == {"exact", "rounding", "lossy", "by_design"}
    assert codes[1] == {"bug", "nonfinite", "nondeterministic"}
    assert codes[2] == {"inconclusive"}


def test_excused_findings_are_not_said_to_be_as_they_should(tiny_model):
    seen = [finding("visibility", excuse=Excuse("by_design", "it looks ahead"))]
    counts = {"counts": {"native": 3, "arm": 3, "visibility": 9, "witness": 4}}
    reasons = verdict(tiny_model, repeats=["cache-ON"], findings=seen, **counts).reasons
    assert not any("see the positions that they should" in reason for reason in reasons)
    assert any(reason.startswith("Of 9 distinct attention calls 1 see other positions") for reason in reasons)


@pytest.mark.parametrize(
    ("dtype", "attn", "said"),
    [
        ("bfloat16", "sdpa", "in float32 on the CPU or with attn='eager'."),
        ("float32", "sdpa", "with attn='eager'."),
        ("float32", "eager", "in float64 (dtype=float64)."),
    ],
)
def test_advice_is_not_what_was_run(dtype, attn, said, tiny_model):
    model = tiny_model("llama", dtype=getattr(torch, dtype), attn=attn)
    open_question = decide(Evidence(unsettled=["open."]), model, ON, OFF)
    assert open_question.suggestion == f"Diagnose again {said}"


def test_the_place_is_the_arms_where_it_has_one(tiny_model):
    found = verdict(tiny_model, findings=[finding("visibility", layer=0), finding("arm", layer=3)])
    assert found.where.layer == 3
    assert verdict(tiny_model, findings=[finding("witness", layer=1)]).where.layer == 1
    assert verdict(tiny_model).where is None


def test_the_wrong_path_is_the_one_that_was_seen_or_that_float64_names(tiny_model):
    assert verdict(tiny_model, findings=[finding("visibility", path="cache-OFF")]).wrong == "b"
    both = "cache-ON and cache-OFF"
    votes = [Float64(case(), 0.1, None, None, wrong) for wrong in ("b", None)]
    assert verdict(tiny_model, findings=[finding(path=both)], float64=votes).wrong == "b"
    votes = [Float64(case(), 0.1, None, None, wrong) for wrong in ("b", "a")]
    assert verdict(tiny_model, findings=[finding(path=both)], float64=votes).wrong is None


def test_reasons_say_what_was_looked_at(tiny_model):
    text = str(verdict(tiny_model, counts={"native": 3, "arm": 7, "visibility": 11, "witness": 5, "operators": 2}))
    assert text.startswith("EXACT")
    assert "All 11 distinct attention calls" in text
    assert "at all 7 steps" in text
    bug = verdict(tiny_model, findings=[finding(layer=layer) for layer in range(2, 10)], not_covered={1: "recurrent"})
    assert "… and 5 more findings of the same check." in bug.reasons
    assert any("layers 1 (recurrent)" in reason for reason in bug.reasons)
    assert json.loads(json.dumps(bug.to_dict()))["where"]["layer"] == 2
    assert "<b>BUG" in bug._repr_html_()


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((3,), "Short prompt, step 3 (8 tokens): cache-ON, "),
        ((3, 5), "Short prompt, steps 3 and 5 (8 to 10 tokens): cache-ON, "),
        ((3, 5, 9), "Short prompt, steps 3, 5 and 9 (8 to 14 tokens): cache-ON, "),
        (range(1, 9), "Short prompt, steps 1 to 8 (6 to 13 tokens): cache-ON, "),
        (range(1, 17, 2), "Short prompt, steps 1, 3, 5, 7, 9, 11 and 2 more (6 to 20 tokens): cache-ON, "),
    ],
)
def test_findings_that_differ_by_their_step_are_one_reason(steps, said, tiny_model):
    reasons = verdict(tiny_model, findings=[finding(step=step) for step in steps]).reasons
    told = [reason for reason in reasons if "it differs" in reason]
    assert len(told) == 1
    assert told[0].startswith(said)
    assert not any("more finding" in reason for reason in reasons)


def test_findings_that_differ_by_more_stay_apart(tiny_model):
    others = [finding(layer=3), finding(path="cache-OFF"), finding(name="left padding"), finding(step=2)]
    reasons = verdict(tiny_model, findings=[finding(), *others]).reasons
    told = [reason for reason in reasons if "it differs" in reason]
    assert [reason.startswith("Short prompt, steps 1 and 2 (6 to 7 tokens)") for reason in told] == [True, False, False]
    assert "… and 1 more finding of the same check." in reasons


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        ([finding(step=1), finding(step=2)], "from the first decode step"),
        ([finding(step=0)], "already in the prompt"),
        ([finding(step=11)], "at key lengths that are multiples of 16"),
        ([finding(step=3), finding(step=11)], "at key lengths that are multiples of 8"),
        ([finding(step=step) for step in range(4, 19)], "at the window"),
        ([finding(step=step) for step in range(8, 19)], "from 13 tokens on"),
        ([finding(name="chunked prefill", step=0)], "at a chunk boundary"),
        ([finding(name="left padding")], "with left padding"),
        ([finding(name="crop and continue", step=5)], "after a crop"),
        ([finding(name="around the RoPE switch", step=3, switch=7)], "at a length switch"),
        ([finding("stale")], "between prompts"),
        ([finding("generate")], "in generate() alone"),
    ],
)
def test_signatures(findings, expected, tiny_model):
    assert expected in signature(findings, tiny_model("mistral").architecture)


def test_one_kind_of_layer(tiny_model):
    architecture = tiny_model("gemma3").architecture  # sliding, sliding, full, sliding
    assert "in full layers only" in signature([finding(layer=2)], architecture)
    assert not any("layers only" in word for word in signature([finding(layer=0)], architecture))
    seen = [finding("visibility", layer=layer) for layer in (0, 1, 3)]
    assert "in sliding layers only" in signature(seen, architecture)
    assert not any("layers only" in word for word in signature([*seen, finding("visibility", layer=2)], architecture))
