"""k3_jax and its two sister packages. Ranges are here, exact versions in constraints.txt."""

from setuptools import find_packages, setup

setup(
    name="k3_jax",
    version="0.1.0",
    description="Kimi K3 in JAX and Flax for TPU pods",
    packages=find_packages(
        include=["k3_jax", "k3_jax.*", "pallas_kernels", "pallas_kernels.*", "sharding"]
    ),
    python_requires=">=3.12",
    install_requires=[
        "absl-py",
        "array_record>=0.8.1",
        "blake3>=1.0",
        "etils[epath]",
        "flax>=0.12.10,<0.13",
        "grain>=0.2.18",
        "jax>=0.11.2,<0.13",
        "ml_collections>=1.1",
        "ml_dtypes>=0.5",
        "numpy>=2.2",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12.8,<0.13",
        "pyarrow",
        "rich",
        "safetensors>=0.5",
        "tensorstore>=0.1.80",
        "tensorboardX",
        "tiktoken",
        "tokenizers",
    ],
    extras_require={
        "tpu": ["jax[tpu]"],
        "cuda": ["jax[cuda13]"],
        "serve": ["starlette", "uvicorn"],
        "report": ["matplotlib>=3.10"],
        "test": ["fsspec", "hypothesis", "matplotlib>=3.10", "pytest", "pytest-xdist", "ruff"],
    },
)
