"""Benchmarks' own programs, which drive the conversation themselves, in processes of their own."""

from envs.harness.host import HarnessEpisode, HarnessPool
from envs.harness.target import Program, Target, TaskInfo

__all__ = ["HarnessEpisode", "HarnessPool", "Program", "Target", "TaskInfo"]
