"""Runs a server as long as its owner lives: `python keeper.py command ...`, with a pipe from the owner as standard input.

When the pipe ends, because the owner closed it, was interrupted or was killed, the server's whole process group ends. A server is several
processes, and those of a killed owner would go on and hold the accelerator. Only the standard library is imported.
"""

import os
import signal
import subprocess
import sys
import threading
import time

PATIENCE = 5.0  # seconds between asking and killing


def end_group(group: int) -> None:
    """Asks a process group to end, and kills what is left of it."""
    for sign, patience in ((signal.SIGTERM, PATIENCE), (signal.SIGKILL, PATIENCE)):
        try:
            os.killpg(group, sign)
            os.killpg(group, signal.SIGCONT)  # one that was stopped does not end
            end = time.monotonic() + patience
            while time.monotonic() < end:
                os.killpg(group, 0)
                time.sleep(0.05)
        except (ProcessLookupError, PermissionError):  # nobody is left
            return


def main() -> int:
    try:
        server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(error, file=sys.stderr)
        return 127

    def wait_for_owner() -> None:
        while os.read(0, 4096):
            pass
        end_group(server.pid)

    for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(sign, lambda *_: end_group(server.pid))
    threading.Thread(target=wait_for_owner, daemon=True).start()
    code = server.wait()
    end_group(server.pid)  # processes that outlived the first
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
