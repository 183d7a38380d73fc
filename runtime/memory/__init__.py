"""Memory of an accelerator: the bytes that its allocator reserves, and the room that tensors find in them."""
