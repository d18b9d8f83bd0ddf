"""Statistics of arrays: intervals, verdicts and labels, without torch, devices or rows."""
