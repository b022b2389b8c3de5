"""Routes of operators: workers and scale, pauses, dead letters, cost curves, tenants."""
