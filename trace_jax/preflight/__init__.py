"""Whether a config fits accelerators that are not there, and what would limit it."""
