"""Rollout engines: transformers, vLLM in processes of its own, vLLM servers; weight sync and its check."""
