"""Programs: a block's operators in order, forward and backward, for one choice of what is recomputed."""
