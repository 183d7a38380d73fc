"""Storage paths: the bytes of tensors in files, read and written past the page cache and checked at every read."""
