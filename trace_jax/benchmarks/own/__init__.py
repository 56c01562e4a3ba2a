"""A benchmark of the user's own: its trajectories as lines of JSON, and a driver of its program as the target of a run."""
