"""Worker processes, held by the kernel, that host environment packages: `Pool` and the `Episode` handles that it opens."""

from envs.sandbox.host import Episode, Pool

__all__ = ["Episode", "Pool"]
