"""Figures that need single tokens, from RUN/updates: which are clipped, how the entropy then changes, how stale they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from bapo.analysis.figures import COLOURS, STYLE, new_figure, save
from bapo.records.clipping import PROBABILITY_EDGES, RATIO_EDGES
from bapo.records.files import FOLDER, Array, check_complete, load_arrays

RATIO_TICKS = (0.125, 0.25, 0.5, 1, 2, 4, 8)
NEGATIVE, POSITIVE, BELOW, ABOVE = 0, 2, 0, 2  # places in `by_side`
ARRAYS = ("rows", "lengths", "entropy", "staleness", "by_side", "histogram", "entropy_by_ratio")
SIGN_LABELS = {POSITIVE: "A > 0", NEGATIVE: "A < 0"}


@dataclass
class EntropyChanges:
    """Entropy after each update next to the covariance that predicts its change (arXiv 2510.18927, Eq. 6).

    `add` takes one update after the other, all ranks of each; nats per token. Keeps sums per sequence, no tokens.
    covariances: as logged. `same_rows` and `logged` measure the change after each update in two ways.
    """

    steps: list[int] = field(default_factory=list)
    covariances: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    _changes: list[float] = field(default_factory=list)
    _tokens: list[int] = field(default_factory=list)
    _last: dict[tuple[int, ...], tuple[int, int, float]] = field(default_factory=dict)
    _epoch: int = -1

    def add(self, facts: Mapping[str, float], rows: Array, lengths: Array, entropy: Array) -> None:
        """Take the next update; arguments as in `UpdateRecord`."""
        epoch, step, index = int(facts["epoch"]), int(facts["step"]), len(self.steps)
        self.steps.append(step)
        self.covariances.append(facts["entropy_clip_cov"])
        self.entropies.append(facts["entropy"])
        self._changes.append(0.0)
        self._tokens.append(0)
        if epoch > self._epoch:  # each epoch is compared with the one before it only
            self._last = {place: last for place, last in self._last.items() if last[1] == epoch - 1}
            self._epoch = epoch
        row_of_token = np.repeat(np.arange(len(lengths)), lengths)
        totals = np.bincount(row_of_token, weights=entropy.astype(np.float64), minlength=len(lengths)).tolist()
        for place, total, tokens in zip(map(tuple, rows.tolist()), totals, lengths.tolist(), strict=True):
            before = self._last.get(place)
            if before is not None and before[1] == epoch - 1:
                then, _, total_then = before
                self._changes[then] += (total - total_then) / (step - self.steps[then])
                self._tokens[then] += tokens
            self._last[place] = (index, epoch, total)

    def same_rows(self) -> list[float]:
        """Mean over an update's tokens of (entropy in the next epoch - entropy now) / (updates between); NaN without one.

        The tokens are the same; the updates between are on other data.
        """
        return [change / n if n else math.nan for change, n in zip(self._changes, self._tokens, strict=True)]

    def logged(self) -> list[float]:
        """The next update's `policy/entropy` minus this one's: one update apart, over other tokens; NaN for the last."""
        return [after - now for now, after in zip(self.entropies, self.entropies[1:], strict=False)] + [math.nan]


def correlation(one: Sequence[float], other: Sequence[float]) -> tuple[float, int]:
    """(Pearson's r, number of pairs) where both are finite; r is NaN for fewer than three pairs, or for equal values."""
    pairs = np.array([pair for pair in zip(one, other, strict=True) if all(map(math.isfinite, pair))]).reshape(-1, 2)
    if len(pairs) < 3 or not pairs.std(axis=0).all():
        return math.nan, len(pairs)
    return float(np.corrcoef(pairs.T)[0, 1]), len(pairs)


@dataclass
class TokenSummary:
    """Sums over the updates of a run. shares: [U, sign, side, clipped] of each update's trained tokens."""

    steps: list[int] = field(default_factory=list)
    shares: list[np.ndarray] = field(default_factory=list)
    bounds: list[tuple[float, float]] = field(default_factory=list)
    histogram: np.ndarray | float = 0.0
    entropy_by_ratio: np.ndarray | float = 0.0
    staleness: list[np.ndarray] = field(default_factory=list)
    changes: EntropyChanges = field(default_factory=EntropyChanges)


def summarise(run_dir: Path) -> TokenSummary:
    """Read the records once, one update in memory at a time. ValueError if one is missing or damaged."""
    summary = TokenSummary()
    folder = run_dir / FOLDER
    for step in check_complete(folder):
        facts, arrays = load_arrays(folder, step, ARRAYS)
        summary.steps.append(step)
        summary.shares.append(arrays["by_side"] / max(1, facts["tokens"]))
        summary.bounds.append((facts["clip_low"], facts["clip_high"]))
        summary.histogram = summary.histogram + arrays["histogram"].astype(np.int64)
        summary.entropy_by_ratio = summary.entropy_by_ratio + arrays["entropy_by_ratio"]
        summary.staleness.append(arrays["staleness"])
        summary.changes.add(facts, arrays["rows"], arrays["lengths"], arrays["entropy"])
    return summary


def clipped_tokens(summary: TokenSummary) -> Figure:
    """Plot shares of trained tokens beyond the bounds by update, for each sign and side."""
    figure = new_figure("Tokens beyond the bounds, by sign and side")
    grid = figure.subplots(2, 1, sharex=True)
    shares = np.array(summary.shares)
    for axes, (sign, label) in zip(grid, SIGN_LABELS.items(), strict=True):
        for colour, side, where in ((COLOURS[0], ABOVE, "r > clip_high"), (COLOURS[1], BELOW, "r < clip_low")):
            for clipped, dash, state in ((1, "-", "clipped"), (0, ":", "not clipped")):
                values = shares[:, sign, side, clipped]
                if values.any():
                    axes.plot(summary.steps, values, color=colour, linestyle=dash, label=f"{where}, {state}", linewidth=1.4)
        axes.set_ylabel(f"{label}: share of tokens")
        if axes.lines:
            axes.legend(loc="best")
    grid[-1].set_xlabel("optimizer updates")
    return figure


def probability_and_ratio(summary: TokenSummary) -> Figure:
    """Plot probability x ratio for both signs over the whole run, and the mean entropy of each ratio bin's tokens."""
    figure = new_figure("Probability and importance ratio of the trained tokens")
    grid = figure.subplots(1, 3, sharey=True, width_ratios=(3, 3, 1.6))
    counts = np.asarray(summary.histogram)
    norm = LogNorm(1, max(2, counts[[NEGATIVE, POSITIVE]].max()))
    for axes, (sign, label) in zip(grid, SIGN_LABELS.items(), strict=False):
        cells = np.ma.masked_equal(counts[sign].T, 0)
        mesh = axes.pcolormesh(PROBABILITY_EDGES, RATIO_EDGES, cells, norm=norm, cmap="viridis")
        axes.set(xscale="log", yscale="log", title=label, xlabel="probability under the policy")
        axes.set_yticks(RATIO_TICKS, [f"{tick:g}" for tick in RATIO_TICKS])
        axes.minorticks_off()
        for level in np.mean(summary.bounds, axis=0):
            axes.axhline(level, color="#444444", linestyle=":", linewidth=1.2)
    grid[0].set_ylabel("importance ratio (dotted: mean bounds)")
    figure.colorbar(mesh, ax=grid[:2].tolist(), label="tokens", shrink=0.8, location="bottom")
    tokens = counts.sum(axis=(0, 1))
    used = tokens > 0
    centre = np.sqrt(RATIO_EDGES[:-1] * RATIO_EDGES[1:])
    means = np.asarray(summary.entropy_by_ratio)[used] / tokens[used]
    grid[2].plot(means, centre[used], color=COLOURS[2], marker="o", markersize=3)
    grid[2].set(title="all tokens", xlabel="entropy (nats)")
    return figure


def entropy_and_covariance(summary: TokenSummary) -> Figure:
    """Plot the change of entropy after each update against its covariance, measured in two ways, with correlations."""
    figure = new_figure("Entropy change and Cov[log pi(y), A X(y)]")
    changes = summary.changes
    ways = {
        "same tokens, one epoch later, per update": changes.same_rows(),
        "logged entropy: next update, other tokens": changes.logged(),
    }
    for axes, (title, values), colour in zip(figure.subplots(1, 2), ways.items(), COLOURS, strict=False):
        axes.scatter(changes.covariances, values, s=9, alpha=0.6, color=colour)
        r, pairs = correlation(changes.covariances, values)
        result = "correlation undefined" if math.isnan(r) else f"correlation {r:.2f}"
        axes.set_title(f"{title}\n{result}, {pairs} updates", fontsize=9.5)
        axes.axhline(0, color="#888888", linewidth=0.8)
        axes.set_xlabel("covariance (nats x advantage)")
    figure.axes[0].set_ylabel("entropy change (nats)")
    return figure


def staleness_of_tokens(summary: TokenSummary) -> Figure:
    """Plot the trained tokens by update and staleness; neighbours share a cell where there are many."""
    figure = new_figure("Staleness of the trained tokens, distribution")
    axes = figure.subplots()
    steps = np.repeat(summary.steps, [len(pairs) for pairs in summary.staleness])
    staleness, tokens = np.concatenate(summary.staleness).T
    edges = [_edges(summary.steps[0], summary.steps[-1], 120), _edges(0, int(staleness.max(initial=0)), 80)]
    share, *_ = np.histogram2d(steps, staleness, bins=edges, weights=tokens)
    share /= np.maximum(share.sum(axis=1, keepdims=True), 1)
    mesh = axes.pcolormesh(*edges, np.ma.masked_equal(share.T, 0), norm=LogNorm(0.001, 1), cmap="viridis")
    axes.set(xlabel="optimizer updates", ylabel="staleness (optimizer updates)")
    axes.grid(False)
    figure.colorbar(mesh, ax=axes, label="share of trained tokens")
    return figure


def _edges(first: int, last: int, most: int) -> np.ndarray:
    """Borders of at most `most` cells that hold equally many of the whole numbers first .. last."""
    width = -(-(last - first + 1) // most)
    return np.arange(first, last + width + 1, width) - 0.5


TOKEN_PICTURES: dict[str, tuple[Callable[[TokenSummary], Figure], str]] = {
    "clipped_tokens": (
        clipped_tokens,
        "Trained tokens of each update beyond a bound. A token with A > 0 below clip_low, or with A < 0 above clip_high, keeps "
        "its gradient unless the loss clips it too.",
    ),
    "probability_ratio": (
        probability_and_ratio,
        "All updates together. The probability is the policy's at the update; ratios are those that the bounds are compared "
        "with. Values outside an axis count in its last cell.",
    ),
    "entropy_clip": (
        entropy_and_covariance,
        "Eq. 6 predicts: entropy change = -lr x covariance, so a negative correlation. Left: an update's own tokens until they "
        "are trained on again, updates on other data between; right: one update apart, other tokens.",
    ),
    "token_staleness": (
        staleness_of_tokens,
        "Updates between the policy that generated a token and the update that trains on it. A lag shifts the band up; the "
        "replay buffer and partial rollouts widen it.",
    ),
}


def draw_token_figures(run_dir: Path, figures: Path) -> dict[str, str]:
    """Write the PNGs of a run with records into `figures`; return stem -> caption, {} for a run without records.

    ValueError if a record is missing or damaged.
    """
    for stem in TOKEN_PICTURES:
        (figures / f"{stem}.png").unlink(missing_ok=True)
    if not any((run_dir / FOLDER).glob("update_*.npz")):
        return {}
    summary = summarise(run_dir)
    figures.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for stem, (picture, _) in TOKEN_PICTURES.items():
            save(picture(summary), figures / f"{stem}.png")
    return {stem: caption for stem, (_, caption) in TOKEN_PICTURES.items()}
