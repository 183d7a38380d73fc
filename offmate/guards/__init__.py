"""What of a model's Python, and of torch around it, decides its numbers, and whether that has changed."""
