"""The pictures that need single tokens, from RUN/updates: who is clipped, what that does to the entropy, how old tokens are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from bapo.analysis.figures import COLOURS, STYLE
from bapo.records.clipping import PROBABILITY_EDGES, RATIO_EDGES
from bapo.records.entropy import EntropyChanges, correlation
from bapo.records.files import FOLDER, check_complete, read_updates

RATIO_TICKS = (0.125, 0.25, 0.5, 1, 2, 4, 8)
NEGATIVE, POSITIVE, BELOW, ABOVE = 0, 2, 0, 2  # places in `by_side`


@dataclass
class ClipSummary:
    """Sums over the updates of a run; shares: [U, sign, side, clipped] of each update's trained tokens."""

    steps: list[int] = field(default_factory=list)
    shares: list[np.ndarray] = field(default_factory=list)
    bounds: list[tuple[float, float]] = field(default_factory=list)
    histogram: np.ndarray | float = 0.0
    entropy_by_ratio: np.ndarray | float = 0.0
    ages: list[np.ndarray] = field(default_factory=list)
    changes: EntropyChanges = field(default_factory=EntropyChanges)


def summarise(run_dir: Path) -> ClipSummary:
    """One pass over the records, one update in memory at a time. ValueError if one is missing or damaged."""
    found = ClipSummary()
    folder = run_dir / FOLDER
    for record in read_updates(folder, check_complete(folder)):
        found.steps.append(record.step)
        found.shares.append(record.by_side / max(1, record.facts["tokens"]))
        found.bounds.append((record.facts["clip_low"], record.facts["clip_high"]))
        found.histogram = found.histogram + record.histogram.astype(np.int64)
        found.entropy_by_ratio = found.entropy_by_ratio + record.entropy_by_ratio
        found.ages.append(record.ages)
        found.changes.add(record)
    return found


def clipped_tokens(found: ClipSummary) -> Figure:
    """Shares of trained tokens beyond the bounds by update, of each sign on both sides."""
    figure = Figure(figsize=(7.6, 4.6), layout="constrained")
    figure.suptitle("Tokens beyond the bounds, by sign and side", x=0.01, ha="left")
    grid = figure.subplots(2, 1, sharex=True)
    shares = np.array(found.shares)
    for axes, sign, label in zip(grid, (POSITIVE, NEGATIVE), ("A > 0", "A < 0"), strict=True):
        for colour, side, where in ((COLOURS[0], ABOVE, "r > clip_high"), (COLOURS[1], BELOW, "r < clip_low")):
            for clipped, dash, said in ((1, "-", "clipped"), (0, ":", "not clipped")):
                values = shares[:, sign, side, clipped]
                if values.any():
                    axes.plot(found.steps, values, color=colour, linestyle=dash, label=f"{where}, {said}", linewidth=1.4)
        axes.set_ylabel(f"{label}: share of tokens")
        if axes.lines:
            axes.legend(loc="best")
    grid[-1].set_xlabel("optimizer updates")
    return figure


def probability_and_ratio(found: ClipSummary) -> Figure:
    """Heat maps of probability x ratio for both signs over the whole run, and the mean entropy of each ratio bin's tokens."""
    figure = Figure(figsize=(7.6, 4.6), layout="constrained")
    figure.suptitle("Probability and importance ratio of the trained tokens", x=0.01, ha="left")
    grid = figure.subplots(1, 3, sharey=True, width_ratios=(3, 3, 1.6))
    counts = np.asarray(found.histogram)
    low, high = np.mean(found.bounds, axis=0)
    norm = LogNorm(1, max(2, counts[[NEGATIVE, POSITIVE]].max()))
    for axes, sign, label in zip(grid, (POSITIVE, NEGATIVE), ("A > 0", "A < 0"), strict=False):
        shown = np.ma.masked_equal(counts[sign].T, 0)
        mesh = axes.pcolormesh(PROBABILITY_EDGES, RATIO_EDGES, shown, norm=norm, cmap="viridis")
        axes.set(xscale="log", yscale="log", title=label, xlabel="probability now")
        axes.set_yticks(RATIO_TICKS, [f"{tick:g}" for tick in RATIO_TICKS])
        axes.minorticks_off()
        for level in (low, high):
            axes.axhline(level, color="#444444", linestyle=":", linewidth=1.2)
    grid[0].set_ylabel("importance ratio (dotted: mean bounds)")
    figure.colorbar(mesh, ax=grid[:2].tolist(), label="tokens", shrink=0.8, location="bottom")
    tokens = counts.sum(axis=(0, 1))
    used = tokens > 0
    middle = np.sqrt(RATIO_EDGES[:-1] * RATIO_EDGES[1:])
    grid[2].plot(
        np.asarray(found.entropy_by_ratio)[used] / tokens[used], middle[used], color=COLOURS[2], marker="o", markersize=3
    )
    grid[2].set(title="all tokens", xlabel="mean entropy")
    return figure


def entropy_and_covariance(found: ClipSummary) -> Figure:
    """The change of entropy after each update against its covariance, measured in two ways, with the correlation of each."""
    figure = Figure(figsize=(7.6, 4.6), layout="constrained")
    figure.suptitle("Entropy change and Cov[log pi(y), A X(y)]", x=0.01, ha="left")
    changes = found.changes
    ways = {
        "the same tokens an epoch later, per update": changes.same_rows(),
        "logged entropy: next update, other tokens": changes.logged(),
    }
    for axes, (title, values), colour in zip(figure.subplots(1, 2), ways.items(), COLOURS, strict=False):
        axes.scatter(changes.covariances, values, s=9, alpha=0.6, color=colour)
        r, pairs = correlation(changes.covariances, values)
        said = "no correlation to speak of" if math.isnan(r) else f"correlation {r:.2f}"
        axes.set_title(f"{title}\n{said}, {pairs} updates", fontsize=9.5)
        axes.axhline(0, color="#888888", linewidth=0.8)
        axes.set_xlabel("covariance (nats x advantage)")
    figure.axes[0].set_ylabel("entropy change (nats)")
    return figure


def ages_of_tokens(found: ClipSummary) -> Figure:
    """Heat map of the trained tokens by update and age; neighbours share a cell where there are many."""
    figure = Figure(figsize=(7.6, 4.6), layout="constrained")
    figure.suptitle("How old the trained tokens are", x=0.01, ha="left")
    axes = figure.subplots()
    steps = np.repeat(found.steps, [len(pairs) for pairs in found.ages])
    ages, tokens = np.concatenate(found.ages).T
    edges = [_edges(found.steps[0], found.steps[-1], 120), _edges(0, int(ages.max(initial=0)), 80)]
    share, *_ = np.histogram2d(steps, ages, bins=edges, weights=tokens)
    share /= np.maximum(share.sum(axis=1, keepdims=True), 1)
    mesh = axes.pcolormesh(*edges, np.ma.masked_equal(share.T, 0), norm=LogNorm(0.001, 1), cmap="viridis")
    axes.set(xlabel="optimizer updates", ylabel="age (optimizer updates)")
    axes.grid(False)
    figure.colorbar(mesh, ax=axes, label="share of the tokens")
    return figure


def _edges(first: int, last: int, most: int) -> np.ndarray:
    """Borders of cells that hold equally many of the whole numbers first .. last, `most` cells at most."""
    width = -(-(last - first + 1) // most)
    return np.arange(first, last + width + 1, width) - 0.5


CLIP_PICTURES: dict[str, tuple[Callable[[ClipSummary], Figure], str]] = {
    "clipped_tokens": (
        clipped_tokens,
        "Of the trained tokens of each update: those beyond a bound. A token with A > 0 below clip_low, or with A < 0 above "
        "clip_high, keeps its gradient unless the loss clips it too.",
    ),
    "probability_ratio": (
        probability_and_ratio,
        "All updates together; the probability is the policy's at the update, and ratios are those that bounds are compared "
        "with. What lies outside of an axis is drawn at its end.",
    ),
    "entropy_clip": (
        entropy_and_covariance,
        "Eq. 6 says: entropy change = -lr x covariance, so a negative correlation is expected. Left: an update's own tokens "
        "until they are trained on again, updates on other data between; right: one update apart, but other tokens.",
    ),
    "token_ages": (
        ages_of_tokens,
        "Updates between the weights that drew a token and the update that trains on it. Lag shifts the band up; replay and "
        "responses that take several rounds widen it.",
    ),
}


def draw_clip_pictures(run_dir: Path, figures: Path) -> dict[str, str]:
    """Writes the PNGs of a run with records into `figures`; stem -> caption. {} for a run without records.

    ValueError if a record is missing or damaged.
    """
    for stem in CLIP_PICTURES:
        (figures / f"{stem}.png").unlink(missing_ok=True)
    if not any((run_dir / FOLDER).glob("update_*.npz")):
        return {}
    found = summarise(run_dir)
    figures.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for stem, (picture, _) in CLIP_PICTURES.items():
            picture(found).savefig(figures / f"{stem}.png", dpi=130)
    return {stem: caption for stem, (_, caption) in CLIP_PICTURES.items()}
