"""Frozen dataclasses as plain values that JSON can hold, and back, by the types of their fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from kvdrift.errors import FileError


def to_plain(value: Any) -> Any:
    """A value as JSON holds it: dataclasses become dictionaries, tuples lists, and keys text.

    A class with a `from_dict` is written by its own ``to_dict``.

    Examples
    --------
    >>> from kvdrift.models.labels import Prompt
    >>> to_plain({3: Prompt((1, 2), ("a", "b"))})
    {'3': {'ids': [1, 2], 'tokens': ['a', 'b'], 'text': None}}
    """
    if hasattr(type(value), "from_dict"):
        return value.to_dict()
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(entry) for entry in value]
    return value


def from_plain(kind: Any, value: Any) -> Any:
    """What `to_plain` was given, also after it went through JSON.

    Parameters
    ----------
    kind
        Its type: a dataclass, or any annotation of a field of one. What is no dataclass, tuple or dictionary is
        taken as it is.
    value
        The plain value.

    Raises
    ------
    FileError
        If a dataclass lacks a field without a default, or has one that it does not know.

    Examples
    --------
    >>> from kvdrift.models.labels import Prompt
    >>> from_plain(dict[int, Prompt], {"3": {"ids": [1], "tokens": ["a"], "text": None}})
    {3: Prompt(ids=(1,), tokens=('a',), text=None)}
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        kinds = [one for one in arguments if one is not NoneType]
        return value if value is None or len(kinds) != 1 else from_plain(kinds[0], value)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return tuple(from_plain(arguments[0], entry) for entry in value)
        return tuple(from_plain(one, entry) for one, entry in zip(arguments, value, strict=True))
    if origin is dict:
        key, entry = arguments
        return {int(name) if key is int else name: from_plain(entry, part) for name, part in value.items()}
    if hasattr(kind, "from_dict"):
        return kind.from_dict(value)
    return kind(**fields_from_plain(kind, value)) if is_dataclass(kind) else value  # type: ignore[operator]


def fields_from_plain(kind: Any, values: Mapping[str, Any], without: Iterable[str] = ()) -> dict[str, Any]:
    """The arguments of a dataclass from its plain values, but those in ``without``.

    Raises
    ------
    FileError
        If a field without a default is missing, or one is unknown.
    """
    every = {field.name: field for field in fields(kind) if field.init}
    needed = {name for name, field in every.items() if field.default is MISSING and field.default_factory is MISSING}
    wrong = sorted((needed - set(values) - set(without)) | (set(values) - set(every)))
    if wrong:
        raise FileError(
            f"This is not a {kind.__name__} as this version of kvdrift writes it: {', '.join(wrong)} is missing or "
            "unknown; make it again."
        )
    return {name: from_plain(_types(kind)[name], value) for name, value in values.items() if name not in without}


@cache
def _types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
