"""Plans: a schedule with its prediction; how it is kept, printed, saved, and compared with what really happened."""
