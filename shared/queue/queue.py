"""The queue of one namespace, composed of its components."""

from __future__ import annotations

from shared.config.settings import Settings
from shared.queue.api_keys import ApiKeys
from shared.queue.batches import Batches
from shared.queue.claims import Claims
from shared.queue.client import QueueClient
from shared.queue.connections.redis_traits import RedisTrait, examine
from shared.queue.files import Files
from shared.queue.groups import Groups
from shared.queue.inputs import StoredInputs
from shared.queue.job_graphs import JobGraphs
from shared.queue.jobs import Jobs
from shared.queue.maintenance import DeadLetters, Maintenance
from shared.queue.maintenance.actions import ActionLog
from shared.queue.maintenance.changes import JobChanges
from shared.queue.maintenance.model_orders import ModelOrders
from shared.queue.maintenance.pauses import PauseControls
from shared.queue.maintenance.tenant_usage import UsageRecords
from shared.queue.model_facts import PublishedFacts
from shared.queue.model_inputs import ModelInputs
from shared.queue.policies import Policies
from shared.queue.sync_calls import SyncCalls
from shared.queue.tenants.adapters import Adapters
from shared.queue.tenants.webhooks import Webhooks
from shared.queue.workers import Workers
from shared.queue.workers.previews import Previews
from shared.queue.workers.wakeups import Wakeups


class Queue:
    """The jobs of one namespace. Every method raises `RedisUnavailable` when Redis cannot be reached.

    Times are Redis time. A job is queued, claimed by one worker, or ended; each transition is one script.
    """

    def __init__(self, client: QueueClient) -> None:
        self.client = client
        self.jobs = Jobs(client)
        self.changes = JobChanges(client)
        self.claims = Claims(client)
        self.wakeups = Wakeups(client)
        self.workers = Workers(client)
        self.dead_letters = DeadLetters(client)
        self.maintenance = Maintenance(client)
        self.pauses = PauseControls(client)
        self.model_orders = ModelOrders(client)
        self.model_facts = PublishedFacts(client)
        self.model_inputs = ModelInputs(client)
        self.actions = ActionLog(client)
        self.api_keys = ApiKeys(client)
        self.batches = Batches(client)
        self.files = Files(client)
        self.inputs = StoredInputs(client)
        self.groups = Groups(client)
        self.graphs = JobGraphs(client)
        self.adapters = Adapters(client)
        self.webhooks = Webhooks(client)
        self.previews = Previews(client)
        self.sync_calls = SyncCalls(client)
        self.usage = UsageRecords(client)
        self.policies = Policies(client)

    @classmethod
    def connect(cls, settings: Settings) -> Queue:
        """Return a queue with its own connections; `close` closes them."""
        return cls(QueueClient.connect(settings))

    async def now_ms(self) -> int:
        """Return the time of Redis, for comparisons with times that another machine stored."""
        return await self.client.now_ms()

    async def check(self, *, quiet: bool = False) -> None:
        """Raise `IncompatibleRedis` when this Redis could lose jobs or holds a queue of another schema.

        What is worth a warning is logged, unless `quiet`.
        """
        await self.client.check(quiet=quiet)

    async def examine(self) -> list[RedisTrait]:
        """Return Redis' version, settings, memory, clock and schema, with a remedy for each problem."""
        return await examine(self.client)

    async def close(self) -> None:
        """Finish releases of abandoned claims, then close the connections."""
        await self.claims.close()
        await self.client.close()
