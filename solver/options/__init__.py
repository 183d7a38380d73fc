"""Options of a block class: what its forward keeps, recomputes or offloads; and pieces of states."""
