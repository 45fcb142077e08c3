"""One file per engine: loads it and answers over stdin and stdout (`serve.py`). Each runs in that engine's environment."""
