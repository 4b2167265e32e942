"""A new run begins with the weights of another's checkpoint."""

from collections.abc import Callable

from k3_jax.checkpoint.load import open_checkpoint
from k3_jax.checkpoint.tree import check_match
from k3_jax.model import K3, abstract
from k3_jax.tree import named_leaves, nest, with_leaves


def starting_weights(path: str, model: K3) -> Callable[[], K3] | None:
    """What reads the weights of the checkpoint in `path` into `model`, which has shapes alone.

    Whatever `open_checkpoint` takes: a training run, a converted or a released checkpoint. Weights
    take the dtypes of `model`, packed experts are widened; optimizer and data begin anew. "" is
    none. Raises before anything is read where there is no checkpoint, or one of other shapes.
    """
    if not path:
        return None
    opened = open_checkpoint(path, model.config.param_dtype)
    shapes = (nest(named_leaves(m)) for m in (abstract(opened.config), model))
    check_match(f"{path} (start_from)", *shapes, cast=True)
    return lambda: with_leaves(model, named_leaves(opened.load()))
