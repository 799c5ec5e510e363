"""What the Redis tier asks the server to do in one step: admit a record within the budgets, and keep the index of them.

Under one namespace P: P r:<key> the record, P facts <key> its size, bias and owner, P tenants bytes of each, P keepers
those with a bias to stay, P all the keys by last use, P used:<tenant> and P kept:<tenant> the same for one tenant.
"""

from __future__ import annotations

_COMMON = """
local P = KEYS[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function count(sums, tenant, nbytes)
  local whole = string.format('%d', nbytes)  -- as a number it may be written as -0, or with an exponent
  if redis.call('HINCRBY', P .. sums, tenant, whole) <= 0 then redis.call('HDEL', P .. sums, tenant) end
end

local function forget(key)
  local fact = redis.call('HGET', P .. 'facts', key)
  if fact then
    local nbytes, kept, tenant = string.match(fact, '^(%d+) (%d) (.*)$')
    redis.call('HDEL', P .. 'facts', key)
    redis.call('ZREM', P .. 'all', key)
    if nbytes then
      count('tenants', tenant, -nbytes)
      redis.call('ZREM', P .. (kept == '1' and 'kept:' or 'used:') .. tenant, key)
      if kept == '1' then count('keepers', tenant, -nbytes) end
    end
  end
  return redis.call('UNLINK', P .. 'r:' .. key)
end

local function note(key, tenant, nbytes)
  redis.call('HSET', P .. 'facts', key, nbytes .. ' 0 ' .. tenant)
  count('tenants', tenant, nbytes)
  redis.call('ZADD', P .. 'all', now, key)
  redis.call('ZADD', P .. 'used:' .. tenant, now, key)
end

local function bytes_of(tenant) return tonumber(redis.call('HGET', P .. 'tenants', tenant) or '0') end

local function drop_oldest(tenant)
  local key = redis.call('ZRANGE', P .. 'used:' .. tenant, 0, 0)[1]
  key = key or redis.call('ZRANGE', P .. 'kept:' .. tenant, 0, 0)[1]
  if key then forget(key) return 1 end
  redis.call('HDEL', P .. 'tenants', tenant)
  return 0
end

local function largest(sums)
  local found, most, all, total = nil, -1, redis.call('HGETALL', P .. sums), 0
  for i = 1, #all, 2 do
    local n = tonumber(all[i + 1])
    total = total + n
    if n > most then found, most = all[i], n end
  end
  return found, total
end

local function make_kept(key, tenant, nbytes, budget)
  if nbytes > budget then return end
  local who, total = largest('keepers')
  while who and total + nbytes > budget do
    local old = redis.call('ZRANGE', P .. 'kept:' .. who, 0, 0, 'WITHSCORES')
    if old[1] then
      local size = string.match(redis.call('HGET', P .. 'facts', old[1]) or '0 1 ', '^(%d+)')
      redis.call('ZREM', P .. 'kept:' .. who, old[1])
      redis.call('ZADD', P .. 'used:' .. who, old[2], old[1])
      redis.call('HSET', P .. 'facts', old[1], size .. ' 0 ' .. who)
      count('keepers', who, -size)
    else
      redis.call('HDEL', P .. 'keepers', who)
    end
    who, total = largest('keepers')
  end
  redis.call('ZREM', P .. 'used:' .. tenant, key)
  redis.call('ZADD', P .. 'kept:' .. tenant, now, key)
  redis.call('HSET', P .. 'facts', key, nbytes .. ' 1 ' .. tenant)
  count('keepers', tenant, nbytes)
end
"""

# key, record, tenant, retain, then the budgets of all, of a tenant and of what is retained, and the time to live in ms.
PUT = (
    _COMMON
    + """
local key, data, tenant, ttl = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[8])
local nbytes, gone = #data, 0
-- Changes nothing, but is refused by a server without memory; behind another write the SET below would not be.
redis.call('SETRANGE', P .. 'full', 0, '')
for _, old in ipairs(redis.call('ZRANGEBYSCORE', P .. 'all', '-inf', now - ttl, 'LIMIT', 0, 64)) do forget(old) end
forget(key)
while bytes_of(tenant) + nbytes > tonumber(ARGV[6]) do
  if bytes_of(tenant) == 0 then return {-1, 0} end
  gone = gone + drop_oldest(tenant)
end
local who, total = largest('tenants')
while who and total + nbytes > tonumber(ARGV[5]) do
  gone = gone + drop_oldest(who)
  who, total = largest('tenants')
end
redis.call('SET', P .. 'r:' .. key, data, 'PX', ttl)
note(key, tenant, nbytes)
if ARGV[4] == '1' then make_kept(key, tenant, nbytes, tonumber(ARGV[7])) end
return {gone, redis.call('HLEN', P .. 'facts')}
"""
)

# The time to live in ms, then keys that were used; those that are there and not in the index come back.
TOUCH = (
    _COMMON
    + """
local unknown = {}
for i = 2, #ARGV do
  local key = ARGV[i]
  local fact = redis.call('HGET', P .. 'facts', key)
  if redis.call('PEXPIRE', P .. 'r:' .. key, ARGV[1]) == 0 then forget(key)
  elseif not fact then unknown[#unknown + 1] = key
  else
    local kept, tenant = string.match(fact, '^%d+ (%d) (.*)$')
    redis.call('ZADD', P .. 'all', now, key)
    if tenant then redis.call('ZADD', P .. (kept == '1' and 'kept:' or 'used:') .. tenant, now, key) end
  end
end
return unknown
"""
)

# Pairs of key and tenant, to be known if they are there.
NOTE = (
    _COMMON
    + """
for i = 1, #ARGV, 2 do
  local nbytes = redis.call('STRLEN', P .. 'r:' .. ARGV[i])
  if nbytes > 0 and redis.call('HEXISTS', P .. 'facts', ARGV[i]) == 0 then note(ARGV[i], ARGV[i + 1], nbytes) end
end
return 0
"""
)

FORGET = _COMMON + "return forget(ARGV[1])\n"

USAGE = """
local total = 0
for _, n in ipairs(redis.call('HVALS', KEYS[1] .. 'tenants')) do total = total + tonumber(n) end
return {redis.call('HLEN', KEYS[1] .. 'facts'), total}
"""

SCRIPTS = (PUT, TOUCH, NOTE, FORGET, USAGE)
