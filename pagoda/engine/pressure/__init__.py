"""The pressure ladder at work: its levels (ladder), what each does (config, control), who may queue (admission)."""
