"""The names of all keys in the queue's Redis; their only other spelling is the mirror in `queue/lua/prelude.lua`.

Every name begins with the prefix `{fq:<namespace>}:`. The braces are a hash tag: all keys of a namespace lie in one
cluster slot, so the scripts take the prefix as KEYS[1] and may build the other names from it. `<sig>` is a signature,
`<priority>` a name of `Priority`; names hold no `|`, so it parts them. TTL `-` means none: the bound is told instead.

| key                            | type    | TTL               | bound, when there is no TTL      | writer            |
|--------------------------------|---------|-------------------|----------------------------------|-------------------|
| schema                         | string  | -                 | one number                       | check             |
| job:<id>                       | hash    | once it has ended | max_queued_jobs, and what runs  | all               |
| lane:<sig>|<priority>|<tenant> | stream  | -                 | holds work; deleted when empty   | submit, claim     |
| lanes:<sig>|<priority>         | zset    | -                 | lanes with waiting jobs          | submit, claim     |
| front:<sig>                    | zset    | -                 | waiting: given back, passed over | release, claim    |
| alone:<sig>                    | zset    | -                 | waiting jobs that were lost      | reclaim, redrive  |
| sig:<sig>                      | hash    | -                 | deleted when nothing waits, runs | all               |
| signatures                     | zset    | -                 | live signatures, by seats        | all               |
| ripe:<model>|<priority>        | zset    | -                 | signatures with waiting jobs     | all               |
| rhythm:<sig>                   | hash    | 1 h               |                                  | submit, settle    |
| paying:<sig>                   | string  | 1 d               |                                  | learn_paying      |
| pace                           | hash    | 1 h               |                                  | settle            |
| waiting                        | hash    | -                 | tenants with waiting jobs, `*`   | all               |
| service                        | zset    | 1 d               | decayed GPU-seconds, pruned      | settle            |
| leases                         | zset    | -                 | running jobs, by end of lease    | claim, settle     |
| holding                        | hash    | -                 | workers that hold running jobs   | claim, settle     |
| deadlines                      | zset    | -                 | waiting jobs with a deadline     | submit, claim     |
| jobs:<tenant>                  | zset    | -                 | kept jobs: retention             | submit, retained  |
| batch:<tenant>|<batch>         | zset    | -                 | kept jobs: retention             | submit, retained  |
| idem:<tenant>|<digest>         | string  | idempotency_s     |                                  | submit            |
| previews:<job>                 | hash    | 1 min             |                                  | put_preview       |
| tries:<tenant>|<digest>        | zset    | sync_wait_s + 1 m | 1,000 rows                       | note_try          |
| events                         | stream  | -                 | about 100,000 entries            | all               |
| wakeup                         | stream  | -                 | 16 entries                       | submit, release   |
| input:<tenant>|<id>            | hash    | while unused      | live jobs that use an input      | put_input         |
| retention                      | zset    | -                 | what storage holds, by its end   | settle, put_input |
| file:<tenant>|<id>             | hash    | -                 | kept files: retention            | file_put          |
| parts:<tenant>|<id>            | list    | -                 | objects of a file: retention     | file_put          |
| files:<tenant>                 | zset    | -                 | 1,000 rows; kept files           | file_put          |
| backfill:<tenant>|<batch>      | hash    | -                 | as batches; 7 d once it ended    | backfill_commit   |
| taken:<tenant>|<batch>         | string  | -                 | as backfill; a bit a line        | backfill_commit   |
| backfills                      | zset    | -                 | batches under way, when to look  | backfill_commit   |
| videos:<tenant>               | zset    | -                 | kept video jobs: retention       | submit, retained  |
| batches:<tenant>               | zset    | -                 | 1,000 rows                       | backfill_create   |
| worker:<id>                    | hash    | 30 s              |                                  | heartbeat         |
| workers                        | zset    | 1 h               | pruned at each beat              | heartbeat         |
| start_s                        | string  | 7 d               |                                  | learn_start       |
| holders:<model>                | zset    | 30 s              |                                  | heartbeat, claim  |
| curve:<device>|<model>|<shape> | hash    | 30 d              |                                  | learn             |
| learned:<model>|<shape>        | string  | 30 d              |                                  | learn             |
| cost:<sig>                     | hash    | 7 d               |                                  | settle            |
| dead                           | zset    | -                 | 10,000 rows                      | reclaim           |
| dead:<id>                      | hash    | 7 d               |                                  | reclaim           |
| reconciling                    | string  | 1 min             |                                  | reconcile         |
| auth                           | string  | -                 | one word: a key has been made    | create_key        |
| apikeys                        | zset    | -                 | 10,000 rows                      | create_key        |
| apikey:<id>                    | hash    | -                 | as apikeys; 30 d once it ended   | create_key        |
| url_secret                     | string  | -                 | one secret                       | url_secret        |
| limits                         | hash    | -                 | 10,000 tenants                   | set_limits        |
| rate:<tenant>                  | string  | 1 min             |                                  | admit             |
| running                        | hash    | -                 | tenants with running jobs        | claim, settle     |
| held:<tenant>                  | set     | 1 min             |                                  | claim, join       |
| hooks:<tenant>                 | hash    | -                 | 16 endpoints, and the secret     | hook_endpoint     |
| outbox                         | stream  | -                 | about 1,000,000 entries          | all               |
| hook_hosts                     | zset    | -                 | hosts with due deliveries        | hook_expand       |
| hook_due:<host>                | zset    | -                 | deliveries that are not done     | hook_expand       |
| delivery:<id>                  | hash    | 7 d               |                                  | hook_expand       |
| deliveries:<tenant>            | zset    | 7 d               |                                  | hook_expand       |
| progress                       | channel | -                 | no key: one message for all jobs | report            |
"""

from __future__ import annotations

import re

GROUP = "workers"
"""The one consumer group of every lane. It has one consumer, of the same name: who runs a job is told by its hash."""

_BOUNDED = re.compile(
    r"(schema|waiting|signatures|leases|holding|deadlines|events|wakeup|retention|dead"
    r"|auth|apikeys|url_secret|limits|running|outbox|hook_hosts|backfills"
    r"|(lane|lanes|front|alone|sig|ripe|jobs|batch|apikey|hooks|hook_due|file|parts|files|backfill|taken|batches|videos):.+)"
)


class RedisKeys:
    """The key names of one namespace."""

    def __init__(self, namespace: str) -> None:
        prefix = f"{{fq:{namespace}}}:"
        self.prefix = prefix
        self.schema = prefix + "schema"
        self.signatures = prefix + "signatures"
        self.pace = prefix + "pace"
        self.waiting = prefix + "waiting"
        self.service = prefix + "service"
        self.leases = prefix + "leases"
        self.holding = prefix + "holding"
        self.deadlines = prefix + "deadlines"
        self.events = prefix + "events"
        self.wakeup = prefix + "wakeup"
        self.retention = prefix + "retention"
        self.workers = prefix + "workers"
        self.dead = prefix + "dead"
        self.reconciling = prefix + "reconciling"
        self.progress = prefix + "progress"
        self.auth = prefix + "auth"
        self.apikeys = prefix + "apikeys"
        self.url_secret = prefix + "url_secret"
        self.limits = prefix + "limits"
        self.running = prefix + "running"
        self.outbox = prefix + "outbox"
        self.backfills = prefix + "backfills"
        self.hook_hosts = prefix + "hook_hosts"
        self.start_s = prefix + "start_s"

    def job(self, job_id: str) -> str:
        return f"{self.prefix}job:{job_id}"

    def lane(self, signature: str, priority: str, tenant: str) -> str:
        return f"{self.prefix}lane:{signature}|{priority}|{tenant}"

    def lanes(self, signature: str, priority: str) -> str:
        return f"{self.prefix}lanes:{signature}|{priority}"

    def front(self, signature: str) -> str:
        return f"{self.prefix}front:{signature}"

    def alone(self, signature: str) -> str:
        return f"{self.prefix}alone:{signature}"

    def sig(self, signature: str) -> str:
        return f"{self.prefix}sig:{signature}"

    def ripe(self, model: str, priority: str) -> str:
        return f"{self.prefix}ripe:{model}|{priority}"

    def rhythm(self, signature: str) -> str:
        return f"{self.prefix}rhythm:{signature}"

    def paying(self, signature: str) -> str:
        return f"{self.prefix}paying:{signature}"

    def jobs(self, tenant: str) -> str:
        return f"{self.prefix}jobs:{tenant}"

    def batch(self, tenant: str, batch_id: str) -> str:
        return f"{self.prefix}batch:{tenant}|{batch_id}"

    def idem(self, tenant: str, digest: str) -> str:
        return f"{self.prefix}idem:{tenant}|{digest}"

    def previews(self, job_id: str) -> str:
        return f"{self.prefix}previews:{job_id}"

    def tries(self, tenant: str, digest: str) -> str:
        return f"{self.prefix}tries:{tenant}|{digest}"

    def input(self, tenant: str, input_id: str) -> str:
        return f"{self.prefix}input:{tenant}|{input_id}"

    def file(self, tenant: str, file_id: str) -> str:
        return f"{self.prefix}file:{tenant}|{file_id}"

    def parts(self, tenant: str, file_id: str) -> str:
        return f"{self.prefix}parts:{tenant}|{file_id}"

    def files(self, tenant: str) -> str:
        return f"{self.prefix}files:{tenant}"

    def backfill(self, tenant: str, batch_id: str) -> str:
        return f"{self.prefix}backfill:{tenant}|{batch_id}"

    def taken(self, tenant: str, batch_id: str) -> str:
        return f"{self.prefix}taken:{tenant}|{batch_id}"

    def batches(self, tenant: str) -> str:
        return f"{self.prefix}batches:{tenant}"

    def videos(self, tenant: str) -> str:
        return f"{self.prefix}videos:{tenant}"

    def worker(self, worker: str) -> str:
        return f"{self.prefix}worker:{worker}"

    def holders(self, model: str) -> str:
        return f"{self.prefix}holders:{model}"

    def curve(self, device: str, model: str, shape: str) -> str:
        return f"{self.prefix}curve:{device}|{model}|{shape}"

    def learned(self, model: str, shape: str) -> str:
        return f"{self.prefix}learned:{model}|{shape}"

    def cost(self, name: str) -> str:
        return f"{self.prefix}cost:{name}"

    def dead_letter(self, letter: str) -> str:
        return f"{self.prefix}dead:{letter}"

    def hooks(self, tenant: str) -> str:
        return f"{self.prefix}hooks:{tenant}"

    def hook_due(self, host: str) -> str:
        return f"{self.prefix}hook_due:{host}"

    def delivery(self, delivery_id: str) -> str:
        return f"{self.prefix}delivery:{delivery_id}"

    def deliveries(self, tenant: str) -> str:
        return f"{self.prefix}deliveries:{tenant}"

    def apikey(self, key_id: str) -> str:
        return f"{self.prefix}apikey:{key_id}"

    def rate(self, tenant: str) -> str:
        return f"{self.prefix}rate:{tenant}"

    def held(self, tenant: str) -> str:
        return f"{self.prefix}held:{tenant}"

    def bounded(self, name: str) -> bool:
        """Return whether the key may be without a TTL whatever it holds."""
        return _BOUNDED.fullmatch(name.removeprefix(self.prefix)) is not None
