"""The console script, and `python -m trace_jax`.

`model` and `envs` are common names. The current folder leaves `sys.path` before anything is imported, so that a user's `model.py` does not
take the place of ours; the checkout that trace_jax itself was imported from stays.
"""

import os
import sys


def drop_current_folder() -> None:
    """Takes the current folder out of `sys.path`, under each name it goes by."""
    here, root = os.path.realpath("."), os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    if here != root:
        sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != here]


def main() -> int:
    """Runs the command of `sys.argv` and returns the exit code."""
    drop_current_folder()
    from trace_jax.cli import main
    from trace_jax.processes.job import leave

    code = main(sys.argv[1:])
    leave(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
