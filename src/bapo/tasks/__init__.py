"""Prompts and verifiers, one file per task; each class fulfils `bapo.types.Task`."""
