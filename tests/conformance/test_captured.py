"""Every model is captured, and the recorded graph is the model: replayed with its weights it gives the same bits."""
