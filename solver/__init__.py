"""The plan as plain numbers: problem, integer program, rounding, schedule, simulator. Never imports torch."""
