"""The integer program: its columns and rows, the search for its best point, and the interpretation of that point."""
