"""Seeing and writing inside a forward pass, by probed places and the attention seam; never by class name."""

from kvdrift.models.load import load
from kvdrift.models.model import Model
from kvdrift.tracing.probe import probe as find_coverage

Model.probe = find_coverage

__all__ = ["load"]
