"""Readers of run folders: records, what-if, figures, report, tables."""
