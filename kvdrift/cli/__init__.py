"""The verbs of kvdrift at a terminal: what was found goes to stdout, progress and refusals go to stderr."""

from kvdrift.cli.app import main

__all__ = ["main"]
