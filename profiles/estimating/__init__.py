"""Step tables of cards not at hand, from their datasheets and what was learned on one that was."""
