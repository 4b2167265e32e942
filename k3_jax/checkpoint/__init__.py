"""Checkpoints: our own (store) and the released ones (hf)."""
