"""tau2-bench and the first tau-bench."""
