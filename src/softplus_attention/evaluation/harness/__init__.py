"""lm-evaluation-harness: its tasks, their data, and a model as it wants one."""
