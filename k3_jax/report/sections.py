"""What the page shows of a run, in order, and what a healthy run looks like there."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from k3_jax.report import figures
from k3_jax.report.figures import Curve, Map, Panel
from k3_jax.report.record import Column, Record

N_LAYERS = 4  # of the MoE layers, so many have a map of their own experts
NEAREST_TO_ONE = 1 - 2.0**-24  # a decay in float32 that still forgets


class Part(NamedTuple):
    """A figure, or None where the run lacks what it is drawn from, and what is said below it."""

    caption: str
    svg: str | None = None


class Section(NamedTuple):
    title: str
    parts: list[Part]


def sections(record: Record) -> list[Section]:
    """All sections; one whose numbers were not kept says so."""
    made: list[tuple[str, list[Callable]]] = [
        ("Loss", [loss]),
        ("Optimizer", [optimizer]),
        ("Experts", [balance, load_of_layers, load_of_experts]),
        ("Attention Residuals", [sources]),
        ("Memory of the KDA layers", [decay, decay_over_steps]),
        ("Scale of activations and gradients", [scales]),
        ("Speed", [speed, time_spent]),
    ]
    return [Section(title, [draw(record) for draw in parts]) for title, parts in made]


def present(record: Record, *given: tuple) -> list[Curve]:
    """Curves (label, key[, look]) of those keys that the run has."""
    found = [(label, record.column(key), *look) for label, key, *look in given]
    return [Curve(*curve) for curve in found if curve[1] is not None]


def missing(*keys: str) -> Part:
    """Says which keys a figure would be drawn from."""
    hint = " (health_every=0, or an older run)" if "health" in keys[0] else ""
    return Part(f"Not drawn: metrics.jsonl has no {' and no '.join(keys)}{hint}.")


def drawn_curves(record: Record, panels: list[Panel], caption: str, *keys: str) -> Part:
    """The panels that have a curve, or which keys none has."""
    panels = [panel for panel in panels if panel.curves]
    if not panels:
        return missing(*keys)
    svg, notes = figures.curves(panels, record.stages)
    return Part(f"{caption} {notes}".strip(), svg)


def drawn_maps(record: Record, given: list[tuple], caption: str) -> Part:
    """A map (key, Map without its column, names, ...) for each of the keys that the run has."""
    found = [
        Map(title, label, bar, record.column(key), **more)
        for key, title, label, bar, more in given
        if record.column(key) is not None
    ]
    if not found:
        return missing(*(key for key, *_ in given))
    return Part(caption, figures.maps(found, record.stages))


def loss(record: Record) -> Part:
    curves = present(record, ("training", "loss", "smooth"), ("held out", "heldout_loss", "dots"))
    bits = present(record, ("held out", "heldout_bits_per_byte", "dots"))
    panels = [Panel("loss, nats per token", curves), Panel("held out, bits per byte", bits)]
    caption = (
        "Healthy: a steep fall, then a slow one without steps upward, and a held-out loss that "
        "follows the training loss; where it turns up alone, text is being learned by heart."
    )
    return drawn_curves(record, panels, caption, "loss", "heldout_loss")


def optimizer(record: Record) -> Part:
    clip, bound = record.config("optim.clip_norm"), record.config("optim.qk_clip")
    norm = present(record, ("gradient", "grad_norm"))
    rate = present(record, ("learning rate", "learning_rate"))
    logit = present(record, ("largest of a step", "largest_logit"))
    left_out = present(
        record, ("all so far", "skipped", "stairs"), ("of them spikes", "spikes", "stairs")
    )
    clip = ("clipped above", clip) if clip else None
    bound = ("QK-Clip", bound) if bound else None
    panels = [
        Panel("gradient norm", norm, "log", clip),
        Panel("learning rate", rate),
        Panel("attention logit", logit, "zero", bound),
        Panel("steps left out", left_out, "zero"),
    ]
    caption = (
        "Healthy: a gradient norm that settles after warm-up, attention logits that do not stay "
        "above the bound, and no steps left out, or few and far between."
    )
    return drawn_curves(record, panels, caption, "grad_norm", "learning_rate")


def balance(record: Record) -> Part:
    load = present(record, ("fullest expert", "load_max"), ("emptiest", "load_min"))
    width = present(record, ("widest of a layer", "bias_range"))
    dropped = present(record, ("dropped", "dropped"))
    panels = [
        Panel("load over its mean", load),
        Panel("router bias, range", width),
        Panel("tokens dropped, share", dropped, "zero"),
    ]
    caption = (
        "The worst layer of each step. Healthy: within some dozens of steps the fullest expert "
        "comes close to 1 (chance alone leaves about 1 + 4.5 / √(tokens per expert)), the "
        "range of the bias levels off, and nothing is dropped."
    )
    return drawn_curves(record, panels, caption, "load_max", "load_min")


def moe_rows(record: Record, n: int) -> tuple[str, list | None]:
    """A label and, where the configuration is known, the numbers of the n MoE layers."""
    n_dense = record.config("model.n_dense")
    return ("MoE layer", None) if n_dense is None else ("layer", [*range(n_dense, n_dense + n)])


def load_of_layers(record: Record) -> Part:
    key = "load_max_layers"
    column = record.column(key)
    if column is None:
        return missing(key)
    label, names = moe_rows(record, column.values.shape[1])
    title = "Fullest expert of each layer"
    drawn = Map(title, label, "load / mean", column, centre=1.0, names=names)
    caption = (
        "Healthy: pale all over after the first steps; a row that stays red is a layer whose "
        "router does not get balanced."
    )
    return Part(caption, figures.maps([drawn], record.stages))


def load_of_experts(record: Record) -> Part:
    key = "health/expert_load"
    column = record.column(key)
    if column is None:
        return missing(key)
    steps, load = column  # [n, layers, experts]
    mean = np.nanmean(load, axis=2, keepdims=True)
    load = load / np.where(mean > 0, mean, np.nan)
    n = load.shape[1]
    label, names = moe_rows(record, n)
    layers = sorted(set(np.linspace(0, n - 1, min(n, N_LAYERS)).astype(int).tolist()))
    shown = [
        Map(
            f"{label} {names[z] if names else z}",
            "expert",
            "load / mean",
            Column(steps, load[:, z]),
            centre=1.0,
        )
        for z in layers
        if np.isfinite(load[:, z]).any()
    ]
    if not shown:
        return missing(key)
    caption = (
        f"{len(shown)} of {n} MoE layers. Healthy: no lasting rows; an expert that stays blue is "
        "hardly used, one that stays red holds up the others."
    )
    return Part(caption, figures.maps(shown, record.stages))


def sources(record: Record) -> Part:
    keys = {"before attention": "health/attn_res", "before the FFN": "health/attn_res_ffn"}
    found = {title: record.column(key) for title, key in keys.items()}
    found = {title: column.values[-1] for title, column in found.items() if column is not None}
    if not found:
        return missing(*keys.values())
    caption = (
        "Mean weight that a layer gives each of its sources at the last such step: 0 is the "
        "embedding, then the sums of earlier blocks, and last the running sum of its own. Healthy: "
        "several sources in use, different ones in different layers. All equal is an untrained "
        "model; one column alone means that the other blocks are not read."
    )
    n_sources = max(part.shape[1] for part in found.values())
    parts = [
        np.pad(part, ((0, 0), (0, n_sources - part.shape[1])), constant_values=np.nan)
        for part in found.values()
    ]
    return Part(caption, figures.shares(list(found), parts, "layer", "source", "weight"))


def kda_names(record: Record, n: int) -> list:
    """The numbers of the KDA layers among all layers."""
    column = record.column("health/kda_layers")
    names = [] if column is None else column.values[-1].astype(int).tolist()
    return names if len(names) == n else list(range(n))


def half_life(alpha):
    """After how many tokens half of a state is left: log 1/2 over log alpha."""
    return np.log(0.5) / np.log(np.clip(alpha, 1e-30, NEAREST_TO_ONE))


def decay(record: Record) -> Part:
    column = record.column("health/kda_decay")
    if column is None:
        return missing("health/kda_decay")
    quantiles = column.values[-1]
    panels = [
        ("decay α per token", quantiles, False),
        ("half-life, tokens", half_life(quantiles), True),
    ]
    caption = (
        "The decay of a state's channels at the last such step: 5 to 95 % of channels and tokens "
        "(thin), 25 to 75 % (thick), median (dot). Healthy: a wide spectrum, from channels that "
        "forget within a few tokens to some that keep for thousands; all at 1 never forget, all "
        "near 0 remember nothing."
    )
    return Part(caption, figures.spectrum(panels, kda_names(record, len(quantiles))))


def decay_over_steps(record: Record) -> Part:
    decay, beta = record.column("health/kda_decay"), record.column("health/kda_beta")
    shown = []
    if decay is not None:
        middle = Column(decay.steps, half_life(decay.values[:, :, 2]))
        names = kda_names(record, middle.values.shape[1])
        title = "Half-life of the median channel"
        shown.append(Map(title, "layer", "tokens", middle, log=True, names=names))
    if beta is not None:
        names = kda_names(record, beta.values.shape[1])
        shown.append(Map("Write strength β, mean", "layer", "β", beta, names=names))
    if not shown:
        return missing("health/kda_decay", "health/kda_beta")
    caption = (
        "Healthy: slow drift that comes to rest; a sudden change across layers, or β at 0 or 1 "
        "everywhere, is a gate that has saturated."
    )
    return Part(caption, figures.maps(shown, record.stages))


def scales(record: Record) -> Part:
    given = [
        ("health/activation_rms", "Running sum after a layer", "layer", "rms", dict(log=True)),
        ("health/gradient_rms", "Gradient of a layer's weights", "layer", "rms", dict(log=True)),
        ("health/situ_saturation", "Saturated gates of SiTU-GLU", "layer", "share", {}),
    ]
    caption = (
        "Root mean squares and shares. Healthy: neighbouring layers alike, and no row that grows "
        "on and on; gradients that vanish in the first layers, or sums that double again and "
        "again, come before a loss that diverges."
    )
    return drawn_maps(record, given, caption)


def speed(record: Record) -> Part:
    used = present(record, ("MFU", "mfu"))
    # Without a known peak there is no MFU; with one the two curves are the same.
    flops = [] if used else present(record, ("model", "tflops_per_device"))
    panels = [
        Panel("tokens per second", present(record, ("tokens", "tokens_per_second")), "zero"),
        Panel("TFLOP/s per device", flops, "zero"),
        Panel("MFU, share of peak", used, "zero"),
        Panel("goodput, share of time", present(record, ("goodput", "goodput")), "zero"),
    ]
    caption = (
        "Of the steps alone, without saves and evaluations. Healthy: flat, from the second point "
        "on at the latest; dips at equal distances are something that the loop waits for."
    )
    return drawn_curves(record, panels, caption, "tokens_per_second")


def time_spent(record: Record) -> Part:
    prefix = "seconds_"
    keys = [key for key in record.columns if key.startswith(prefix)]
    seconds = {key.removeprefix(prefix): record.last(key) for key in keys}
    seconds = {what: x for what, x in seconds.items() if x is not None}
    if not seconds:
        return missing("seconds_productive", "seconds_compile")
    total = sum(seconds.values()) or 1
    unit, label = (3600, "hours") if total > 7200 else (1, "seconds")
    values = {what: x / unit for what, x in seconds.items()}
    told = [f"{figures.brief(x / unit)} ({x / total:.1%})" for x in seconds.values()]
    goodput = record.last("goodput")
    caption = (
        "Where the time of all starts of the run went; restart is starting, restoring and making "
        "steps again. Healthy: productive steps take nearly all of it, the more the longer the run."
    )
    if goodput is not None:
        caption += f" Goodput: {goodput:.1%}."
    return Part(caption, figures.bars(values, f"{label} of the whole run", told))
