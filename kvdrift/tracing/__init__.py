"""Seeing and writing inside a forward pass."""
