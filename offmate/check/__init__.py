"""Trains a model a few steps beside plain PyTorch, and says whether all numbers are the same."""
