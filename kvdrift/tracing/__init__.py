"""Seeing and writing inside a forward pass, by probed places and the attention seam; never by class name."""
