"""From prompts to a pool: engines, seeds, the collector, the pool as a file, and the schedule of refills."""
