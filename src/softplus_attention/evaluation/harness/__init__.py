"""lm-evaluation-harness: tasks, their data, and its model interface."""
