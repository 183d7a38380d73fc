"""Sessions of compiled models: the training loop, the state on the host, and the user's actions around it."""
