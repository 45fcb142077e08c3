"""Pagoda's memory inside other engines. What is here uses `pagoda.kv` alone, never Pagoda's own engine."""
