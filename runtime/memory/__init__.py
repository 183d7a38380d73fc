"""Memory of an accelerator: what its allocator reserves, and how tensors find room in it."""
