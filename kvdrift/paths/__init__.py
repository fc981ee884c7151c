"""How tokens are executed."""
