"""What is studied: loading, architecture, prompts, names of places, tiny models; nothing that watches a model run."""

from kvdrift.models.architecture import Architecture
from kvdrift.models.load import load
from kvdrift.models.presets import PRESETS
from kvdrift.models.tiny import FAMILIES, tiny

__all__ = ["FAMILIES", "PRESETS", "Architecture", "load", "tiny"]
