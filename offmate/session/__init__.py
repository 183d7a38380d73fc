"""Sessions: run a compiled model: its training loop, its state on the host, and the user's actions around it."""
