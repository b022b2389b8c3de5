"""`fusequeue webhooks`: webhooks on the machine of a developer."""
