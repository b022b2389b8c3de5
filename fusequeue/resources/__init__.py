"""Parts of the client with a name of their own: batches, operations, webhooks, jobs and dead letters that match."""
