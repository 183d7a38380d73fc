"""Measurements that are no tests: each prints what it ran on and can write JSON."""
