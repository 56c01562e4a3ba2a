"""The Qwen backbone in Flax NNX: pure functions and modules that know nothing of reinforcement learning."""
