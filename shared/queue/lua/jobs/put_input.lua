-- NEEDS footprint
-- Store an input image's record and the expiry of its object. A known record is kept, its time starts again.
-- args     tenant, input_id, ref, ttl_ms, name, bytes
--          `name`: of the object, below the input's id; `bytes`: of the object
-- Returns  {'ok' | 'quota', the stored record | name of the quota that is used up}
local tenant, name, ttl = args.tenant, key.input(args.tenant, args.input_id), args.ttl_ms
local known = redis.call('HMGET', name, 'ref', 'object', 'size', 'live')
local ref, object, size = args.ref, args.name, footprint.of_input(args.ref, args.bytes)
if known[1] then
  ref, object, size = known[1], known[2] or '', known[3] or ''
else
  local quota = footprint.exceeded(footprint.read(tenant), footprint.numbers(size))
  if quota then return {'quota', quota} end
  redis.call('HSET', name, 'ref', ref, 'object', object, 'size', size)
end
if (tonumber(known[4] or nil) or 0) > 0 then redis.call('PERSIST', name)
else redis.call('PEXPIRE', name, ttl) end
redis.call('ZADD', key.inputs(tenant), 'NX', whole(clock_ms()), args.input_id)
-- The row names the object: an image stored again while its old object is being deleted has its own row.
local row = 'input|' .. tenant .. '|' .. args.input_id .. '|' .. object .. '|' .. size
local due, set = clock_ms() + ttl + 60000, tonumber(redis.call('ZSCORE', key.retention, row) or nil)
if not set or set < due then redis.call('ZADD', key.retention, whole(due), row) end
if not known[1] then footprint.change(tenant, '', size) end
return {'ok', ref}
