"""Figures: each takes result objects and returns a `plotly.graph_objects.Figure`; none shows it."""

from kvdrift.views.families import families
from kvdrift.views.growth import growth
from kvdrift.views.kv_heads import kv_heads
from kvdrift.views.kv_positions import kv_positions
from kvdrift.views.layer_step import layer_step
from kvdrift.views.precision import precision
from kvdrift.views.tokens import tokens

__all__ = ["families", "growth", "kv_heads", "kv_positions", "layer_step", "precision", "tokens"]
