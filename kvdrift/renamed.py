"""Arguments that have another name now: the older one works, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from kvdrift.errors import InputError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def renamed(**names: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Let arguments be given by their older names (older name = name), with a warning.

    Examples
    --------
    >>> @renamed(results="store")
    ... def verb(store=None):
    ...     return store
    >>> verb(store="folder")
    'folder'
    """

    def decorate(verb: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @wraps(verb)
        def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            for old, new in names.items():
                if old in kwargs:
                    value = kwargs.pop(old)
                    if kwargs.get(new) is not None:
                        raise InputError(f"{new}= and {old}= are two names of one argument; give {new}= alone.")
                    warnings.warn(f"{old}= is called {new}= now, and will go.", FutureWarning, stacklevel=2)
                    kwargs[new] = value
            return verb(*args, **kwargs)

        return called

    return decorate
