"""What another loss would have made of the updates of a run."""
