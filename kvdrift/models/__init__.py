"""What is studied: loading, presets, architecture, tiny random models."""

from kvdrift.models.architecture import Architecture
from kvdrift.models.load import load
from kvdrift.models.presets import PRESETS
from kvdrift.models.tiny import FAMILIES, tiny

__all__ = ["FAMILIES", "PRESETS", "Architecture", "load", "tiny"]
