"""Strategies × tasks × two paths, with paired statistics."""
