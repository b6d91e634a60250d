"""Many runs of a script: seeds, environments, grids and tuning, on this machine or on a Ray cluster."""
