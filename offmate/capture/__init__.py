"""Capture: turns a model and a batch into a chain of blocks, each traced as eager mode runs it."""
