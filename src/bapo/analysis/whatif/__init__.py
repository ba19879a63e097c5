"""Recorded updates re-run under another loss."""
