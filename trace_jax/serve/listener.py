"""Where the servers listen: taken before anything is loaded, so that a taken port is told at once."""

from __future__ import annotations

import socket

from trace_jax.errors import InputError


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises InputError, which names the flag, where it cannot."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise InputError(f"--host={host}: {error.strerror}; give an address of this machine") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # else another server could still take the port while this one loads
    except OSError as error:
        listener.close()
        raise InputError(f"--port={port}: {error.strerror} on {host}; give another --port, or 0 for any that is free") from error
    return listener


def url(listener: socket.socket, host: str) -> str:
    """Its address, as a browser takes it."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
