"""Responses of a policy to held-out problems, the metrics computed from them, and the files that keep both."""

from bapo.evaluation.scoring import Scored, check_samples, evaluate, metrics, scored_chunks

__all__ = ["Scored", "check_samples", "evaluate", "metrics", "scored_chunks"]
