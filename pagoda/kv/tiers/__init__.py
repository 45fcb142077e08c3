"""The tiers below the device: records of bytes, wherever there is room for them.

             Record(id, bytes, owner, expiry, lease)                  what a crash can lose
    hierarchy ──┬──> dram     one slab of host memory                 everything
       ^        ├──> shared   one memory file, many processes         the records being written by the one that died
       │        ├──> disk     log of segments on a local disk         the same; a power cut: also what the kernel had
       │        │                                                     not yet written back (there is no fsync)
       │        ├──> object   packs of records: S3, GCS, Azure, a folder   batches whose put had not returned
       │        └──> redis    Redis or Valkey                         what that server loses
       └─ one outcome per record: Stored, Found, Missing, Corrupt, Rejected, Failed

Only cache entries can be lost: a record that does not verify is a miss, counted by reason, and is never served.

Who owns what: a tier owns its bytes, its budget and its eviction order; the caller owns the buffers it reads into; the
hierarchy above decides what goes where, and moves it. Tiers know neither blocks nor pools, tenants nor each other:
whose a record is, is a tag to them, for shares and purges. A record whose lease runs is never dropped to make room.

Read `records` (what goes in and comes out), `base` (the protocol and its rules), then any one tier. `fake` has a tier
in plain memory and faults around any tier, for tests; `encrypted` seals the records of any tier; `accounts` has the
owners' shares; `spec` opens a tier from its one-line description.
"""
