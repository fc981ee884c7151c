"""Two paths in lockstep: metrics (pure), onset and growth (pure), the result; no intervention."""
