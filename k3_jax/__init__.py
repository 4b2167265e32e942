"""Kimi K3 in JAX: `k3_jax.model.K3` is the model, `k3_jax.config` its sizes."""
