"""Import this before the package, and annotations hold at run time: each function checks types, dtypes and shapes.

jaxtyping's own import hook makes each call three to four times as slow as beartype alone, and cannot check functions
that mention a protocol or ``Self``. Here beartype checks a function in its first calls and now and then, with a scope
of jaxtyping's dimension names where its annotations have shapes.
"""

import ast
import functools
import importlib.abc
import importlib.machinery
import inspect
import os
import sys
import types
from contextlib import nullcontext
from typing import Annotated, Self, get_args, get_type_hints

from beartype import BeartypeConf, FrozenDict, beartype
from beartype.roar import BeartypeCallHintParamViolation
from beartype.vale import Is
from jaxtyping import AbstractArray, jaxtyped

ROOMS = os.environ.get("KVDRIFT_CHECKED", "kvdrift.drift.metrics kvdrift.paths.sampling kvdrift.statistics").split()
"""What is checked by default; ``KVDRIFT_CHECKED=kvdrift`` checks the whole package."""
ANYTHING = Annotated[object, Is[lambda _: True]]
FIRST, EVERY = 20, 50
"""Calls of a function that are all checked, and how many go unchecked between two later ones."""


def checked(function):
    """The function, which checks what it is given and what it returns, most often in its first calls."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        nonlocal run, calls
        calls += 1
        if calls > FIRST and calls % EVERY:
            return function(*args, **kwargs)
        if run is None:
            run = _checking(function)
        return run(*args, **kwargs)

    run, calls = None, 0
    return call


def _checking(function):
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError:
        hints = get_type_hints(function, localns=_only_for_types(function.__module__), include_extras=True)
    parts = [part for hint in hints.values() for part in _parts(hint)]
    unchecked = {part for part in parts if part is Self or (inspect.isclass(part) and _is_open_protocol(part))}
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, hints
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    conf = BeartypeConf(hint_overrides=FrozenDict(dict.fromkeys(unchecked, ANYTHING)), is_pep484_tower=True)
    run = beartype(copy, conf=conf)
    shaped = any(inspect.isclass(part) and issubclass(part, AbstractArray) for part in parts)

    def call(*args, **kwargs):
        try:
            with jaxtyped("context") if shaped else nullcontext():
                return run(*args, **kwargs)
        except BeartypeCallHintParamViolation as violation:
            if not hasattr(violation, "known"):
                violation.known = True
                _refused_in_words(function, args, kwargs)
            raise

    return call


def _refused_in_words(function, args, kwargs):
    """Raise the package's own sentence about wrong arguments, where it has one."""
    from kvdrift.errors import KvdriftError

    try:
        function(*args, **kwargs)
    except KvdriftError:
        raise
    except Exception:
        return


@functools.cache
def _only_for_types(module):
    """What a module imports ``if TYPE_CHECKING``."""
    tree, names = ast.parse(inspect.getsource(sys.modules[module])), {}
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            exec(compile(ast.Module(node.body, []), module, "exec"), names)
    return names


def _parts(hint):
    yield hint
    for argument in hint if isinstance(hint, list) else get_args(hint):
        yield from _parts(argument)


def _is_open_protocol(kind):
    """Whether a class is a protocol that says what is used, and that objects with less may be given for."""
    return getattr(kind, "_is_protocol", False) and not getattr(kind, "_is_runtime_protocol", False)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if not any(f"{name}.".startswith(f"{room}.") for room in ROOMS):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, name):
        path = self.get_filename(name)
        tree = ast.parse(self.get_data(path), path)
        for node in _definitions(tree):
            if node.returns or any(argument.annotation for argument in _arguments(node)):
                node.decorator_list.append(ast.Name("__checked__", ast.Load(), lineno=node.lineno, col_offset=0))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def exec_module(self, module):
        module.__checked__ = checked
        super().exec_module(module)


def _definitions(node):
    """Functions of a module and of its classes, not those inside functions, which are made anew at each call."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield child
        elif not isinstance(child, ast.AsyncFunctionDef | ast.expr):
            yield from _definitions(child)


def _arguments(node):
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


sys.meta_path.insert(0, _Finder())
