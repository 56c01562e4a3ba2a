"""Result files of public benchmarks, read into the one trajectory record, and the benchmarks themselves as targets."""
