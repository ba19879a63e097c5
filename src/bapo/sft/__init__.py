"""Supervised fine-tuning on demonstrations: pairs of a prompt and the response that should follow it."""
