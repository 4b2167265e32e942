"""Batch inference: an engine that works in token ids, and the files around it."""
