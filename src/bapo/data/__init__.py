"""The data module: it keeps the calendar of rounds and deals their pools out as mini-batches."""
