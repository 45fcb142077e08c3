"""Passages reused anywhere: passages.py computes them ahead, blender.py puts them into a step."""
