"""How tokens are executed: paths and what they can do, stepping and recording them; no comparison of two."""
