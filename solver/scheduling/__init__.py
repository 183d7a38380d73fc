"""Scheduling: decisions become actions in order, and what makes such an order valid."""
