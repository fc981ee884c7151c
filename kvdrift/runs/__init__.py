"""Long runs: a store that loses nothing, and engines that spread work over processes and machines."""
