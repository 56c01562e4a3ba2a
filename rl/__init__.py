"""From an environment and an engine to a better adapter."""
