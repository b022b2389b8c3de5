"""What belongs to a tenant besides its jobs: webhooks and uploaded adapters."""
