"""The verbs of the command line that look at plans and machines, and what their screens share."""
