"""Capture: from a model and a batch to a chain of blocks, each traced as eager runs it."""
