"""Pipelines over processes: stages cut out of a recorded forward, run by the schedules of torch."""
