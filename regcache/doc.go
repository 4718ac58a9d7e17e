// Package regcache keeps memory registered with RDMA devices, so that a
// buffer which is sent again costs a table look-up instead of a registration.
//
// Registering pins pages and writes their physical addresses into the device.
// A cached registration is therefore right only as long as the addresses still
// mean the same pages, and a cache that is wrong once corrupts data silently.
// The rule of this package is that every hit carries a proof (see proof): the
// Go object that was registered still lives, or the owner of the memory has
// declared it stable, or the kernel reports changes of the mapping.
// Memory for which there is no proof is not registered at all: Acquire says
// ErrUnknownMemory and the provider copies through an Arena.
//
// Providers call it: one Cache for each protection domain, all of them within
// the Budget of the process. The package knows no protocol and no device; it
// never reads or writes the memory it registers.
//
//	registrar.go  the device, as the provider gives it
//	cache.go      Cache, Region: hit, miss, exposure, release
//	index.go      look-up by address, without a lock
//	budget.go     limits of the process, eviction;  seen.go  which memory is used again
//	memory.go     kinds of memory, and the proof for each:
//	              heap.go, global.go, range.go (declared), watch_*.go (userfaultfd)
//	arena.go      memory that the library owns; buffers for callers
//	cachetest     the test that a provider runs on a real device
package regcache
