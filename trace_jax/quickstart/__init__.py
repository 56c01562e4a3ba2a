"""The base agent of the quickstart: its tokenizer, its teacher and the training script that made the shipped checkpoint."""
