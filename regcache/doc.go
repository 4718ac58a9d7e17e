// Package regcache keeps memory registered with RDMA devices, so that a
// buffer which is sent again costs a table look-up instead of a registration.
//
// Registering pins pages and writes their physical addresses into the device.
// A cached registration is therefore right only as long as the addresses still
// mean the same pages, and a cache that is wrong once corrupts data silently.
// The rule of this package is that every hit has a validator: the Go object that
// was registered still lives, or the owner of the memory has declared it stable,
// or the kernel reports changes of the mapping.
// Memory for which there is no validator is not registered at all: Acquire returns
// ErrUnknownMemory and the provider copies through an Arena.
//
// # For programs
//
// No program has to call any of this. The following may help one that sends or receives large buffers
// over RDMA (docs/MEMORY.md):
//
//   - DefaultArena().Get(n) returns a buffer of n bytes, which stays registered after its first use
//     for as long as a connection that has used it exists. DefaultArena().BufferPool(n) is a pool
//     of such slices. SetArenaLimit bounds their memory, in bytes. When the arena is used up,
//     Get's error matches syscall.ENOBUFS, and the pool returns ordinary slices.
//   - Declare and Watch are for memory that the program has mapped itself.
//   - DefaultBudget().Stats() counts registrations, and SetLimits bounds what stays
//     registered, in bytes and in registrations.
//
// All of these may be called concurrently.
//
// # For providers
//
// Everything else: one Cache for each protection domain, all within the Budget of the process. The
// package contains no protocol and no device, and never reads or writes the memory that it registers.
//
//	registrar.go  the device, as the provider gives it
//	cache.go      Cache: hit, miss, exposure
//	user.go       who uses a cache together, and what goes with each
//	index.go      look-up by address, without a lock
//	promote.go    what is put into the cache, and how much around it;
//	              seen.go  which memory is used again
//	register.go   calls of the device;  drop.go  the way out
//	region.go     Region: in use, released, invalid;  region_set.go  waiting for all of them
//	budget.go     what caches may keep, eviction;  limits_*.go  what the process may have
//	memory.go     kinds of memory;  validator.go  what shows that a region is still right, for each:
//	              heap.go, global.go, range.go (declared), watch_*.go (userfaultfd)
//	arena.go      memory that the library owns;  buffer.go  buffers of it for callers;
//	              buffer_pool.go  as slices, for code that takes a pool of those
package regcache
