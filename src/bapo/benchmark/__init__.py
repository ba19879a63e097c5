"""What `python evaluate.py` does: which policy, asked what, drawn by whom. The numbers come from `bapo.evaluation`."""
