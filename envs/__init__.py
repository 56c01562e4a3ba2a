"""Environment packages and the workers that host them; knows nothing of models."""
