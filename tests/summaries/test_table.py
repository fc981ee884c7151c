"""Every result is said by one file, which it does not import."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

import kvdrift
from kvdrift.diagnosis.verdict import Verdict
from kvdrift.drift.result import Drift
from kvdrift.evaluation.result import Evaluation
from kvdrift.experiments import PaperArchitecture
from kvdrift.experiments.paper_drift import PaperDrift
from kvdrift.experiments.paper_patching import PaperPatching
from kvdrift.ladder.result import Ladder
from kvdrift.patching.factorial_result import Factorial
from kvdrift.patching.result import PatchResult, Sweep
from kvdrift.result import SUMMARIES

ROOT = Path(kvdrift.__file__).parent
SAID_WHOLE = {Drift, Evaluation, Factorial, Ladder, PatchResult, Sweep}
READ = {Evaluation, Ladder, PaperArchitecture, PaperDrift, PaperPatching}


def test_the_table_names_each_result_and_each_file():
    assert set(SUMMARIES) == {kind.__name__ for kind in SAID_WHOLE | READ | {Verdict}}
    files = {path.stem for path in (ROOT / "summaries").glob("[a-z]*.py")}
    assert set(SUMMARIES.values()) == files - {"recovery"}  # what the files of patching share


@pytest.mark.parametrize("kind", sorted(SUMMARIES))
def test_what_is_asked_for_is_there(kind):
    module = import_module(f"kvdrift.summaries.{SUMMARIES[kind]}")
    asked = {"summary", "html"} if kind == "Verdict" else set()
    asked |= {"summary", "html", "as_dict"} if kind in {each.__name__ for each in SAID_WHOLE} else set()
    asked |= {"reading"} if kind in {each.__name__ for each in READ} else set()
    assert {name for name in asked if callable(getattr(module, name, None))} == asked


def test_only_what_stands_above_imports_what_is_said():
    above = ("summaries", "views", "report", "cli")
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] in above:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
                assert not any(name.startswith("kvdrift.summaries") for name in names), path
