"""Step 1: which capabilities does the agent lack, by contrast of failed and passed trajectories."""
