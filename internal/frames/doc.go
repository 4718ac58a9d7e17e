// Package frames compares the physical pages that a range of addresses means with those
// that it meant earlier. Only tests use it, on Linux, with CAP_SYS_ADMIN: it is how they see that
// a registration is stale.
package frames
