"""Long runs: a store that loses nothing, and engines that spread work over processes; not what the work is."""
