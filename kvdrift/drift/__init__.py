"""Comparing two paths: metrics, results, statistics."""
