"""How a model object is driven."""
