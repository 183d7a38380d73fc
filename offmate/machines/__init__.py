"""Machines: the devices, memory and measured rates of this machine, and hardware files of others."""
