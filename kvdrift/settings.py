"""What decides the numbers of a path, control, cache factory or strategy, as plain values that JSON can hold.

Two things with the same settings give the same numbers. What cannot be told from another thing of its kind (a lambda, a
closure) is marked as such; `untold` finds the mark, and a store of results refuses it.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import hashlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from importlib import metadata
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvdrift.fingerprint import fingerprint

UNTOLD = "cannot be told from another"
"""The key of what stands where nothing plain can."""
NAMING = (
    "give it a name: a function or class of a module with plain arguments, such as functools.partial(MyCache, 1.5), or "
    "an object whose settings() returns the plain values that decide its numbers"
)
_LOCAL = "<locals>"
_DATACLASS_METHODS = frozenset(
    f"__{name}__" for name in ("init", "repr", "eq", "lt", "le", "gt", "ge", "hash", "setattr", "delattr", "replace")
)
_HEAP_TYPE = 1 << 9
"""CPython's flag of classes that were made while running, which keep nothing but attributes and slots."""


def settings_of(thing: Any) -> Any:
    """The plain values that decide the numbers of ``thing``.

    Plain values, and containers of them, stand for themselves. A function or class of a module is known by its name,
    its code and the global values it reads, a ``functools.partial`` by its function and arguments, an object by its
    class and attributes, or by its own ``settings()``; a tensor by its bits, a module by its weights.

    Returns
    -------
    JSON value
        With ``{UNTOLD: reason}`` in the place of what cannot be told from another thing of its kind.

    Examples
    --------
    >>> from functools import partial
    >>> from transformers import DynamicCache
    >>> settings_of(partial(DynamicCache, offloading=False))["kwargs"]
    {'offloading': False}
    >>> untold(settings_of({"cache": lambda: DynamicCache()}))
    'cache is a lambda'
    """
    return _told(thing, ())


def attributes_of(thing: Any) -> dict[str, Any]:
    """The settings of ``thing`` by its class and attributes alone, for a ``settings()`` that says no more.

    Examples
    --------
    >>> import kvdrift as kd
    >>> attributes_of(kd.ReRoll(3))["seed"]
    3
    """
    return dict(_object(thing, (id(thing),)))


def untold(settings: Any) -> str | None:
    """Where some settings hold what cannot be told from another thing, and what it is; None if nowhere.

    Examples
    --------
    >>> untold({"a": {"cache": {UNTOLD: "a lambda"}}}), untold({"seed": 0})
    ('a.cache is a lambda', None)
    """
    return next((f"{name or 'it'} is {reason}" for name, reason in _marks(settings, "")), None)


def _marks(settings: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(settings, dict):
        if UNTOLD in settings:
            yield name, str(settings[UNTOLD])
            return
        for key, value in settings.items():
            yield from _marks(value, f"{name}.{key}" if name else str(key))
    elif isinstance(settings, (list, tuple)):
        for place, value in enumerate(settings):
            yield from _marks(value, f"{name}.{place}" if name else str(place))


def _told(thing: Any, around: tuple[int, ...]) -> Any:
    """The settings of ``thing``, which sits inside the objects with these ids."""
    if thing is None or type(thing) in (bool, int, float, str):
        return thing
    if id(thing) in around:
        return "itself again"
    inside = (*around, id(thing))
    if isinstance(thing, (Enum, torch.dtype, torch.device, torch.layout, os.PathLike, ModuleType, complex)):
        return thing.__name__ if isinstance(thing, ModuleType) else str(thing)
    if isinstance(thing, np.generic):
        return _told(thing.item(), around)
    if isinstance(thing, (Tensor, np.ndarray)):
        return _array(thing)
    if isinstance(thing, (bytes, bytearray)):
        return {"bytes": _hash(bytes(thing))}
    if isinstance(thing, re.Pattern):
        return {"pattern": thing.pattern, "flags": thing.flags}
    if isinstance(thing, type):
        return _class(thing, inside)
    if callable(getattr(type(thing), "settings", None)):
        return {"type": _name(type(thing)), **dict(_told(dict(thing.settings()), inside))}
    if type(thing) in (dict, list, tuple, set, frozenset, range, slice):
        return _container(thing, inside)
    if isinstance(thing, functools.partial):
        parts = {"args": thing.args, "kwargs": thing.keywords, "attributes": vars(thing)}
        return {"partial": _told(thing.func, inside)} | {k: _told(v, inside) for k, v in parts.items() if v}
    if isinstance(thing, MethodType):
        return {"method": _told(thing.__func__, inside), "of": _told(thing.__self__, inside)}
    if isinstance(thing, FunctionType):
        return _function(thing, inside)
    if isinstance(thing, BuiltinFunctionType):
        owner = thing.__self__
        bound = owner is not None and not isinstance(owner, (ModuleType, type))
        return {UNTOLD: f"{thing.__qualname__} of an object"} if bound else _name(thing)
    wrapped: Any = getattr(thing, "__wrapped__", None)
    if isinstance(wrapped, FunctionType):  # functools.cache and its like
        return {"type": _name(type(thing)), "function": _function(wrapped, inside)}
    return _object(thing, inside)


def _container(thing: Any, inside: tuple[int, ...]) -> Any:
    if isinstance(thing, Mapping):
        return {key if isinstance(key, str) else str(_told(key, inside)): _told(v, inside) for key, v in thing.items()}
    if isinstance(thing, (set, frozenset)):
        return sorted((_told(value, inside) for value in thing), key=str)
    if isinstance(thing, (range, slice)):
        return str(thing)
    return [_told(value, inside) for value in thing]


def _object(thing: Any, inside: tuple[int, ...]) -> Any:
    """A module by its weights, a configuration by its text, any other object by its class and attributes."""
    kind = _told(type(thing), inside)
    if isinstance(thing, logging.Logger):
        return thing.name
    if isinstance(thing, nn.Module):
        return {"type": kind, "weights": fingerprint(thing)}
    if callable(getattr(thing, "to_json_string", None)):
        return {"type": kind, "text": _hash(thing.to_json_string().encode())}
    holds = isinstance(thing, (Mapping, list, tuple, set, frozenset))
    if not holds and any(not base.__flags__ & _HEAP_TYPE for base in type(thing).__mro__[:-1]):
        return {UNTOLD: f"an object ({_name(type(thing))}) that keeps more than plain values"}
    told = {name: _told(value, inside) for name, value in _state(thing).items()}
    return {"type": kind, **({"items": _container(thing, inside)} if holds else {}), **told}


def _state(thing: Any) -> dict[str, Any]:
    """The attributes of an object."""
    slots: list[str] = []
    for kind in type(thing).__mro__:
        given = vars(kind).get("__slots__", ())
        slots += [given] if isinstance(given, str) else given
    known = {
        name: getattr(thing, name) for name in slots if name not in ("__dict__", "__weakref__") and hasattr(thing, name)
    }
    return known | getattr(thing, "__dict__", {})


def _array(thing: Tensor | np.ndarray) -> dict[str, Any]:
    tensor = torch.as_tensor(thing).detach().cpu().contiguous()
    bits = tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "bits": _hash(bits)}


# --- code


def _function(thing: FunctionType, inside: tuple[int, ...]) -> Any:
    if thing.__name__ == "<lambda>":
        return {UNTOLD: "a lambda"}
    if _LOCAL in thing.__qualname__:
        return {UNTOLD: f"{thing.__name__}, a function made inside another one"}
    if _installed(thing.__module__ or ""):
        return _name(thing)
    return _described("function", _name(thing), [thing], vars(thing), inside)


def _class(thing: type, inside: tuple[int, ...]) -> Any:
    if _installed(thing.__module__ or ""):
        return _name(thing)
    members = {name: getattr(m, "__func__", getattr(m, "func", m)) for name, m in vars(thing).items()}
    functions = [
        part
        for member in members.values()
        for part in ((member.fget, member.fset) if isinstance(member, property) else (member,))
        if isinstance(part, FunctionType) and not _by_dataclass(thing, part)
    ]
    if _LOCAL in thing.__qualname__ and any(set(f.__code__.co_freevars) - {"__class__"} for f in functions):
        return {UNTOLD: f"{thing.__name__}, a class made inside a function whose variables it reads"}
    passive = (FunctionType, property, GetSetDescriptorType, MemberDescriptorType)
    attributes = {
        name: member
        for name, member in members.items()
        if not isinstance(member, passive) and not (name.startswith("__") and name.endswith("__"))
        and not name.startswith("_abc_")
    }  # fmt: skip
    attributes |= {f"base {base.__name__}": base for base in thing.__bases__ if not _installed(base.__module__ or "")}
    return _described("class", _name(thing), functions, attributes, inside)


def _described(
    kind: str, name: str, functions: list[FunctionType], attributes: Mapping[str, Any], inside: tuple[int, ...]
) -> Any:
    """A name with a hash of the code, and whatever else the code depends on."""
    reads: dict[str, Any] = {}
    for function in functions:
        at = function.__name__
        closed = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        reads |= {f"{at} {free}": cell.cell_contents for free, cell in closed if free != "__class__" and _filled(cell)}
        reads |= {used: function.__globals__[used] for used in _globals(function.__code__, function.__globals__)}
        reads |= {f"{at} default {n}": v for n, v in enumerate(function.__defaults__ or ())}
        reads |= {f"{at} default {n}": v for n, v in (function.__kwdefaults__ or {}).items()}
    reads = {used: value for used, value in reads.items() if not isinstance(value, ModuleType)}
    code = f"{name} {_hash('|'.join(_code(function.__code__) for function in functions).encode())}"
    told = {"reads": _container(reads, inside), "attributes": _container(dict(attributes), inside)}
    return {kind: code, **{part: values for part, values in told.items() if values}} if reads or attributes else code


def _code(code: CodeType) -> str:
    """Everything of a code object that decides what it does, and nothing of where it was written."""
    parts = [_code(const) if isinstance(const, CodeType) else _constant(const) for const in code.co_consts]
    return repr((code.co_code.hex(), code.co_names, code.co_freevars, code.co_varnames, parts))


def _constant(value: Any) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _globals(code: CodeType, known: Mapping[str, Any]) -> set[str]:
    """The global names that code reads, as far as they are known."""
    found = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for const in code.co_consts:
        if isinstance(const, CodeType):
            found |= _globals(const, known)
    return found & set(known)


def _filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _by_dataclass(kind: type, function: FunctionType) -> bool:
    """Whether `dataclasses` wrote a method; what it holds is in the class's attributes."""
    written_there = function.__code__.co_filename in ("<string>", dataclasses.__file__)
    return dataclasses.is_dataclass(kind) and function.__name__ in _DATACLASS_METHODS and written_there


def _name(thing: Any) -> str:
    """The dotted name, with the version of the package where results do not name it anyway."""
    module = getattr(thing, "__module__", None) or "builtins"
    version = _version(module.partition(".")[0])
    return f"{module}.{thing.__qualname__}" + (f" {version}" if version else "")


@functools.lru_cache
def _installed(module: str) -> bool:
    """Whether a module belongs to Python, to kvdrift or to a package that carries a version."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top == "kvdrift":
        return True
    file = getattr(sys.modules.get(top), "__file__", None)
    return file is not None and ("site-packages" in file or "dist-packages" in file)


@functools.lru_cache
def _version(top: str) -> str | None:
    if top in sys.stdlib_module_names or not _installed(top) or top in ("kvdrift", "torch", "transformers"):
        return None
    try:
        return metadata.version(top)
    except metadata.PackageNotFoundError:
        return None


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
