"""The private names of torch that are used, by theme: the one place to check when a new torch is released.

Everything here is known to be right in torch 2.11.0 and 2.13.0. Docstrings say what a name gives, and why no public one
does. `tests/house/private_names.py` lists the names as torch spells them; one test reports those that an installed
torch lacks, another ensures that no other file uses any.
"""
