"""Options of a block class (the values that its forward keeps, recomputes or offloads), and pieces of states."""
