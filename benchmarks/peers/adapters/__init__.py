"""One file per engine: loads it, answers over stdin and stdout (`serve.py`). Each runs in its engine's environment."""
