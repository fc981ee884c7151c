"""The line to type again, with nothing of this machine in it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def command_line(verb: str, positional: list[Any], options: Mapping[str, Any]) -> str:
    """A command from its parts, as a shell would read it back.

    Parameters
    ----------
    verb
        Such as ``"compare"``.
    positional
        Arguments, such as the model.
    options
        Values by option name. None and False are left out, True is a flag, lists repeat the option.
        Files are named without their folders, since folders tell about the machine.

    Examples
    --------
    >>> command_line("compare", ["smollm2-135m"], {"--prompt": ["2 + 2 ="], "--chat": True, "--attn": None})
    "kvdrift compare smollm2-135m --prompt '2 + 2 =' --chat"
    """
    words = ["kvdrift", verb, *(portable(value) for value in positional)]
    for name, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            if one is None or one is False:
                continue
            words += [name] if one is True else [name, str(one.name) if isinstance(one, Path) else str(one)]
    return shlex.join(words)


def portable(model: Any) -> str:
    """A model's name: an absolute folder becomes its last part."""
    text = str(model)
    return Path(text).name if Path(text).is_absolute() else text
