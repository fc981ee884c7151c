"""The verbs of kvdrift at a terminal, each a thin skin over the Python one: no number is computed here.

What was found goes to stdout, progress and refusals go to stderr.
"""

from kvdrift.cli.app import main

__all__ = ["main"]
