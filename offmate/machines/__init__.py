"""Machines: this one's devices, memory and measured rates, and files of others that are not here."""
