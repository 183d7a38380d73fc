"""Plans: the schedule with its prediction, as it is held, printed, saved, and compared with what happened."""
