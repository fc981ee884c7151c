"""Changes of arithmetic that leave the mathematical function alone; nothing that knows of paths, and never noise."""

from kvdrift.controls.control import Bound, Control
from kvdrift.controls.precision import cast_copy, promote_float32
from kvdrift.controls.reroll import BoundReRoll, ReRoll

__all__ = ["Bound", "BoundReRoll", "Control", "ReRoll", "cast_copy", "promote_float32"]
