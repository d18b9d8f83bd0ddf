"""Statistics that know nothing of torch, devices or rows: arrays in, intervals and labels out."""
