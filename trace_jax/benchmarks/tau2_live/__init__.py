"""tau2-bench: its own orchestrator, user simulator and evaluator with our agent in them."""
