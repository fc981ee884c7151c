"""The precision ladder: the same comparison in one arithmetic after another."""
