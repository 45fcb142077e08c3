"""Measurements. Each module is a command with `--help`; NOTES.md records what was predicted, measured and concluded."""
