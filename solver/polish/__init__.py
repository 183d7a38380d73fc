"""Polish: a valid schedule made faster, by moving what its rules let move."""
