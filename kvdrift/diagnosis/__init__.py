"""Whether two paths compute the same function: a verdict and the evidence under it, never a fitted tolerance."""
