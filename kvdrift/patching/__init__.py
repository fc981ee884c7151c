"""Writing one path's values into the other, and what that does; never without a placebo."""
