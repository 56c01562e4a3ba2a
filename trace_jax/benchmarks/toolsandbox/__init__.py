"""ToolSandbox: result folders in, scenarios played by the benchmark's own program, splits."""
