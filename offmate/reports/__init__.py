"""Views of plans and traces: pictures, trace files and data frames. None of them changes a plan."""
