"""What several benchmarks use: clients over HTTP, and the record of a run."""
