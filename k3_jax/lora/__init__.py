"""Adapters on a frozen checkpoint: trained by train.py, merged by python -m k3_jax.lora."""
