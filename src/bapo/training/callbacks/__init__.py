"""What watches a run from outside the loop."""
