"""SWE-bench: what agents and its harness left in files, predictions, grading of logs, and live episodes.

| file | one idea |
|---|---|
| `reports` | who resolved what: the harness's report, its log tree, predictions joined with them |
| `mini`, `swe_agent` | trajectories of mini-swe-agent and of SWE-agent, joined with a report by instance id |
| `predictions`, `grading` | patches out to the harness; logs graded again by the `swebench` library |
| `driver`, `target` | live episodes: in a process that has mini-swe-agent, and our side of it |
"""
