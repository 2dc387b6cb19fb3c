"""Apply plans to models, in place, and undo it. Reads a plan and a module; knows nothing of planning."""
