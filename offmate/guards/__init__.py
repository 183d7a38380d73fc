"""Guards: detect changes of the Python state of a model, and of torch's settings, that decide its numbers."""
