package regcache

// A validator shows, at every hit, that the addresses of a region still mean the pages that were
// registered. Cache.lookup calls it. There is one implementation for each kind of memory: objectLives
// (heap.go), always (global.go), and Range (range.go).
type validator interface {
	// valid reports whether the mapping is unchanged. It runs at every hit, so it neither allocates nor
	// locks. A hit takes its reference before it calls valid, so whoever makes valid false and then
	// reads the references misses no user.
	valid() bool

	// attach makes a region depend on the validator. When the memory goes, valid turns false at once,
	// and later the region is taken out of its cache.
	attach(*Region)

	// detach undoes attach, after the device has deregistered the region or has failed to, with its
	// error.
	detach(*Region, error)
}
