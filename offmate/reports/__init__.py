"""Plans and traces as people look at them: pictures, trace files, comparisons. Nothing here changes a plan."""
