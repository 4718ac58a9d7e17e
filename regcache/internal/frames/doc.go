// Package frames tells whether a range of addresses still means the physical pages that
// it meant earlier. Only tests use it, on Linux, with CAP_SYS_ADMIN: it is how they see that
// a registration is stale.
package frames
