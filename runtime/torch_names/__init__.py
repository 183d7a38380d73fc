"""What is used of torch without being public there, by theme: the one place to look at when another torch comes.

Everything here is known to be right in torch 2.11.0 and 2.13.0. Docstrings say what a name gives, and why no public one
does. `tests/house/private_names.py` lists the names as torch spells them; one test names those that an installed torch
lacks, another sees to it that no other file uses any.
"""
