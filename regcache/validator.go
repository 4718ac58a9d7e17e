package regcache

// A validator shows, at every hit, that the addresses of a region still mean
// the pages that were registered. Cache.lookup asks it. There is one implementation for each kind:
// objectLives (heap.go), always (global.go), and Range (range.go).
type validator interface {
	// valid reports whether the mapping is unchanged. It runs at every hit, so it
	// neither allocates nor locks. The hit takes its reference first, so that whoever
	// makes it false and then looks at the references misses no user.
	valid() bool

	// attach makes a region depend on the validator. When the memory goes, valid turns
	// false at once, and later the region is taken out of its cache.
	attach(*Region)

	// detach undoes attach, after the device has deregistered the region or has
	// failed to, with the error given.
	detach(*Region, error)
}
