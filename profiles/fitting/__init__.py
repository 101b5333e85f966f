"""From raw samples to the numbers of a step table."""
