"""Reading a result file of any size: seconds, and how much the process grows while the trajectories go by.

    python tests/benchmarks/large_results.py [MEGABYTES]

The file is made of the excerpt in tests/data, its simulations over and over as further trials, their costs and usage included. Expected on
one core: two minutes for 500 MB, and 6 MB of growth; the json module alone would hold the whole file.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import resource
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from trace_jax.benchmarks.results import read_result_file

EXCERPT = pathlib.Path(__file__).parents[1] / "data" / "tau2" / "gpt-4o_airline_excerpt.json"


def write(path: pathlib.Path, size: int) -> int:
    """A result file of at least so many bytes; returns the number of simulations."""
    data = json.loads(EXCERPT.read_text())
    simulations = data.pop("simulations")
    count = 0
    with path.open("w") as file:
        file.write(json.dumps(data)[:-1] + ', "simulations": [')
        for trial in itertools.count():
            for s in simulations:
                file.write((", " if count else "") + json.dumps(s | {"trial": trial, "id": f"{s['id']}-{trial}"}))
                count += 1
            if file.tell() >= size:
                break
        file.write("]}")
    return count


def grown(path: pathlib.Path) -> tuple[int, int]:
    """(trajectories, bytes by which the peak of this process grew) of reading a file."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = sum(1 for _ in read_result_file(path))
    return count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "results.json"
        written = write(file, int(sys.argv[1] if len(sys.argv) > 1 else 500) * 10**6)
        start = time.perf_counter()
        read, growth = grown(file)
        assert read == written
        seconds = time.perf_counter() - start
        print(f"{file.stat().st_size / 1e6:.0f} MB, {read} simulations: {seconds:.1f} s, grown by {growth / 1e6:.1f} MB")
