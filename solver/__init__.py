"""Planning in plain numbers: problem, integer program, rounding, schedule, simulator. Never imports torch."""
