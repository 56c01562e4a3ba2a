"""The processes of one run: usually one, on a pod one a host, all running the same command in step.

Process 0 leads. It alone writes to the workdir, and what the workdir is asked, all are told by it, so that no two processes ever see it at
different moments and go different ways. Everything else is computed by all from the same batches. How the processes find each other, and
end, is told in `trace_jax.processes.job`.

JAX is imported only where there are several processes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any, TypeVar

from envs.base import EnvironmentFault, SandboxError
from trace_jax.errors import InputError, Unfinished

T = TypeVar("T")


class Processes:
    """This process among those of the run. The methods are called by all of them, in the same order.

    Attributes:
      index, count: this one's number, and how many there are.
    """

    def __init__(self, index: int = 0, count: int = 1):
        self.index, self.count = index, count
        self._answering = False

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes."""
        return self.index == 0

    def agree(self, answer: Callable[[], T]) -> T:
        """What process 0 computes; the others wait for it, and for what it has written by then.

        Args:
          answer: gives None, bytes, or a JSON value. What it asks in turn is answered there and then.

        Raises:
          InputError, Unfinished, OSError, SandboxError, EnvironmentFault: process 0 raised it; all do.
        """
        if self.count == 1 or self._answering:
            return answer()
        self._answering = True
        try:
            message = _encode(answer) if self.leads else b""
        finally:
            self._answering = False
        return _decode(self._broadcast(message))

    def same(self, arrays: T) -> T:
        """A tree of arrays as process 0 has it, NumPy in all."""
        if self.count == 1:
            return arrays
        from jax.experimental.multihost_utils import broadcast_one_to_all

        return broadcast_one_to_all(arrays)

    def gather(self, *numbers: int) -> list[tuple[int, ...]]:
        """The numbers of every process, in the order of their indices."""
        if self.count == 1:
            return [numbers]
        import numpy as np
        from jax.experimental.multihost_utils import process_allgather

        low, high = (
            process_allgather(np.array(part, np.uint32)) for part in zip(*((n & 0xFFFFFFFF, n >> 32) for n in numbers), strict=True)
        )
        return [tuple(int(a) | int(b) << 32 for a, b in zip(*pair, strict=True)) for pair in zip(low, high, strict=True)]

    def share(self, groups: int) -> range:
        """The groups, of so many, that this process works on: consecutive ones, so that all shares in order are all of them in order."""
        return range(groups * self.index // self.count, groups * (self.index + 1) // self.count)

    def _broadcast(self, data: bytes) -> bytes:
        import numpy as np

        (size,) = self.same(np.array([len(data)], np.uint32))
        room = 1 << max(10, int(size - 1).bit_length())  # few sizes, since each is compiled
        padded = np.zeros(room, np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        return np.asarray(self.same(padded))[:size].tobytes()


ALONE = Processes()


def _encode(answer: Callable[[], Any]) -> bytes:
    try:
        value = answer()
        message = {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else {"value": value}
    except InputError as error:
        message = {"input": str(error)}
    except Unfinished as error:
        message = {"unfinished": str(error)}
    except SandboxError as error:
        message = {"sandbox": str(error)}
    except EnvironmentFault as error:
        message = {"fault": [error.kind, str(error)]}
    except OSError as error:
        message = {"os": [error.errno, error.strerror, error.filename and str(error.filename)]}
    return json.dumps(message).encode()


def _decode(data: bytes) -> Any:
    message = json.loads(data)
    if "input" in message:
        raise InputError(message["input"])
    if "unfinished" in message:
        raise Unfinished(message["unfinished"])
    if "sandbox" in message:
        raise SandboxError(message["sandbox"])
    if "fault" in message:
        raise EnvironmentFault(*message["fault"])
    if "os" in message:
        raise OSError(*message["os"])
    return base64.b64decode(message["bytes"]) if "bytes" in message else message["value"]
