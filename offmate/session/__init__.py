"""Sessions: a compiled model at work, its loop, its truth on the host, and what the user may do around it."""
