"""What is made of a run's numbers once they are on disk."""
