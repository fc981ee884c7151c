"""The paper's experiments (arXiv 2604.15409) beside the controls that decide them; no verb of their own."""

from kvdrift.experiments.paper_architecture import PaperArchitecture, paper_architecture
from kvdrift.experiments.paper_drift import PaperDrift, paper_drift
from kvdrift.experiments.paper_patching import PaperPatching, paper_patching

__all__ = [
    "PaperArchitecture",
    "PaperDrift",
    "PaperPatching",
    "paper_architecture",
    "paper_drift",
    "paper_patching",
]
