"""Polish: a valid schedule is made faster by moving the actions that may move."""
