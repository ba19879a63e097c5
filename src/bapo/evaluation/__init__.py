"""TokenStats of a policy on held-out problems: what is drawn, what is computed of it, and where it is kept."""

from bapo.evaluation.scoring import Scored, check_samples, evaluate, metrics, scored_chunks

__all__ = ["Scored", "check_samples", "evaluate", "metrics", "scored_chunks"]
