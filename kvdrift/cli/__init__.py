"""The verbs of kvdrift at a terminal: what is for people goes to stderr, ``--json`` goes to stdout."""

from kvdrift.cli.app import main

__all__ = ["main"]
