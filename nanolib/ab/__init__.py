"""Two versions of the code, measured in turns: `question` asks, `rounds` interleaves, `server` is a version in its own process."""
