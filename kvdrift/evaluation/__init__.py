"""Strategies × tasks × two paths, each writing its own text; no forced tokens but the gold text."""
