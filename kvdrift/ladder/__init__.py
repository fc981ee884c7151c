"""The same comparison in one arithmetic after another; the arithmetics themselves are not here but in controls."""
