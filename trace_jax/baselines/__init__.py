"""What users compare the composed agent with, on the same engine and trainer."""
