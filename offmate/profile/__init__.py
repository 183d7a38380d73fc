"""Profile: seconds and bytes of operators and updates, measured here or worked out for another machine."""
