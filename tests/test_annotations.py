"""Annotations and docstrings of what is public: names that resolve, errors that are listed with their condition."""

import ast
import inspect
import re
from functools import cached_property
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from beartype.roar import BeartypeCallHintParamViolation
from checked import checked

import kvdrift as kd
from kvdrift.errors import InputError
from kvdrift.paths.sampling import greedy
from kvdrift.statistics.rates import upper_bound

SOURCE = Path(kd.__file__).parent


def public():
    """Every public class and function, and the methods and properties of the classes."""
    for name in kd.__all__:
        value = getattr(kd, name)
        if inspect.ismodule(value):
            continue
        yield pytest.param(value, id=name)
        for member, inside in vars(value).items() if inspect.isclass(value) else ():
            while not inspect.isfunction(inside) and isinstance(
                inside, property | cached_property | classmethod | staticmethod
            ):
                inside = getattr(inside, "fget", None) or getattr(inside, "func", None) or inside.__func__
            if inspect.isfunction(inside) and inspect.unwrap(inside).__code__.co_filename != "<string>":
                yield pytest.param(inside, id=f"{name}.{member}")


@pytest.mark.parametrize("thing", list(public()))
def test_names_in_annotations_resolve(thing):
    get_type_hints(thing)


def test_type_checkers_know_every_public_name():
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    assert {alias.name for node in block.body for alias in node.names} == set(kd.__all__)


def test_each_error_is_listed_with_its_condition():
    bare = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef | ast.ClassDef) else None
            for listed in re.findall(r"^Raises\n-+\n((?:.+\n?)*)", text or "", re.M):
                entries = re.split(r"^(?=\w)", listed, flags=re.M)[1:]
                bare += [f"{path.name}: {node.name}: {entry}" for entry in entries if not re.search(r"\n    \S", entry)]
    assert not bare


def test_types_and_shapes_hold_at_run_time():
    first, bound = (checked(each.__wrapped__) for each in (greedy, upper_bound))  # whichever tests called them before
    with pytest.raises(BeartypeCallHintParamViolation, match="violates"):
        first(torch.zeros(2, 3), 0)
    with pytest.raises(BeartypeCallHintParamViolation, match="violates"):
        bound("three", 10)
    with pytest.raises(InputError, match="same shape"):  # what the package says itself comes first
        kd.metrics.kl_divergence(torch.zeros(2, 3), torch.zeros(4, 3))
