"""Profile: seconds and bytes of operators and updates, measured on this machine or estimated for another one."""
