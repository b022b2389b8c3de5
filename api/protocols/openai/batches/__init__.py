"""The steps of batches, which the chores run."""
