"""Figures, one file each: result objects in, a `plotly.graph_objects.Figure` out; no model, and nothing two share."""

from kvdrift.views.accuracy import accuracy
from kvdrift.views.agreement import agreement
from kvdrift.views.answers import answers
from kvdrift.views.architectures import architectures
from kvdrift.views.factorial import factorial
from kvdrift.views.families import families
from kvdrift.views.growth import growth
from kvdrift.views.kv_heads import kv_heads
from kvdrift.views.kv_positions import kv_positions
from kvdrift.views.ladder import ladder
from kvdrift.views.layer_step import layer_step
from kvdrift.views.precision import precision
from kvdrift.views.recovery import recovery
from kvdrift.views.recovery_curve import recovery_curve
from kvdrift.views.tokens import tokens
from kvdrift.views.trajectories import trajectories

__all__ = [
    "accuracy",
    "agreement",
    "answers",
    "architectures",
    "factorial",
    "families",
    "growth",
    "kv_heads",
    "kv_positions",
    "ladder",
    "layer_step",
    "precision",
    "recovery",
    "recovery_curve",
    "tokens",
    "trajectories",
]
