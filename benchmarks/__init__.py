"""Measurements that are not tests: each prints the machine that it ran on and can write JSON."""
