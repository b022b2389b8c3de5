"""Commands of operators: pauses, cost curves, the action log, keys and limits of tenants, dead letters."""
