"""Maintenance: lost workers, deadlines, retention, dead letters, and repair after a failover."""

from shared.queue.maintenance.dead_letters import DeadLetters
from shared.queue.maintenance.maintenance import Maintenance

__all__ = ["DeadLetters", "Maintenance"]
