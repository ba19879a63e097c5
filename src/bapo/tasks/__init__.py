"""Prompts and verifiers, one file per task; each fulfils `bapo.protocols.Task`."""
