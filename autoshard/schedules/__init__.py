"""Schedules of pipelines: in which order every device runs its actions, and how long all of it takes."""
