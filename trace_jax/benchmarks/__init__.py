"""Result files of public benchmarks, read into the one trajectory record, and the benchmarks themselves as targets."""

TOLERANCE = 1e-6  # of rewards: graders compute them in floating point
