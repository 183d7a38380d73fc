"""Replay: a schedule's actions carried out, one handler per kind of item."""
