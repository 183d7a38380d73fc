"""A census by lists that are not ours: their models train with plain PyTorch's numbers, or are refused by name."""
