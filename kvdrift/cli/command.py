"""The line to type again, with nothing of this machine in it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

OUTPUTS = ("as_json", "save", "report", "store", "out", "engine", "workers", "address")
"""Parameters that say where a result goes or is made, not what it is."""


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


def typed(context: typer.Context) -> str:
    """The command that is running: its arguments, and every option with another value than its default.

    Options that only say where the result goes are left out.
    """
    positional, options = [], {}
    for parameter in context.command.params:
        value = context.params.get(str(parameter.name))
        if parameter.param_type_name == "argument":
            positional.append(value)
        elif parameter.name not in OUTPUTS and value != parameter.default:
            off = value is False and parameter.secondary_opts
            name = parameter.secondary_opts[0] if off else parameter.opts[0]
            options[name] = True if off else list(value) if isinstance(value, (list, tuple)) else value
    return command_line(str(context.info_name), positional, options)


def portable(model: Any) -> str:
    """A model's name: an absolute folder becomes its last part."""
    text = str(model)
    return Path(text).name if Path(text).is_absolute() else text
