"""Replay: the actions of a schedule carried out, with one handler per kind of item."""
